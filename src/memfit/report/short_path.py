"""Paths as a reader in the working folder would write them."""

import os
from pathlib import Path


def short_path(line: str) -> str:
    """Shorten ``file:line`` relative to the working folder, or to ``~`` in the home folder.

    >>> short_path(str(Path.cwd() / "train.py") + ":3")
    'train.py:3'
    """
    for folder, name in ((Path.cwd(), ""), (Path.home(), "~" + os.sep)):
        prefix = str(folder) + os.sep
        if line.startswith(prefix):
            return name + line.removeprefix(prefix)
    return line
