"""Where in a training step the script is, and when it has made enough of them.

    setup ─> forward ─> loss ─> backward ─> between ─> optimizer ─> input ─> forward ─> ...

A training step is complete when every optimizer in use has stepped once more: with two optimizers
(a GAN) that is after the slower one, and one that stays behind for long is in use no longer. A step that
GradScaler skips counts, since the script goes on. Where parameters are updated by hand there is no
optimizer, and each backward pass is a step. What a CUDA graph captured is counted when it is replayed, and
the warm-up before a capture is not counted at all.
"""

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from memfit.recording.cuda_graphs import Replays, warming_up
from memfit.recording.hooks import LiftedHooks
from memfit.recording.labels import LabelBook
from memfit.records import MarkKind, Phase

PATIENCE = 8
"""Steps that other optimizers may make while one is waited for. A critic that steps five times per generator
step is common; an optimizer built and never used, or that of an earlier training, must not run forever.
As many may be made on a side stream before they are taken for training, not for a warm-up."""

FORBEARANCE = 3
"""How often a script may catch the exception that ends it before it is ended without being asked."""


class EnoughStepsReached(BaseException):
    """Ends the script once enough steps were made.

    Not an ``Exception``, so that a training loop's own error handling lets it pass, as it does
    ``SystemExit``.
    """


