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
    empty = program.with_suffix(".c")
    empty.write_text("int main(void) { return 0; }\n")
    trial = [*find_compiler(), *SANITIZERS, str(empty), "-o", str(program)]
    has_them = subprocess.run(trial, capture_output=True, check=False).returncode == 0
    if not has_them:
        print("built without sanitizers: this compiler has none")
    sanitizers = SANITIZERS if has_them else ()
    command = [*find_compiler(), *_FLAGS, *sanitizers]
    subprocess.run([*command, *map(str, sources), *flags, "-o", str(program)], check=True)
    return program


def run_under(
    sanitizers: str, program: Path, sources: Iterable[Path], *flags: str, arguments: Iterable[str]
) -> str:
    """Build a program with one kind of sanitizers, run it and return its output; skip without them."""
    empty = program.with_suffix(".c")
    empty.write_text("int main(void) { return 0; }\n")
    under = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-pthread"]
    trial = [*find_compiler(), *under, str(empty), "-o", str(program)]
    if subprocess.run(trial, capture_output=True, check=False).returncode:
        pytest.skip(f"this compiler has no -fsanitize={sanitizers}")
    command = [*find_compiler(), *_FLAGS, *under]
    subprocess.run([*command, *map(str, sources), *flags, "-o", str(program)], check=True)
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
