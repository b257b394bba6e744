"""``memfit.arena()``: open an arena, with three lines in the user's loop."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memfit.arenas.arena import Arena
from memfit.arenas.arena_memory import ArenaMemory, CpuArenaMemory, CudaArenaMemory
from memfit.arenas.collect_excluded_outputs import ExcludedModuleOutputs, split_excluded_modules_and_names
from memfit.errors import UsageError
from memfit.recording.recorder import installed_recorder
from memfit.strategies.arena_settings import ArenaSettings
from memfit.strategies.read_configuration import Configuration
from memfit.user_lines import warn_user

_last: dict[str, Arena] = {}  # by device; a new arena closes the one before


def arena(
    settings: Any = None,
    *,
    optimize_train: bool | None = None,
    optimize_test: bool | None = None,
    exclude: nn.Module | str | Iterable[nn.Module | str] = (),
    plans: str | Path | None = None,
    device: str | None = None,
) -> "Arena":
    """Give training steps their memory at planned offsets of one arena.

    Each kind of step is recorded until two recordings are the same. Then memfit plans an offset for each of
    its allocations, and places the steps that follow. Results are bit-for-bit the same. Each device has one
    arena at a time: creating another one closes it.

    Under ``memfit dry-run`` and ``memfit record`` the arena does nothing: they report on PyTorch's allocator.

    Args:
        settings: a configuration, or anything that ``configure`` reads, in place of the next three.
        optimize_train: whether training steps are placed, as they are by default.
        optimize_test: whether evaluation steps are placed, as they are by default.
        exclude: modules whose outputs are kept in ``Arena.outputs`` until the next step begins; or names,
            which ``Arena.exclude_from`` searches for in a model.
        plans: a file that keeps the plans for later runs, which then place their first step, too.
        device: ``cpu`` or ``cuda``; by default the GPU, if there is one.

    Raises:
        UsageError: CUDA is already in use, an argument is invalid, or a step of the arena before has not
            ended.
        UnsuitableEnvironmentError: allocations cannot be placed on this platform or with this PyTorch.
        FileFormatError: the file holds no plans.

    >>> model = torch.nn.Linear(8, 8)
    >>> with arena(device="cpu") as planned:
    ...     for _ in range(4):
    ...         with planned.train():
    ...             model(torch.ones(4, 8)).sum().backward()
    ...             model.zero_grad()
    """
    if device not in {None, "cpu", "cuda"}:
        raise UsageError(f"device={device!r} is not supported. Pass 'cpu' or 'cuda'.")
    modules, names = split_excluded_modules_and_names(exclude)
    if settings is not None:
        if (optimize_train, optimize_test, modules, names) != (None, None, [], []):
            raise UsageError(
                "memfit.arena(settings) takes optimize_train, optimize_test and exclude from the settings. "
                "Leave them out of the call."
            )
        chosen = _settings_of(settings)
    else:
        chosen = ArenaSettings(
            optimize_train=True if optimize_train is None else optimize_train,
            optimize_test=True if optimize_test is None else optimize_test,
            exclude=tuple(names),
        )
    path = None if plans is None else Path(plans)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device in _last:
        _last[device].close()
    is_used = chosen.optimize_train or chosen.optimize_test
    memory = _memory_of(device) if is_used else None
    _last[device] = made = Arena(memory, chosen, ExcludedModuleOutputs(modules, chosen.exclude), path)
    return made


def current_arena(device: str) -> "Arena | None":
    """Return the arena that is open on a device."""
    last = _last.get(device)
    return last if last is not None and last.is_open else None


def _settings_of(given: Any) -> ArenaSettings:
    if isinstance(given, ArenaSettings):
        return given
    chosen = Configuration.of(given).arena
    if chosen is None:
        raise UsageError(
            "The configuration passed to memfit.arena has no settings of the arena. Add them, for example "
            "arena = true, or call memfit.arena() to use the defaults."
        )
    return chosen


def _memory_of(device: str) -> ArenaMemory | None:
    if device == "cpu":
        return CpuArenaMemory()
    if installed_recorder() is None:
        return CudaArenaMemory()
    warn_user(
        "memfit.arena does nothing in this run: memfit is recording the script, and reports the memory that "
        "PyTorch's own allocator uses.",
    )
    return None
