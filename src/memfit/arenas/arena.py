"""``memfit.arena()``: training steps at planned offsets, with three lines in the user's loop.

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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from memfit.analysis.allocator_comparison import compare_settings
from memfit.arenas import native
from memfit.arenas.arena_trace import trace_of
from memfit.arenas.cpu import CpuMemory
from memfit.arenas.cuda import CudaMemory
from memfit.arenas.held_outputs import HeldOutputs
from memfit.arenas.plan_file import StepKey, read_plans, shapes, write_plans
from memfit.arenas.repeated_step import MOST_DROPS, ArenaMemory, StepKind
from memfit.arenas.step_plan import StepPlan
from memfit.devices import NO_LIMIT
from memfit.errors import UsageError
from memfit.random_state import preserve_python_state
from memfit.recording.recorder import installed
from memfit.records import Figure, Provenance, Term, Trace
from memfit.trace.trace_file import write_trace
from memfit.user_frame import warn_user

if TYPE_CHECKING:
    from memfit.report.terminal.arena import ArenaReport

MOST_LOGGED = 1 << 22
"""Requests that a history holds at most; they take 128 MiB."""
MOST_KINDS = 256
"""Number of kinds of steps that are tracked; further kinds use the default allocator."""
Running = Callable[[], Generator[None, None, None] | None]
_open: "dict[str, Arena]" = {}  # by device; a new arena closes the one before


def arena(
    *,
    optimize_train: bool = True,
    optimize_test: bool = True,
    exclude: nn.Module | Iterable[nn.Module] = (),
    plans: str | Path | None = None,
    history: bool = False,
    device: str | None = None,
) -> "Arena":
    """Give training steps their memory at planned offsets of one arena.

    Each kind of step is recorded until two recordings are the same. Then memfit plans an offset for each of
    its allocations, and places the steps that follow. Results are bit-for-bit the same. Each device has one
    arena at a time: creating another one closes it.

    Under ``memfit dry-run`` and ``memfit record`` the arena does nothing: they report on PyTorch's allocator.

    Args:
        optimize_train: whether training steps are placed.
        optimize_test: whether evaluation steps are placed.
        exclude: modules whose outputs are kept until the step ends, in ``Arena.outputs``.
        plans: a file that keeps the plans for later runs, which then place their first step, too.
        history: whether to log every allocation from now on, for ``Arena.trace``.
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
    held_outputs = HeldOutputs((exclude,) if isinstance(exclude, nn.Module) else exclude)
    path = None if plans is None else Path(plans)
    kinds = {name for name, wanted in (("train", optimize_train), ("test", optimize_test)) if wanted}
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device in _open:
        _open[device].close()
    _open[device] = made = Arena(_memory_of(device), frozenset(kinds), held_outputs, path, history=history)
    return made


def _memory_of(device: str) -> ArenaMemory | None:
    if device == "cpu":
        return CpuMemory()
    if installed() is None:
        return CudaMemory()
    warn_user(
        "memfit.arena does nothing in this run: memfit is recording the script, and reports the memory that "
        "PyTorch's own allocator uses.",
    )
    return None