class Steps:
    """Counts training steps, labels their phases, and ends the script after enough of them.

    Args:
        book: where labels and marks go.
        wanted: training steps after which the script is ended; None for its own end.
        before_optimizer: called when an optimizer is about to step (its gradients are there).
        after_optimizer: called when it has stepped (its state is there).
        before_scaled: called with a gradient scaler that is about to step an optimizer, or to skip it.
        before_backward: called with the roots of an outermost backward pass.
        after_backward: called when it is over.
        on_change: called at each change of phase, for the progress line.
        end_now: called when the script keeps catching the exception that should end it.
    """

    def __init__(  # noqa: PLR0913 - each is one moment
        self,
        book: LabelBook,
        wanted: int | None,
        *,
        before_optimizer: Callable[[Optimizer], None],
        after_optimizer: Callable[[Optimizer], None],
        before_scaled: Callable[[torch.amp.GradScaler], None],
        before_backward: Callable[[tuple[object, ...]], None],
        after_backward: Callable[[], None],
        on_change: Callable[[], None],
        end_now: Callable[[], None],
    ) -> None:
        self._book = book
        self._wanted = wanted
        self._before_optimizer = before_optimizer
        self._after_optimizer = after_optimizer
        self._before_scaled = before_scaled
        self._before_backward = before_backward
        self._after_backward = after_backward
        self._on_change = on_change
        self._end_now = end_now
        self._ends = 0
        self._seen = 0  # steps of any optimizer
        self._warm_ups = 0
        self._replays = Replays()
        self._turn = 0  # a new one begins with each optimizer that steps twice in one
        # The turn in which each was built or stepped last.
        self._built: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._stepped: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # -> steps
        self._order: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._met = itertools.count()
        self._inside: dict[int, tuple[int, int]] = {}  # thread -> labels before an optimizer's step and in it
        self._backwards = 0
        self._depth = 0
        self._called = False  # somebody called for a backward pass
        self._tracing: set[int] = set()  # threads on which a compiler works
        self.forwards = 0
        self.completed = 0
        """Training steps completed."""

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is running on any thread."""
        return self._depth > 0

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that exist now."""
        return tuple(self._built)

    def install(self, hooks: LiftedHooks) -> None:
        """Put hooks on the optimizers, backward passes and gradient scalers of this process.

        Args:
            hooks: where everything goes that is put into PyTorch.
        """
        hooks.add(register_optimizer_step_pre_hook(lambda optimizer, *_: self.enter_optimizer(optimizer)))
        hooks.add(register_optimizer_step_post_hook(lambda optimizer, *_: self.leave_optimizer(optimizer)))
        self._replays.install(hooks, self._book.mark)
        hooks.wrap(Optimizer, "__init__", self._building)
        for name in ("backward", "grad"):
            hooks.wrap(torch.autograd, name, self._call_for_backward)
        hooks.wrap(torch.autograd.graph, "_engine_run_backward", self._backward)
        hooks.replace(torch.autograd, "_engine_run_backward", torch.autograd.graph._engine_run_backward)
        hooks.wrap(torch.amp.GradScaler, "step", self._enter_scaler)
        hooks.wrap(torch.amp.GradScaler, "_maybe_opt_step", self._scaled_step)

    def enter_forward(self) -> None:
        """Mark that an outermost module is about to run."""
        self._book.mark(MarkKind.FORWARD, self.forwards)
        self.forwards += 1
        self._on_change()

    def enter(self, phase: Phase, op: str = "") -> None:
        """Label the calling thread with a phase outside any module."""
        self._book.use(self._book.intern(phase, op=op))
        self._on_change()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Count no backward pass on the calling thread within: a compiler runs the script on no data."""
        thread = threading.get_ident()
        outermost = thread not in self._tracing
        self._tracing.add(thread)
        try:
            yield
        finally:
            if outermost:
                self._tracing.discard(thread)

    # -- optimizers ---------------------------------------------------------------------------

    def _building(
        self, original: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        original(optimizer, *args, **kwargs)
        self._built.setdefault(optimizer, self._turn)

    def enter_optimizer(self, optimizer: Optimizer) -> None:
        """Label the calling thread with an optimizer that is about to step."""
        before = self._book.current()
        self._before_optimizer(optimizer)
        self.enter(Phase.OPTIMIZER, f"{type(optimizer).__name__}.step")
        self._inside[threading.get_ident()] = before, self._book.current()

    def leave_optimizer(self, optimizer: Optimizer) -> None:
        """Count an optimizer that has stepped.

        Raises:
            EnoughStepsReached: that was the last step wanted.
        """
        before, _ = self._inside.pop(threading.get_ident(), (0, 0))
        self._after_optimizer(optimizer)
        if self.in_backward:  # a step fused into the backward
            self._book.use(before)
        else:
            self.enter(Phase.INPUT)
        self._count(optimizer)

    def _enter_scaler(
        self, original: Callable[..., Any], scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any
    ) -> Any:
        self._before_scaled(scaler)  # an optimizer that scales by itself gets sums of what is there now
        return original(scaler, *args, **kwargs)

    def _scaled_step(
        self,
        original: Callable[..., Any],
        scaler: torch.amp.GradScaler,
        optimizer: Optimizer,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._before_scaled(scaler)
        before = self._seen
        result = original(scaler, optimizer, *args, **kwargs)
        if self._seen == before:
            self.enter(Phase.INPUT)
            self._count(optimizer)
        return result

    def _count(self, optimizer: Optimizer) -> None:
        self._seen += 1
        self._built.setdefault(optimizer, self._turn)  # one that was unpickled was never built here
        again = functools.partial(self._count_again, weakref.ref(optimizer))
        if self._replays.captured(again) or self._warms_up():
            return
        if self._built[optimizer] == self._turn:
            self._turn += 1
        self._built[optimizer] = self._turn
        # So many steps are wanted of one: those of another that warmed up, and is gone, do not count for it.
        before = self.completed if self._wanted is None else 0
        self._stepped[optimizer] = max(self._stepped.get(optimizer, 0), before) + 1
        if optimizer not in self._order:
            self._order[optimizer] = next(self._met)
        self._book.mark(MarkKind.OPTIMIZER_STEP, self._order[optimizer])
        since = self._turn - PATIENCE - (self._wanted or 0)
        self._complete(
            min(self._stepped.get(one, 0) for one, turn in list(self._built.items()) if turn > since)
        )

    def _count_again(self, optimizer: "weakref.ref[Optimizer]") -> None:
        stepped = optimizer()
        if stepped is not None:
            self._count(stepped)

    def _warms_up(self) -> bool:
        """Say whether what has just been done was for warming up; there is an end to that, too."""
        warms_up = warming_up() and self._warm_ups < PATIENCE
        self._warm_ups += warms_up
        return warms_up

    # -- backward passes ----------------------------------------------------------------------

    def _call_for_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Label a call for a backward pass, with the loss's own gradient that it makes and drops."""
        if self.in_backward or self._called or threading.get_ident() in self._tracing:
            return original(*args, **kwargs)
        self._called = True
        self.enter(Phase.BACKWARD)
        try:
            return original(*args, **kwargs)
        finally:
            self._called = False
            self._follow()

    def _backward(
        self, original: Callable[..., Any], roots: tuple[object, ...], *args: Any, **kwargs: Any
    ) -> Any:
        # A reentrant checkpoint, a gradient taken inside a backward, or one that a compiler traces.
        if self.in_backward or threading.get_ident() in self._tracing:
            return original(roots, *args, **kwargs)
        if not self._built and not self._replays.captured(self._backward_again) and not self._warms_up():
            try:
                self._complete(self._backwards)  # the last backward's update by hand has now been made
            except EnoughStepsReached:
                self._before_backward(roots)  # of this forward, too, it is known what it has kept
                raise
        self._book.mark(MarkKind.BACKWARD, self._backwards)
        self._before_backward(roots)
        self.enter(Phase.BACKWARD)
        self._depth += 1
        try:
            result = original(roots, *args, **kwargs)
            self._after_backward()
            return result
        finally:
            self._depth -= 1
            self._backwards += 1
            if self._called:
                self.enter(Phase.BACKWARD)
            else:
                self._follow()

    def _follow(self) -> None:
        """Label the calling thread with what follows a backward pass: an optimizer goes on that wanted it."""
        inside = self._inside.get(threading.get_ident())
        self._book.use(self._book.intern(Phase.BETWEEN) if inside is None else inside[1])
        self._on_change()

    def _backward_again(self) -> None:
        if not self._built:
            self._backwards += 1
            self._complete(self._backwards)

    def _complete(self, steps: int) -> None:
        while self.completed < steps:
            self._book.mark(MarkKind.TRAINING_STEP, self.completed)
            self.completed += 1
        self._on_change()
        if self._wanted is not None and self.completed >= self._wanted:
            self._ends += 1
            if self._ends > FORBEARANCE:
                self._end_now()
            raise EnoughStepsReached
