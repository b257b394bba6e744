"""Track the phases of training steps, count completed steps, and end the script after enough of them.

    setup ─> forward ─> loss ─> backward ─> between ─> optimizer ─> input ─> forward ─> ...

A training step is complete when every optimizer in use has stepped once more: with two optimizers (a GAN),
after the slower one. An optimizer that stays behind for long no longer counts as in use. A step that
GradScaler skips counts, since the script continues. If the script updates parameters by hand, without an
optimizer, each backward pass is a step. Steps captured in a CUDA graph count at each replay; the warm-up
before the capture does not count. A backward pass inside the forward of a ``torch.autograd.Function``, which
computes gradients early, is part of that forward, and no step.
"""

import functools
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_stack
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.cuda_graphs import GraphCaptures, thread_uses_side_stream
from memfit.recording.event_labels import LabelBook
from memfit.recording.last_steps import add_last_steps
from memfit.recording.missing_updates import UpdateWatcher
from memfit.recording.overlapped_zero_steps import count_overlapped_zero_steps
from memfit.records import MarkKind, Phase

_OPTIMIZER = Patch("torch.optim.optimizer:Optimizer", "__init__", why="learn which optimizers exist")
_AUTOGRAD = Patch("torch.autograd", "backward", "grad", why="mark backward passes")
_ENGINE = Patch("torch.autograd.variable:Variable", "_execution_engine", why="mark backward passes")
_SCALER = Patch("torch.amp.grad_scaler:GradScaler", "step", "_maybe_opt_step", why="mark skipped steps")

PATIENCE = 8
"""Number of steps that other optimizers may make before an optimizer that does not step is ignored. A critic
that steps five times per generator step is common, but an optimizer that is never used, or is left over from
an earlier training, must not keep the script running forever. Also the number of steps on a side stream that
count as warm-up; later ones count as training."""

FORBEARANCE = 3
"""How often a script may catch the exception that should end it before the process is ended."""


class _WatchedEngine(torch._C._ImperativeEngine):
    """Autograd's engine, for PyTorch and for libraries that call it themselves, as Megatron does.

    Its methods cannot be replaced.
    """

    def __init__(self, around: Callable[..., Any]) -> None:
        self._around = around

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(super().run_backward, *args, **kwargs)


class EnoughStepsReached(BaseException):
    """Ends the script after enough training steps.

    Not an ``Exception``, so that the error handling of a training loop lets it pass, as it does
    ``SystemExit``.
    """

    reason = "steps"
    """As in ``ScriptEnd``."""


class TimeIsUp(EnoughStepsReached):
    """Ends the script after enough seconds."""

    reason = "time"


