"""What ``memfit.arena()`` returns: training steps at planned offsets.

    a kind of step             what the arena does
    ───────────────────────    ────────────────────────────────────────────────────────
    new                        records it
    recorded twice the same    plans it
    planned                    places it: the k-th allocation gets its offset
    differs from its plan      warns, drops the plan, and leaves the rest of the step to the default allocator

No live tensor is ever overwritten: an allocation gets its offset only if no live tensor overlaps it.
"""

import inspect
import os
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from memfit.arenas import arena_library
from memfit.arenas.arena_memory import ArenaMemory
from memfit.arenas.collect_excluded_outputs import ExcludedModuleOutputs
from memfit.arenas.step_plan import (
    StepKey,
    StepPlan,
    batch_signature,
    read_step_plans,
    write_step_plans,
)
from memfit.arenas.step_plan_lifecycle import MOST_DROPS, RepeatedStep
from memfit.errors import UsageError
from memfit.strategies.arena_settings import ArenaSettings
from memfit.user_lines import warn_user

if TYPE_CHECKING:
    from memfit.report.terminal.arena_report import ArenaReport

MOST_KINDS = 256
"""Number of kinds of steps that are tracked; further kinds use the default allocator."""
Running = Callable[[], Generator[None, None, None] | None]


class Arena:
    """Places the allocations of steps; a context manager that stops at its end.

    Args:
        memory: where allocations are placed; None if the arena does nothing.
        settings: which steps are placed.
        held_outputs: of the excluded modules.
        path: of the file that keeps plans, if there is one.
    """

    def __init__(
        self,
        memory: ArenaMemory | None,
        settings: ArenaSettings,
        held_outputs: ExcludedModuleOutputs,
        path: Path | None,
    ) -> None:
        self._memory = memory
        self.settings = settings
        self.is_open = True
        self._is_abandoned = False
        self._held_outputs = held_outputs
        self._path = path
        self._process = os.getpid()
        self._running: Running = lambda: None  # the generator of the last step
        self._previous: RepeatedStep | None = None  # the kind of the step right before, if that was recorded
        self._kinds: dict[StepKey, RepeatedStep] = {}
        self._begun: set[StepKey] = set()
        self._read: dict[StepKey, StepPlan] = {}  # plans of earlier runs
        self._is_full = False
        if memory is not None:
            self._read = self._plans_in_file(memory)
            self._write(memory)  # fail now if the file cannot be written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def outputs(self) -> Mapping[nn.Module | str, list[Any]]:
        """What each excluded module returned in the last step, call by call, until the next step begins.

        By module and, if it was excluded by name, by name. A parameter's name has a list of the parameter.
        """
        return self._held_outputs

    def exclude_from(self, model: nn.Module) -> None:
        """Search a model for the names that are excluded; ``Engine`` does that itself.

        Raises:
            UsageError: the model has no module, parameter or buffer of a name.
        """
        self._held_outputs.find_in(model)

    def train(self, *batch: Any) -> AbstractContextManager[None]:
        """Return a context manager for a training step, from its forward to ``optimizer.zero_grad()``.

        Args:
            batch: the step's batch, or the part of it whose shapes change: tensors, in lists, tuples and
                dictionaries. Steps with other shapes get plans of their own.

        Raises:
            UsageError: the previous step has not ended.

        >>> import memfit
        >>> model, images, planned = nn.Linear(8, 8), torch.ones(4, 8), memfit.arena(device="cpu")
        >>> with planned.train(images):
        ...     model(images).sum().backward()
        ...     model.zero_grad()
        >>> planned.close()
        """
        return self._begin("train", batch)

    def test(self, *batch: Any) -> AbstractContextManager[None]:
        """Return a context manager for an evaluation step; otherwise like ``train``."""
        return self._begin("test", batch)

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun and not ended."""
        running = self._running()  # the generator's own state is right wherever Ctrl-C interrupted it
        return running is not None and inspect.getgeneratorstate(running) != inspect.GEN_CLOSED

    def abandon_step(self, *, restarts: bool = False) -> None:
        """Leave the rest of the current step to the default allocator, and learn nothing from the step.

        What an abandoned step leaves behind would take places that the plans need for other tensors.

        Args:
            restarts: whether the step starts again, so that the outputs held so far are of no use.
        """
        self._is_abandoned = True
        if restarts:
            self._held_outputs.clear()
        if self._memory is not None:
            arena_library.load().arena_end(self._memory.arena)

    def report(self) -> "ArenaReport":
        """Return what each kind of step placed, and the memory in use; the report prints itself."""
        from memfit.report.terminal.arena_report import ArenaReport

        steps = tuple(kind.summary() for kind in self._kinds.values())
        used = () if self._memory is None else self._memory.used()
        return ArenaReport(steps, used)

    def close(self) -> None:
        """Stop placing allocations. Tensors in the arena stay valid for as long as they live.

        Raises:
            UsageError: a step has not ended.
        """
        self._check_no_step()
        self._held_outputs.clear()
        if not self.is_open:  # another arena may have its memory by now
            return
        self.is_open = False
        for kind in self._kinds.values():
            kind.free_plan()
        if self._memory is not None:
            self._memory.release_unused()
            self._memory.detach()

    def _check_no_step(self) -> None:
        if self.is_in_step:
            raise UsageError("The previous step of this arena has not ended. End its `with` block first.")

    def _begin(self, name: str, batch: tuple[Any, ...]) -> AbstractContextManager[None]:
        itself: list[Running] = []
        step = contextmanager(self._step)(name, batch, itself)
        itself.append(weakref.ref(step.gen))
        return step

    def _step(self, name: str, batch: tuple[Any, ...], itself: list[Running]) -> Generator[None, None, None]:
        self._check_no_step()
        if not self._held_outputs.has_model:
            raise UsageError(
                f"This arena excludes {', '.join(map(repr, self.settings.exclude))} by name, but has no "
                "model to search. Call arena.exclude_from(model) before the first step."
            )
        self._running, self._is_abandoned = itself[0], False
        optimizes = self.settings.optimize_train if name == "train" else self.settings.optimize_test
        is_placed = optimizes and self.is_open and os.getpid() == self._process
        with self._held_outputs.collecting():
            if self._memory is None or not is_placed:
                yield
            else:
                yield from self._placed(name, batch, self._memory)

    def _placed(self, name: str, batch: tuple[Any, ...], memory: ArenaMemory) -> Generator[None, None, None]:
        lane = memory.lane()  # first, because the arena belongs to the device of the first step
        key = self._key(name, batch, memory)
        kind = self._kind(key, memory)
        mode = kind.begin()
        handle, before, self._previous = kind.handle, self._previous, None
        try:
            arena_library.load().arena_begin(memory.arena, mode, lane, handle or None)
            yield
        finally:
            arena_library.load().arena_end(memory.arena)
        if self._is_abandoned:
            return
        if mode == arena_library.RECORDING and key.is_first:
            kind.learn_once()
            self._write(memory)
        elif mode == arena_library.RECORDING:
            is_planned = kind.learn(follows=before is kind)
            self._previous = None if is_planned else kind
            if is_planned:
                self._write(memory)
        elif mode == arena_library.PLACING and kind.check_placed():
            self._write(memory)

    def _kind(self, key: StepKey, memory: ArenaMemory) -> RepeatedStep:
        if key not in self._kinds and len(self._kinds) == MOST_KINDS:
            return self._untracked_kind(memory)
        if key not in self._kinds:
            self._kinds[key] = RepeatedStep(memory, str(key))
            if key in self._read:
                self._kinds[key].use_plan(self._read[key])
        return self._kinds[key]

    def _key(self, name: str, batch: tuple[Any, ...], memory: ArenaMemory) -> StepKey:
        device = memory.name
        is_cast = torch.is_autocast_enabled(device)
        settings = {
            "torch": str(torch.__version__),
            "grad": str(torch.is_grad_enabled()),
            "dtype": str(torch.get_default_dtype()),
            "autocast": str(torch.get_autocast_dtype(device)) if is_cast else "off",
            "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        }
        key = StepKey(name, tuple(batch_signature(batch)), tuple((settings | memory.settings()).items()))
        if self._path is None or key in self._begun:
            return key
        # The first step also creates the optimizer's state. It occurs once per run; the next run places it.
        self._begun.add(key)
        return replace(key, is_first=True)

    def _untracked_kind(self, memory: ArenaMemory) -> RepeatedStep:
        if not self._is_full:
            self._is_full = True
            warn_user(
                f"memfit.arena: the script has more than {MOST_KINDS} kinds of steps. Further kinds use the "
                "default allocator. Each new combination of the shapes passed to arena.train() counts as "
                "another kind. Pad batches to a few shapes, or pass fewer tensors.",
            )
        return RepeatedStep(memory, "", drops=MOST_DROPS)

    def _plans_in_file(self, memory: ArenaMemory) -> dict[StepKey, StepPlan]:
        return {} if self._path is None else read_step_plans(self._path, memory.alignment)

    def _write(self, memory: ArenaMemory) -> None:
        """Write this run's plans to the file; keep those of other runs."""
        if self._path is not None:
            others = {
                key: plan for key, plan in self._plans_in_file(memory).items() if key not in self._kinds
            }
            ours = {key: kind.plan for key, kind in self._kinds.items() if kind.plan}
            write_step_plans(others | ours, self._path)
