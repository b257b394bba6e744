"""Which modules may import torch, and what the package exports."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memfit

PACKAGE = Path(memfit.__file__).parent

NEEDS_TORCH = {
    "arenas",
    "card",
    "estimating",
    "ghost",
    "graph",
    "injection",
    "integrations",
    "recording",
    "run",
    "strategies",
    "train",
    "verification",
    "watching",
}
"""Folders whose modules may import torch. Every other file and folder must be importable without it."""


def modules_without_torch():
    """Yield the dotted name of every module outside the folders that need torch."""
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        if parts[1] not in {*NEEDS_TORCH, "__main__"}:
            yield ".".join(parts).removesuffix(".__init__")


def run_python(code):
    """Run code in a fresh interpreter and return its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("folder", sorted(NEEDS_TORCH))
def test_folders_that_need_torch_exist(folder):
    assert (PACKAGE / folder).is_dir()


@pytest.mark.process
def test_modules_outside_these_folders_do_not_import_torch():
    culprits = run_python(
        "import importlib, sys\n"
        f"for name in {list(modules_without_torch())}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(print(name))\n"
    )
    assert culprits == ""


@pytest.mark.process
@pytest.mark.parametrize(
    "files",
    [
        pytest.param("arenas/*.py", marks=pytest.mark.slow),
        "report/**/*.py",
        pytest.param("train/progress_bar.py", marks=pytest.mark.slow),
        pytest.param("train/**/*.py", marks=pytest.mark.slow),
        pytest.param("watching/*.py", marks=pytest.mark.slow),
    ],
)
def test_imports_leave_the_generator_of_python_to_the_script(files):
    """Importing rich draws from it. A script that seeds before its first engine would read other samples."""
    modules = [
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted(PACKAGE.glob(files))
    ]
    culprits = run_python(
        "import importlib, random, torch\n"
        f"for name in {modules}:\n"
        "    before = random.getstate()\n"
        "    importlib.import_module(name)\n"
        "    if random.getstate() != before: print(name)\n"
    )
    assert culprits == ""


def test_rich_is_imported_where_the_generator_of_python_is_restored():
    importers = {
        file.relative_to(PACKAGE).parts[0]
        for file in PACKAGE.rglob("*.py")
        if re.search(r"^\s*(from|import) rich\b", file.read_text(), re.MULTILINE)
    }
    assert importers == {
        "cli",
        "report",
        "train",
    }  # train's progress bar restores it itself


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments", [["--help"], ["dry-run", "--help"], ["record", "--help"], ["--version"], ["gpus"]]
)
def test_the_command_line_works_without_torch(arguments):
    printed = run_python(
        "import sys\n"
        "from memfit.cli.main import main\n"
        f"sys.argv = ['memfit', *{arguments}]\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    assert printed


@pytest.mark.process
def test_python_m_memfit_is_the_same_command():
    as_module = subprocess.run(
        [sys.executable, "-m", "memfit", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "dry-run" in as_module


def test_type_checkers_see_the_exported_names():
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    imported = [name for line in stub.body for name in line.names]
    assert [name.asname for name in imported] == [name.name for name in imported]  # which exports them
    integrations = {"accelerate", "lightning", "mmengine", "transformers"}
    assert sorted(name.name for name in imported) == sorted({*memfit.__all__, *integrations})


@pytest.mark.parametrize("name", sorted({*memfit.__all__} - {"__version__"}))
def test_an_exported_name_is_defined_in_memfit(name):
    assert getattr(memfit, name).__module__.startswith("memfit.")


def test_a_name_that_is_not_exported_raises_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        memfit.no_such_name  # noqa: B018


@pytest.mark.process
def test_importing_memfit_imports_none_of_its_modules():
    loaded = run_python("import memfit, sys; print(*(m for m in sys.modules if m.startswith('memfit.')))")
    assert loaded.split() == []


def imports_of_own_package(file):
    """Return names that a module imports from the `__init__` of its own package; submodules do not count."""
    package = file.parent.relative_to(PACKAGE.parent)
    dotted = ".".join(package.parts)
    return [
        alias.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == dotted
        for alias in node.names
        if not (file.parent / f"{alias.name}.py").exists() and not (file.parent / alias.name).is_dir()
    ]


def test_no_module_imports_from_its_own_package():
    """import-linter compares siblings alone: a circle between a package and its own module escapes it."""
    files = (file for file in PACKAGE.rglob("*.py") if file.name != "__init__.py")
    found = {
        str(file.relative_to(PACKAGE)): names for file in files if (names := imports_of_own_package(file))
    }
    assert found == {}


def test_the_package_lists_what_it_offers():
    """As a console completes ``memfit.``."""
    assert {*memfit.__all__, "__doc__"} <= {*dir(memfit)}
