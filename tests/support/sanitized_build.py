"""Build C code with warnings as errors and, where the compiler has them, with sanitizers."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from memfit.native_build import COMPILE_FLAGS, SHARED_C, find_compiler

_FLAGS = (*COMPILE_FLAGS, "-Werror", "-g", f"-I{SHARED_C}")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover")


def build(program: Path, sources: Iterable[Path], *flags: str) -> Path:
    """Build a program of C files; print a line if the compiler has no sanitizers."""
    has_them = _accepts(program, SANITIZERS)
    if not has_them:
        print("built without sanitizers: this compiler has none")
    return _build(program, sources, *(SANITIZERS if has_them else ()), *flags)


def run_check(program: Path, sources: Iterable[Path], *flags: str, arguments: Iterable[str]) -> str:
    """Build a program as ``build`` does, run it and return its output."""
    return _run(build(program, sources, *flags), arguments)


def run_under(
    sanitizers: str, program: Path, sources: Iterable[Path], *flags: str, arguments: Iterable[str]
) -> str:
    """Build a program with one kind of sanitizers, run it and return its output; skip without them."""
    under = (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-pthread")
    if not _accepts(program, under):
        pytest.skip(f"this compiler has no -fsanitize={sanitizers}")
    return _run(_build(program, sources, *under, *flags), arguments)


def _accepts(program: Path, flags: Iterable[str]) -> bool:
    empty = program.with_suffix(".c")
    empty.write_text("int main(void) { return 0; }\n")
    trial = [*find_compiler(), *flags, str(empty), "-o", str(program)]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


def _build(program: Path, sources: Iterable[Path], *flags: str) -> Path:
    command = [*find_compiler(), *_FLAGS, *map(str, sources), *flags, "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def _run(program: Path, arguments: Iterable[str]) -> str:
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