class TrainingStepTracker:
    """Counts training steps, labels their phases, and ends the script after enough of them.

    Args:
        book: holds the labels and marks.
        wanted: training steps after which the script is ended; None to let it run to its own end.
        before_optimizer: called when an optimizer is about to step (its gradients exist).
        after_optimizer: called when it has stepped (its state exists).
        before_scaled: called with a gradient scaler that is about to step an optimizer or skip the step.
        before_backward: called with the roots of an outermost backward pass.
        after_backward: called at the end of that pass.
        on_change: called at each change of phase, for the progress line.
        end_now: called, with the reason for ``ScriptEnd``, when the script keeps catching the exception that
            should end it.
    """

    def __init__(  # noqa: PLR0913 - one callback per moment of a step
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
        end_now: Callable[[str], None],
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
        self._times_ended = 0
        self._optimizer_steps = self._warm_up_steps = 0  # of any optimizer
        self.captures = GraphCaptures()
        self._round = 0  # a new round begins when an optimizer steps for the second time in one
        # The round in which each optimizer was last created or stepped.
        self._last_round: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._step_count: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._number: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._next_number = itertools.count()
        self._stepping: dict[int, tuple[int, int]] = {}  # thread -> labels before and in an optimizer's step
        self._backward_depth = 0
        self._backward_called = False  # inside torch.autograd.backward or grad
        self._tracing: set[int] = set()  # threads on which a compiler traces
        self._in_training_mode = True
        self.updates = UpdateWatcher()
        self.deadline: float | None = None
        """Of ``time.monotonic``, after which the script is ended in any case; None for none."""
        self.forwards = 0
        self.backwards = 0
        """Outermost backward passes that have ended."""
        self.completed = 0
        """Training steps completed."""

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is running on any thread."""
        return self._backward_depth > 0

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that exist now."""
        return tuple(self._last_round)

    def install(self, hooks: InstalledHooks) -> None:
        """Hook the optimizers, backward passes and gradient scalers of this process."""
        hooks.add(register_optimizer_step_pre_hook(lambda optimizer, *_: self.enter_optimizer(optimizer)))
        hooks.add(register_optimizer_step_post_hook(lambda optimizer, *_: self.leave_optimizer(optimizer)))
        self.captures.install(hooks, self._book.mark)
        hooks.call_after(_OPTIMIZER, "__init__", self._note_optimizer)
        for name in _AUTOGRAD.names:
            hooks.wrap(_AUTOGRAD, name, self._call_backward)
        hooks.replace(_ENGINE, "_execution_engine", lambda _: _WatchedEngine(self._run_backward))
        hooks.wrap(_SCALER, "step", self._call_scaler_step)
        hooks.wrap(_SCALER, "_maybe_opt_step", self._step_or_skip)
        count_overlapped_zero_steps(hooks, self.enter_optimizer, self.leave_optimizer)

    def enter_forward(self, *, training: bool | None = None) -> None:
        """Add a mark: an outermost module is about to run, in training mode (None: it has no parameters)."""
        self._in_training_mode = self._in_training_mode if training is None else training
        self.updates.enter_forward(trains=self._in_training_mode)
        self._book.mark(MarkKind.FORWARD, self.forwards)
        self.forwards += 1
        self._on_change()
        self.end_in_time()

    def end_in_time(self) -> None:
        """End the script if its time is up.

        Raises:
            TimeIsUp: it is.
        """
        if self.deadline is not None and time.monotonic() > self.deadline:
            self._end(TimeIsUp())

    def enter(self, phase: Phase, op: str = "") -> None:
        """Label the calling thread with a phase outside any module."""
        self._book.use(self._book.intern(phase, op=op))
        self._on_change()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Count no backward pass on the calling thread within: a compiler traces the script without data."""
        thread = threading.get_ident()
        outermost = thread not in self._tracing
        self._tracing.add(thread)
        try:
            yield
        finally:
            if outermost:
                self._tracing.discard(thread)

    # -- optimizers ---------------------------------------------------------------------------

    def _note_optimizer(self, optimizer: Optimizer) -> None:
        self.updates.note_optimizer(optimizer)
        self._last_round.setdefault(optimizer, self._round)

    def enter_optimizer(self, optimizer: Optimizer) -> None:
        """Label the calling thread with an optimizer that is about to step."""
        before = self._book.current()
        self.updates.note_attempt()
        self._before_optimizer(optimizer)
        self.enter(Phase.OPTIMIZER, f"{type(optimizer).__name__}.step")
        self._stepping[threading.get_ident()] = before, self._book.current()

    def leave_optimizer(self, optimizer: Optimizer) -> None:
        """Count an optimizer that has stepped.

        Raises:
            EnoughStepsReached: this was the last step wanted.
        """
        before, _ = self._stepping.pop(threading.get_ident(), (0, 0))
        self._after_optimizer(optimizer)
        self.updates.note_update(optimizer)
        if self.in_backward:  # a step fused into the backward
            self._book.use(before)
        else:
            self.enter(Phase.INPUT)
        self._count(optimizer)

    def _call_scaler_step(
        self, original: Callable[..., Any], scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any
    ) -> Any:
        self._before_scaled(scaler)  # an optimizer that unscales by itself gets sums of these tensors
        return original(scaler, *args, **kwargs)

    def _step_or_skip(
        self,
        original: Callable[..., Any],
        scaler: torch.amp.GradScaler,
        optimizer: Optimizer,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._before_scaled(scaler)
        before = self._optimizer_steps
        result = original(scaler, optimizer, *args, **kwargs)
        if self._optimizer_steps == before:  # skipped
            self.updates.note_attempt()
            self.enter(Phase.INPUT)
            self._count(optimizer)
        return result

    def _count(self, optimizer: Optimizer) -> None:
        self._optimizer_steps += 1
        self._note_optimizer(optimizer)  # an unpickled one was never created here
        at_replay = functools.partial(self._count_replayed, weakref.ref(optimizer))
        if self.captures.keep_for_replays(at_replay) or self._is_warm_up():
            return
        if self._last_round[optimizer] == self._round:
            self._round += 1
        self._last_round[optimizer] = self._round
        # The steps wanted are steps of one optimizer: those of a deleted one that warmed up do not count.
        before = self.completed if self._wanted is None else 0
        self._step_count[optimizer] = max(self._step_count.get(optimizer, 0), before) + 1
        if optimizer not in self._number:
            self._number[optimizer] = next(self._next_number)
        self._book.mark(MarkKind.OPTIMIZER_STEP, self._number[optimizer])
        since = self._round - PATIENCE - (self._wanted or 0)
        steps = min(
            self._step_count.get(each, 0)
            for each, last_round in list(self._last_round.items())
            if last_round > since
        )
        self._complete(steps)

    def count_last_steps(self) -> None:
        """Count the steps that only the end of the script shows."""
        used = set(self._number.values())
        self.completed = add_last_steps(self._book, self.completed, self.backwards, used)

    def _count_replayed(self, reference: "weakref.ref[Optimizer]") -> None:
        optimizer = reference()
        if optimizer is not None:
            self._count(optimizer)

    def _is_warm_up(self) -> bool:
        """Return whether the step just made was a warm-up; only a limited number of steps can be."""
        is_warm_up = thread_uses_side_stream() and self._warm_up_steps < PATIENCE
        self._warm_up_steps += is_warm_up
        return is_warm_up

    # -- backward passes ----------------------------------------------------------------------

    def _call_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Label a call of ``backward`` or ``grad``, which also allocates the gradient of the loss."""
        if self.in_backward or self._backward_called or threading.get_ident() in self._tracing:
            return original(*args, **kwargs)
        self._backward_called = True
        before = self._book.current()
        self.enter(Phase.BACKWARD)
        try:
            return original(*args, **kwargs)
        finally:
            self._backward_called = False
            self._leave_backward(before)

    def _run_backward(
        self, original: Callable[..., Any], tensors: tuple[object, ...], *args: Any, **kwargs: Any
    ) -> Any:
        # A reentrant checkpoint, a gradient taken inside a backward, or a backward traced by a compiler.
        if self.in_backward or threading.get_ident() in self._tracing:
            return original(tensors, *args, **kwargs)
        inside_forward = _inside_function(sys._getframe(1))
        before = self._book.current()
        by_hand = not self._last_round and not inside_forward
        if (
            by_hand
            and not self.captures.keep_for_replays(self._count_replayed_backward)
            and not self._is_warm_up()
        ):
            try:
                self._complete(self.backwards)  # the script has made its update after the last backward
            except EnoughStepsReached:
                self._before_backward(tensors)  # record the graph of this last forward, too
                raise
        self._book.mark(MarkKind.BACKWARD, self.backwards)
        if not inside_forward and not self._stepping:
            self.updates.enter_backward(trains=self._in_training_mode)
        self._before_backward(tensors)
        self.enter(Phase.BACKWARD)
        self._backward_depth += 1
        try:
            result = original(tensors, *args, **kwargs)
            self._after_backward()
            return result
        finally:
            self._backward_depth -= 1
            self.backwards += not inside_forward
            if self._backward_called:
                self.enter(Phase.BACKWARD)
            else:
                self._leave_backward(before)

    def _leave_backward(self, before: int) -> None:
        """Label the calling thread with what follows a backward: the step of the optimizer that called it.

        Args:
            before: the label before the backward, which follows it inside a forward.
        """
        stepping = self._stepping.get(threading.get_ident())
        if stepping is not None:
            self._book.use(stepping[1])
        else:
            inside = _inside_function(sys._getframe(1))
            self._book.use(before if inside else self._book.intern(Phase.BETWEEN))
        self._on_change()

    def _count_replayed_backward(self) -> None:
        if not self._last_round:
            self.backwards += 1
            self._complete(self.backwards)

    def _complete(self, steps: int) -> None:
        while self.completed < steps:
            self._book.mark(MarkKind.TRAINING_STEP, self.completed)
            self.completed += 1
        self._on_change()
        if self._wanted is not None and self.completed >= self._wanted:
            self._end(EnoughStepsReached())

    def _end(self, by: EnoughStepsReached) -> NoReturn:
        self._times_ended += 1
        if self._times_ended > FORBEARANCE:
            self._end_now(by.reason)
        raise by


def _inside_function(frame: FrameType) -> bool:
    """Return whether the forward of a ``torch.autograd.Function`` is among the frames from one outwards.

    It is known by its name and its first argument's, ``forward(ctx, ...)``: PyTorch calls it without a Python
    frame of its own, and reading the locals would keep tensors alive.
    """
    codes = (each.f_code for each, _ in walk_stack(frame))
    return any(code.co_name == "forward" and code.co_varnames[:1] == ("ctx",) for code in codes)
