"""House rules that no linter checks: short files, small ones, and class names that mean one thing."""

import ast
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 400
MAX_BYTES = 1 << 20
LONGER = {
    "benchmarks/accuracy/rows.toml": "a table: one entry for each published measurement",
    "src/memfit/devices.toml": "a table: one entry for each GPU, every figure with its source",
}
ENDINGS = {".c", ".css", ".h", ".html", ".js", ".py", ".toml"}


def source_files():
    """Return the files of the repository that are code, as paths from its root."""
    folders = ("src", "tests", "benchmarks", "examples", "docs")
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS)
    return sorted(str(path.relative_to(ROOT)) for path in found)


def test_no_file_except_tables_of_data_is_longer_than_400_lines():
    lines = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in source_files()}
    assert lines
    assert {name for name, count in lines.items() if count > MAX_LINES} == set(LONGER)


@pytest.mark.process
def test_what_git_tracks_is_small():
    """A checkpoint that an example writes does not belong there: every clone would fetch it."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a clone")
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert [path.name for path in found if path.is_file() and path.stat().st_size > MAX_BYTES] == []


def test_a_class_name_means_one_thing_in_the_package():
    homes = defaultdict(list)
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}: {node.name}")
    assert homes
    assert [places for places in homes.values() if len(places) > 1] == []
