"""C code built with warnings as errors and, where the compiler has them, under sanitizers."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from memfit.native_build import COMPILE_FLAGS, find_compiler

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover")


def build(program: Path, sources: Iterable[Path], *flags: str) -> Path:
    """Build a program of C files; say so if it could not be under sanitizers."""
    empty = program.with_suffix(".c")
    empty.write_text("int main(void) { return 0; }\n")
    trial = [*find_compiler(), *SANITIZERS, str(empty), "-o", str(program)]
    has_them = subprocess.run(trial, capture_output=True, check=False).returncode == 0
    if not has_them:
        print("without sanitizers: this compiler has none")
    sanitizers = SANITIZERS if has_them else ()
    command = [*find_compiler(), *COMPILE_FLAGS, "-Werror", "-g", *sanitizers]
    subprocess.run([*command, *map(str, sources), *flags, "-o", str(program)], check=True)
    return program


def run_under(
    sanitizers: str, program: Path, sources: Iterable[Path], *flags: str, arguments: Iterable[str]
) -> str:
    """Build a program under one kind of sanitizers and run it; return what it prints. Skips without them."""
    empty = program.with_suffix(".c")
    empty.write_text("int main(void) { return 0; }\n")
    under = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-pthread"]
    trial = [*find_compiler(), *under, str(empty), "-o", str(program)]
    if subprocess.run(trial, capture_output=True, check=False).returncode:
        pytest.skip(f"this compiler has no -fsanitize={sanitizers}")
    command = [*find_compiler(), *COMPILE_FLAGS, "-Werror", "-g", *under]
    subprocess.run([*command, *map(str, sources), *flags, "-o", str(program)], check=True)
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
