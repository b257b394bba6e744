"""Every dotted name of memfit that a file mentions exists: also those in strings, comments and docs."""

import re
from pathlib import Path

import pytest

from support.new_processes import run_python

ROOT = Path(__file__).parents[1]
ENDINGS = {".py", ".pyi", ".md", ".toml"}
HISTORY = ("CHANGELOG.md", "docs/decisions/")
"""What names things as they were."""
ON_PURPOSE = {"memfit.no_such_name", "memfit.ipynb"}  # an attribute that is missing; a file
NAME = re.compile(r"\bmemfit(?:\.[A-Za-z_]\w*)+")
MISSING = """
import importlib, sys

def exists(name):
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False

print(*(name for name in open(sys.argv[1]).read().split() if not exists(name)))
"""


def mentioned():
    """Return the names that the repository's files mention."""
    folders = ("src", "tests", "benchmarks", "examples", "docs")
    files = [*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "Makefile"]
    files += [path for folder in folders for path in (ROOT / folder).rglob("*.*") if path.suffix in ENDINGS]
    found = set()
    for file in files:
        if not file.relative_to(ROOT).as_posix().startswith(HISTORY):
            found |= set(NAME.findall(file.read_text("utf-8")))
    return found - ON_PURPOSE


@pytest.mark.process
def test_every_dotted_name_of_memfit_exists(tmp_path):
    names = mentioned()
    assert "memfit.train.engine" in names
    (tmp_path / "names").write_text("\n".join(names))
    assert run_python("-c", MISSING, tmp_path / "names").stdout == "\n"