class Arena:
    """What ``arena`` returns: a context manager that stops placing allocations at its end."""

    def __init__(
        self,
        memory: ArenaMemory | None,
        optimized: frozenset[str],
        held_outputs: HeldOutputs,
        path: Path | None,
        *,
        history: bool,
    ) -> None:
        self._memory = memory  # None: the arena does nothing
        self._optimized = optimized
        self._held_outputs = held_outputs
        self._path = path
        self._process = os.getpid()
        self._running: Running = lambda: None  # the generator of the last step
        self._previous: StepKind | None = None  # the kind of the step right before, if that was recorded
        self._kinds: dict[StepKey, StepKind] = {}
        self._begun: set[StepKey] = set()
        self._read: dict[StepKey, StepPlan] = {}  # plans of earlier runs
        self._is_full = False
        self._steps: list[int] = []  # length of the log when each training step ended
        if memory is not None:
            native.load().arena_log(memory.arena, MOST_LOGGED if history else 0)
            self._read = self._plans_in_file(memory)
            self._write(memory)  # fail now if the file cannot be written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def outputs(self) -> Mapping[nn.Module, list[Any]]:
        """What each excluded module returned in this step, call by call, until the step ends."""
        return self._held_outputs.outputs

    def train(self, *batch: Any) -> AbstractContextManager[None]:
        """Return a context manager for a training step, from its forward to ``optimizer.zero_grad()``.

        Args:
            batch: the step's batch, or the part of it whose shapes change: tensors, in lists, tuples and
                dictionaries. Steps with other shapes get plans of their own.

        Raises:
            UsageError: the previous step has not ended.

        >>> model, images, planned = nn.Linear(8, 8), torch.ones(4, 8), arena(device="cpu")
        >>> with planned.train(images):
        ...     model(images).sum().backward()
        ...     model.zero_grad()
        >>> planned.close()
        """
        return self._begin("train", batch)

    def test(self, *batch: Any) -> AbstractContextManager[None]:
        """Return a context manager for an evaluation step; otherwise like ``train``."""
        return self._begin("test", batch)

    def report(self) -> "ArenaReport":
        """Return what each kind of step placed, and the memory in use; the report prints itself.

        On a GPU and with a history, it also has what PyTorch's own allocator would have reserved.
        """
        with preserve_python_state():  # importing rich draws random numbers from the script's generator
            from memfit.report.terminal.arena import ArenaReport

        steps = tuple(kind.summary() for kind in self._kinds.values())
        used = () if self._memory is None else self._memory.used()
        return ArenaReport(steps, (*self._default_allocator_terms(), *used))

    def _default_allocator_terms(self) -> Iterator[Term]:
        """Yield what PyTorch's allocator would have reserved, by setting."""
        if self._memory is None or self._memory.name == "cpu" or not self._has_history:
            return
        found = compare_settings(self.trace(), "expandable_segments:True", memory=NO_LIMIT)
        for row in found.outcomes:
            name = f"reserved, {row.setting.name or 'default settings'}"
            yield Term(name, Figure(row.replay.peak_reserved, Provenance.SIMULATED, "an exact replay"))

    @property
    def _has_history(self) -> bool:
        return self._memory is not None and native.load().arena_logged_count(self._memory.arena) > 0

    def trace(self) -> Trace:
        """Return the history as a trace, for ``memfit.pack`` and ``memfit.explain``.

        Raises:
            UsageError: the arena keeps no history; it does so on request.
        """
        if self._memory is None or not self._has_history:
            raise UsageError(
                "This arena has logged no allocations. Create the arena with memfit.arena(history=True)."
            )
        rows = native.logged(self._memory.arena)
        return trace_of(rows, self._steps, self._memory.device(), is_cut=len(rows) == MOST_LOGGED)

    def write_trace(self, path: str | Path) -> None:
        """Write the history to a file: ``memfit pack run.memfit``."""
        write_trace(self.trace(), Path(path))

    def close(self) -> None:
        """Stop placing allocations. Tensors in the arena stay valid for as long as they live.

        Raises:
            UsageError: a step has not ended.
        """
        self._check_no_step()
        self._optimized = frozenset()
        for kind in self._kinds.values():
            kind.free_plan()
        if self._memory is not None:
            self._memory.release_unused()
            self._memory.detach()

    def _check_no_step(self) -> None:
        running = self._running()  # the generator's own state is right wherever Ctrl-C interrupted it
        if running is not None and inspect.getgeneratorstate(running) != inspect.GEN_CLOSED:
            raise UsageError("The previous step of this arena has not ended. End its `with` block first.")

    def _begin(self, name: str, batch: tuple[Any, ...]) -> AbstractContextManager[None]:
        itself: list[Running] = []
        step = contextmanager(self._step)(name, batch, itself)
        itself.append(weakref.ref(step.gen))
        return step

    def _step(self, name: str, batch: tuple[Any, ...], itself: list[Running]) -> Generator[None, None, None]:
        self._check_no_step()
        self._running = itself[0]
        memory = self._memory
        if memory is None or name not in self._optimized or os.getpid() != self._process:
            yield
            return
        lane = memory.lane()  # first, because the arena belongs to the device of the first step
        key = self._key(name, batch, memory)
        kind = self._kind(key, memory)
        mode = kind.begin()
        handle, before, self._previous = kind.handle, self._previous, None
        try:
            with self._held_outputs:
                native.load().arena_begin(memory.arena, mode, lane, handle or None)
                yield
        finally:
            native.load().arena_end(memory.arena)
        if name == "train":
            self._steps.append(native.load().arena_logged_count(memory.arena))
        if mode == native.RECORDING and key.is_first:
            kind.learn_once()
            self._write(memory)
        elif mode == native.RECORDING:
            is_planned = kind.learn(follows=before is kind)
            self._previous = None if is_planned else kind
            if is_planned:
                self._write(memory)
        elif mode == native.PLACING and kind.check_placed():
            self._write(memory)

    def _kind(self, key: StepKey, memory: ArenaMemory) -> StepKind:
        if key not in self._kinds and len(self._kinds) == MOST_KINDS:
            return self._untracked_kind(memory)
        if key not in self._kinds:
            self._kinds[key] = StepKind(memory, str(key))
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
        key = StepKey(name, tuple(shapes(batch)), tuple((settings | memory.settings()).items()))
        if self._path is None or key in self._begun:
            return key
        # The first step also creates the optimizer's state. It occurs once per run; the next run places it.
        self._begun.add(key)
        return replace(key, is_first=True)

    def _untracked_kind(self, memory: ArenaMemory) -> StepKind:
        if not self._is_full:
            self._is_full = True
            warn_user(
                f"memfit.arena: the script has more than {MOST_KINDS} kinds of steps. Further kinds use the "
                "default allocator. Each new combination of the shapes passed to arena.train() counts as "
                "another kind. Pad batches to a few shapes, or pass fewer tensors.",
            )
        return StepKind(memory, "", drops=MOST_DROPS)

    def _plans_in_file(self, memory: ArenaMemory) -> dict[StepKey, StepPlan]:
        return {} if self._path is None else read_plans(self._path, memory.alignment)

    def _write(self, memory: ArenaMemory) -> None:
        """Write this run's plans to the file; keep those of other runs."""
        if self._path is not None:
            others = {
                key: plan for key, plan in self._plans_in_file(memory).items() if key not in self._kinds
            }
            ours = {key: kind.plan for key, kind in self._kinds.items() if kind.plan}
            write_plans(others | ours, self._path)
