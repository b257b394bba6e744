"""``memfit.arena()``: training at planned offsets, in three lines of a user's loop.

    a kind of step         what is done
    ───────────────────    ────────────────────────────────────────────────────────
    new                    recorded
    twice the same         planned
    planned                placed: the k-th allocation has its offset
    not as planned         the rest of it is the ordinary allocator's; the plan is dropped, and said so

Nothing that lives is ever overwritten: a place is given only if nothing that lives overlaps it.
"""

import inspect
import os
import warnings
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
from memfit.arenas.cpu import Cpu
from memfit.arenas.cuda import Cuda
from memfit.arenas.held_outputs import Pins
from memfit.arenas.plan_file import Key, read_plans, shapes, write_plans
from memfit.arenas.repeated_step import MOST_DROPS, Kind, Place
from memfit.arenas.step_plan import Plan
from memfit.devices import NO_LIMIT
from memfit.errors import UsageError
from memfit.recording.recorder import installed
from memfit.records import Figure, Provenance, Term, Trace
from memfit.strategies.mechanisms.global_generators import PYTHON
from memfit.trace.trace_file import write_trace

if TYPE_CHECKING:
    from memfit.report.terminal.arena import PlacedRun

MOST_LOGGED = 1 << 22
"""Requests that a history holds: 128 MiB of them."""
MOST_KINDS = 256
"""Kinds of steps that are known; those that come later are left to the ordinary allocator."""
Running = Callable[[], Generator[None, None, None] | None]
_open: "dict[str, Arena]" = {}  # by device: an arena replaces the one before


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

    Each kind of step is recorded until it has come twice the same; then an offset is planned for each of its
    allocations, and the steps that follow are placed. Results are the same to the bit. There is one arena on
    each device: another one ends it.

    Under ``memfit dry-run`` and ``memfit record`` it stands aside: they tell of PyTorch's own allocator.

    Args:
        optimize_train: whether training steps are placed.
        optimize_test: whether steps of an evaluation are.
        exclude: modules whose outputs are held until the step ends: ``Arena.outputs``.
        plans: a file that plans are kept in, for the next run: its first step is placed already.
        history: whether every allocation from now on is logged, for ``Arena.trace``.
        device: ``cpu`` or ``cuda``; if not given, the GPU if there is one.

    Raises:
        UsageError: memory has been asked for on the GPU already, an argument is not what it should be, or a
            step of another arena has not ended.
        UnsuitableEnvironmentError: allocations cannot be placed here.
        FileFormatError: the file holds no plans.

    >>> model = torch.nn.Linear(8, 8)
    >>> with arena(device="cpu") as planned:
    ...     for _ in range(4):
    ...         with planned.train():
    ...             model(torch.ones(4, 8)).sum().backward()
    ...             model.zero_grad()
    """
    if device not in {None, "cpu", "cuda"}:
        raise UsageError(f"device={device!r}: give 'cpu' or 'cuda'.")
    pins = Pins((exclude,) if isinstance(exclude, nn.Module) else exclude)
    path = None if plans is None else Path(plans)
    kinds = {name for name, wanted in (("train", optimize_train), ("test", optimize_test)) if wanted}
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device in _open:
        _open[device].close()
    _open[device] = made = Arena(_place(device), frozenset(kinds), pins, path, history=history)
    return made


def _place(device: str) -> Place | None:
    if device == "cpu":
        return Cpu()
    if installed() is None:
        return Cuda()
    warnings.warn(
        "memfit.arena stands aside: memfit is watching this script already, with PyTorch's own allocator.",
        stacklevel=3,
    )
    return None


class Arena:
    """What ``arena`` returns: a context manager, that places nothing any more when it is left."""

    def __init__(
        self, place: Place | None, optimized: frozenset[str], pins: Pins, path: Path | None, *, history: bool
    ) -> None:
        self._place = place  # None: it stands aside
        self._optimized = optimized
        self._pins = pins
        self._path = path
        self._process = os.getpid()
        self._running: Running = lambda: None  # the step that was begun last
        self._before: Kind | None = None  # of the step right before, if that was recorded
        self._kinds: dict[Key, Kind] = {}
        self._begun: set[Key] = set()
        self._read: dict[Key, Plan] = {}  # plans of other runs
        self._is_full = False
        self._steps: list[int] = []  # how much was logged when each training step ended
        if place is not None:
            native.load().arena_log(place.arena, MOST_LOGGED if history else 0)
            self._read = self._plans_in_file(place)
            self._write(place)  # so that a file that cannot be written is told of now

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def outputs(self) -> Mapping[nn.Module, list[Any]]:
        """What the excluded modules have returned in this step, call by call, until it ends."""
        return self._pins.outputs

    def train(self, *batch: Any) -> AbstractContextManager[None]:
        """Run a training step within this: all from its forward to ``optimizer.zero_grad()``.

        Args:
            batch: the step's batch, or whatever of it has shapes that change: tensors, in lists, tuples and
                dictionaries. Steps with other shapes have plans of their own.

        Raises:
            UsageError: another step has not ended.

        >>> with planned.train(images, labels):  # doctest: +SKIP
        ...     loss = criterion(model(images), labels)
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        """
        return self._begin("train", batch)

    def test(self, *batch: Any) -> AbstractContextManager[None]:
        """Run a step of an evaluation within this; otherwise as ``train``."""
        return self._begin("test", batch)

    def report(self) -> "PlacedRun":
        """Return what came of each kind of step, and what is really used; it prints itself.

        On a GPU and with a history, that is beside what PyTorch's own allocator would have reserved.
        """
        before = PYTHON.get_state()  # what prints draws random numbers when it is imported: the script's
        from memfit.report.terminal.arena import PlacedRun

        PYTHON.set_state(before)
        steps = tuple(kind.summary() for kind in self._kinds.values())
        used = () if self._place is None else self._place.used()
        return PlacedRun(steps, (*self._rivals(), *used))

    def _rivals(self) -> Iterator[Term]:
        """Tell what PyTorch's allocator would have reserved for the same."""
        if self._place is None or self._place.name == "cpu" or not self._has_history:
            return
        found = compare_settings(self.trace(), "expandable_segments:True", memory=NO_LIMIT)
        for row in found.outcomes:
            name = f"reserved, {row.setting.name or 'default settings'}"
            yield Term(name, Figure(row.replay.peak_reserved, Provenance.SIMULATED, "an exact replay"))

    @property
    def _has_history(self) -> bool:
        return self._place is not None and native.load().arena_logged_count(self._place.arena) > 0

    def trace(self) -> Trace:
        """Return the history as a trace, for ``memfit.pack`` and ``memfit.explain``.

        Raises:
            UsageError: there is none; it is kept on request.
        """
        if self._place is None or not self._has_history:
            raise UsageError("This arena has no history. Make it with memfit.arena(history=True).")
        rows = native.logged(self._place.arena)
        return trace_of(rows, self._steps, self._place.device(), is_cut=len(rows) == MOST_LOGGED)

    def write_trace(self, path: str | Path) -> None:
        """Write the history to a file: ``memfit pack run.memfit``."""
        write_trace(self.trace(), Path(path))

    def close(self) -> None:
        """Place nothing any more. What lives in the arena stays there for as long as it lives.

        Raises:
            UsageError: a step has not ended.
        """
        self._check_no_step()
        self._optimized = frozenset()
        for kind in self._kinds.values():
            kind.release()
        if self._place is not None:
            self._place.lend()
            self._place.detach()

    def _check_no_step(self) -> None:
        running = self._running()  # asked of the generator itself: that is right wherever Ctrl-C has ended it
        if running is not None and inspect.getgeneratorstate(running) != inspect.GEN_CLOSED:
            raise UsageError("A step of this arena was begun and has not ended. End it first.")

    def _begin(self, name: str, batch: tuple[Any, ...]) -> AbstractContextManager[None]:
        itself: list[Running] = []
        step = contextmanager(self._step)(name, batch, itself)
        itself.append(weakref.ref(step.gen))
        return step

    def _step(self, name: str, batch: tuple[Any, ...], itself: list[Running]) -> Generator[None, None, None]:
        self._check_no_step()
        self._running = itself[0]
        place = self._place
        if place is None or name not in self._optimized or os.getpid() != self._process:
            yield
            return
        lane = place.lane()  # before all else: the arena is where the first step is
        key = self._key(name, batch, place)
        kind = self._kind(key, place)
        mode = kind.begin()
        handle, before, self._before = kind.handle, self._before, None
        try:
            with self._pins:
                native.load().arena_begin(place.arena, mode, lane, handle or None)
                yield
        finally:
            native.load().arena_end(place.arena)
        if name == "train":
            self._steps.append(native.load().arena_logged_count(place.arena))
        if mode == native.RECORDING and key.is_first:
            kind.learn_once()
            self._write(place)
        elif mode == native.RECORDING:
            is_planned = kind.learn(follows=before is kind)
            self._before = None if is_planned else kind
            if is_planned:
                self._write(place)
        elif mode == native.PLACING and kind.judge():
            self._write(place)

    def _kind(self, key: Key, place: Place) -> Kind:
        if key not in self._kinds and len(self._kinds) == MOST_KINDS:
            return self._one_too_many(place)
        if key not in self._kinds:
            self._kinds[key] = Kind(place, str(key))
            if key in self._read:
                self._kinds[key].adopt(self._read[key])
        return self._kinds[key]

    def _key(self, name: str, batch: tuple[Any, ...], place: Place) -> Key:
        device = place.name
        is_cast = torch.is_autocast_enabled(device)
        settings = {
            "torch": str(torch.__version__),
            "grad": str(torch.is_grad_enabled()),
            "dtype": str(torch.get_default_dtype()),
            "autocast": str(torch.get_autocast_dtype(device)) if is_cast else "off",
            "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        }
        key = Key(name, tuple(shapes(batch)), tuple((settings | place.settings()).items()))
        if self._path is None or key in self._begun:
            return key
        # The first step makes the optimizer's state, too. It comes once: the next run will place it.
        self._begun.add(key)
        return replace(key, is_first=True)

    def _one_too_many(self, place: Place) -> Kind:
        if not self._is_full:
            self._is_full = True
            warnings.warn(
                f"memfit.arena: there are more than {MOST_KINDS} kinds of steps; further ones are left to "
                "the ordinary allocator. Pad batches to a few shapes, or give train() less of the batch.",
                stacklevel=5,
            )
        return Kind(place, "", drops=MOST_DROPS)

    def _plans_in_file(self, place: Place) -> dict[Key, Plan]:
        return {} if self._path is None else read_plans(self._path, place.alignment)

    def _write(self, place: Place) -> None:
        """Write the plans there are, beside those of other runs."""
        if self._path is not None:
            others = {key: plan for key, plan in self._plans_in_file(place).items() if key not in self._kinds}
            ours = {key: kind.plan for key, kind in self._kinds.items() if kind.plan}
            write_plans(others | ours, self._path)
