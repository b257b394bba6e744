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
    "benchmarks/times.toml": "a table: one entry for each published step time",
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


def test_benchmarks_import_only_names_that_exist():
    """No other check reads them: mypy is for the package, and most benchmarks take too long for the tests."""
    missing = [
        f"{path.relative_to(ROOT)}: {node.module}.{alias.name}"
        for folder in (ROOT / "benchmarks", ROOT / "benchmarks" / "gpu")
        for path in sorted(folder.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and (home := _home(node.module, folder))
        for alias in node.names
        if not (_home(f"{node.module}.{alias.name}", folder) or alias.name in _names(home))
    ]
    assert missing == []


def _home(module: str, folder: Path) -> Path | None:
    """Return the file of a module of the package or beside a benchmark; None for others."""
    stem = Path(*module.split("."))
    places = (root / stem for root in (ROOT / "src", folder))
    names = ("__init__.pyi", "__init__.py")  # the package lists its names in the first
    files = (
        file for place in places for file in (place.with_suffix(".py"), *(place / name for name in names))
    )
    return next(filter(Path.is_file, files), None)


def _names(path: Path) -> set[str]:
    """Return what a module defines or imports at its top level, and what it lists as its own."""
    tree = ast.parse(path.read_text())
    names = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and path.name == "__init__.py"
    }
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
            case ast.Assign(targets=targets):
                names |= {
                    each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
                }
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names
