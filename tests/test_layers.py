"""What may be imported where: the command line starts without torch, traces are read without it."""

import subprocess
import sys
from pathlib import Path

import pytest

import memfit

PACKAGE = Path(memfit.__file__).parent
PUBLIC = {
    "Accumulation",
    "Callback",
    "Checkpointing",
    "Configuration",
    "EarlyStopping",
    "Engine",
    "Job",
    "LossScale",
    "MemfitError",
    "Offload",
    "OptimizerState",
    "Plan",
    "Precision",
    "ProgressBar",
    "Saving",
    "StepResult",
    "apply",
    "arena",
    "auto_fp16",
    "configure",
    "diagnose",
    "diff",
    "dry_run",
    "estimate",
    "explain",
    "force_fp32",
    "pack",
    "read",
    "record",
    "replay",
    "revert",
    "summarize",
    "synthetic_batch",
    "watch",
    "write_snapshot",
}

NEEDS_TORCH = {
    "arenas",
    "card",
    "estimating",
    "ghost",
    "graph",
    "recording",
    "run",
    "strategies",
    "train",
    "watching",
}
"""Folders whose modules may import torch. Every other file and folder must be importable without it."""


def modules_without_torch():
    """Yield the dotted name of every module outside the folders that need torch."""
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        if parts[1] not in {*NEEDS_TORCH, "__main__"}:
            yield ".".join(parts).removesuffix(".__init__")


def python(code):
    """Run a piece of Python in a fresh interpreter and return what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("folder", sorted(NEEDS_TORCH))
def test_folders_that_need_torch_exist(folder):
    assert (PACKAGE / folder).is_dir()


def test_modules_outside_these_folders_import_no_torch():
    culprits = python(
        "import importlib, sys\n"
        f"for name in {list(modules_without_torch())}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(print(name))\n"
    )
    assert culprits == ""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["dry-run", "--help"], ["record", "--help"], ["--version"], ["gpus"]]
)
def test_the_command_line_answers_without_torch(arguments):
    printed = python(
        "import sys\n"
        "from memfit.cli.main import main\n"
        f"sys.argv = ['memfit', *{arguments}]\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    assert printed


def test_python_m_memfit_is_the_same_command():
    as_module = subprocess.run(
        [sys.executable, "-m", "memfit", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "dry-run" in as_module


def test_the_exported_names_are_exactly_the_public_list():
    assert set(memfit.__all__) == PUBLIC | {"__version__"}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_an_exported_name_leads_to_memfits_own_code(name):
    assert getattr(memfit, name).__module__.startswith("memfit.")


def test_a_name_that_is_not_exported_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        memfit.no_such_name  # noqa: B018


def test_importing_the_package_imports_nothing_else_of_it():
    loaded = python("import memfit, sys; print(*(m for m in sys.modules if m.startswith('memfit.')))")
    assert loaded.split() == []
