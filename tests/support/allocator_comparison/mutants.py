"""Mutants of memfit's allocator: each changes one rule, as listed in ``mutants.toml``."""

import shutil
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, util
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import NamedTuple
from unittest import mock

from memfit.allocator import compiled_allocator
from memfit.native_build import compile_c_folder

# In import order: each module imports only those before it.
_MODULES = (
    "memfit.allocator.block_and_segment_sizes",
    *(
        f"support.reference_allocator.{name}"
        for name in (
            "device_memory",
            "expandable_segment",
            "blocks",
            "stream_events",
            "expandable_blocks",
            "segments",
            "reclaim",
            "caching_allocator",
        )
    ),
)
_TABLE = Path(__file__).with_name("mutants.toml")


class Mutant(NamedTuple):
    """A change to one rule."""

    what: str
    module: str
    """Name of a module of the reference, of ``block_and_segment_sizes``, or of one of the C files."""
    line: str
    """The original code, which occurs once in the module."""
    instead: str
    """The code that replaces it."""

    @property
    def compiled(self) -> bool:
        """Whether the changed rule is in a C file."""
        return self.module.endswith((".c", ".h"))


def mutants() -> tuple[list[Mutant], dict[str, str]]:
    """Return all mutants, and the equivalent ones by ``what``, each with the reason."""
    table = tomllib.loads(_TABLE.read_text())
    return [Mutant(*row) for row in table["mutants"]], table["equal"]


@contextmanager
def mutated(mutant: Mutant) -> Iterator[ModuleType]:
    """Yield the mutant's module ``caching_allocator``; the real modules stay unchanged.

    Raises:
        ValueError: there is no such module, or the original code does not occur in it exactly once.
    """
    if mutant.module not in {name.rpartition(".")[2] for name in _MODULES}:
        raise ValueError(f"{mutant.what!r}: no module {mutant.module!r}. Update it in {_TABLE.name}.")
    real = {name: import_module(name) for name in _MODULES}
    try:
        for name in _MODULES:
            package, _, module = name.rpartition(".")
            setattr(sys.modules[package], module, _changed(name, mutant if module == mutant.module else None))
        yield sys.modules[_MODULES[-1]]
    finally:
        sys.modules.update(real)
        for name in _MODULES:
            package, _, module = name.rpartition(".")
            setattr(sys.modules[package], module, real[name])


@contextmanager
def mutated_c(mutant: Mutant) -> Iterator[None]:
    """Make replays use the compiled allocator with the mutant's change.

    Raises:
        ValueError: the original code does not occur exactly once.
    """
    with TemporaryDirectory() as folder:
        sources = Path(shutil.copytree(compiled_allocator.LIBRARY.sources, Path(folder) / "c"))
        changed = sources / mutant.module
        changed.write_text(_replaced(mutant, changed.read_text()))
        library = compiled_allocator.LIBRARY.open(compile_c_folder(sources, Path(folder) / "mutant.so"))
        with mock.patch.object(compiled_allocator, "load", return_value=library):
            yield


def _replaced(mutant: Mutant, source: str) -> str:
    times = source.count(mutant.line)
    if times != 1:
        raise ValueError(
            f"{mutant.what!r}: {mutant.line!r} occurs {times} times in {mutant.module}. "
            f"Update it in {_TABLE.name}."
        )
    return source.replace(mutant.line, mutant.instead)


def _changed(name: str, mutant: Mutant | None) -> ModuleType:
    spec = util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"{name} has no source.")
    source = Path(spec.origin).read_text()
    if mutant is not None:
        source = _replaced(mutant, source)
    module = util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)  # noqa: S102 - our own source
    return module
