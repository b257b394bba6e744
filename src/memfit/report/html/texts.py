"""Every text from a trace on its way into the page, made harmless once and kept once.

What reaches the page has no control or bidirectional character left, no home folder, and with
``source=False`` no file name. The page itself only ever makes text nodes of it.
"""

import re

import numpy as np

from memfit.report.escape import escaped
from memfit.report.html.block_columns import Numbers
from memfit.report.terminal.summary import short_path

_HOMES = re.compile(r"/(?:home|Users)/[^/\s:'\"]+(?=/|\b)|(?<![\w/.~-])/root(?=/)")
_FILES = re.compile(
    r"""
    ~?(?:/[^\s/:'"(),\[\]]+)+/?(?::\d+)?               # a path from the root or a home folder
    | [^\s:'"(),\[\]<>]*\.(?:py[xic]?|ipynb|so|c|cpp|cu|h)\b(?::\d+)?   # a source file, and its line
    | <[^<>]*>:\d+                                      # <stdin>:1, <ipython-input-3>:2
    """,
    re.VERBOSE,
)
NO_FILE = "(file)"
"""What stands where a file's name stood."""


class PageTexts:
    """A table of the texts that a page shows, each held once.

    Args:
        source: whether file names and lines may be among them.
    """

    def __init__(self, *, source: bool) -> None:
        self.source = source
        self._index: dict[str, int] = {}

    def in_order(self) -> tuple[list[str], Numbers]:
        """Return the texts by the alphabet, the empty one last, and where each index stands among them."""
        table = list(self._index)
        order = sorted(range(len(table)), key=lambda index: (not table[index], table[index]))
        return [table[index] for index in order], np.argsort(order)

    def shown(self, text: str) -> str:
        """Return text as the page may show it: inert, without home folders or, if so asked, file names."""
        text = _HOMES.sub("~", escaped(short_path(text), whole=True))
        return text if self.source else _FILES.sub(NO_FILE, text)

    def index(self, text: str) -> int:
        """Return where a text stands in the table, after making it showable."""
        return self._index.setdefault(self.shown(text), len(self._index))

    def line(self, text: str) -> int:
        """Return where a ``file:line`` stands in the table; as the empty text, if it may not be shown."""
        return self.index(text if self.source else "")
