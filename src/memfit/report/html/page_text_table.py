"""What keeps a page safe: it loads nothing, and every text from a trace is sanitized, and stored once.

The texts contain no control or bidirectional characters, no home folder, and with ``source=False`` no file
names. The page itself only creates text nodes from them.
"""

import base64
import hashlib
import re
from html import escape
from importlib.resources import files

import numpy as np

from memfit.analysis.block_columns import Numbers
from memfit.report.escape_control_characters import escaped
from memfit.report.places_in_words import short_path

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
"""Replaces a file name."""


class PageTextTable:
    """A table of the texts that a page shows, each stored once."""

    def __init__(self, *, source: bool) -> None:
        self.source = source
        self._index: dict[str, int] = {}

    def in_order(self) -> tuple[list[str], Numbers]:
        """Return the texts in alphabetical order, the empty one last, and the new position of each index."""
        table = list(self._index)
        order = sorted(range(len(table)), key=lambda index: (not table[index], table[index]))
        return [table[index] for index in order], np.argsort(order)

    def shown(self, text: str) -> str:
        """Return text as the page shows it: escaped, without home folders and, without source, file names."""
        text = _HOMES.sub("~", escaped(short_path(text), whole=True))
        return text if self.source else _FILES.sub(NO_FILE, text)

    def html(self, text: str) -> str:
        """Return text as HTML that shows it."""
        return escape(self.shown(text))

    def index(self, text: str) -> int:
        """Sanitize a text, add it to the table, and return its index."""
        return self._index.setdefault(self.shown(text), len(self._index))

    def line(self, text: str) -> int:
        """Return the index of a ``file:line``; without source, that of the empty text."""
        return self.index(text if self.source else "")


def read_page_asset(name: str) -> str:
    """Return the text of a file in ``assets``."""
    return files("memfit.report.html").joinpath("assets", name).read_text(encoding="utf-8")


def content_security_policy(style: str, script: str = "") -> str:
    """Return a security policy that allows only this style and this script, or no script.

    Source: W3C, Content Security Policy Level 3, hashes (2.3.1) and ``default-src`` (6.1.3).

    >>> content_security_policy("p { margin: 0 }")[:59]
    "default-src 'none'; script-src 'none'; style-src 'sha256-7I"
    """
    scripts = f"'{_hash(script)}'" if script else "'none'"
    return (
        f"default-src 'none'; script-src {scripts}; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
