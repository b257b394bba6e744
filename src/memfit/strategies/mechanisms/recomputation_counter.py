"""Count the operations of a training step: of its forward, of recomputations, and of its backward.

model(inputs)               forward
loss.backward()             backward
  a region runs again       recomputed: all but those whose results it keeps
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memfit.patching.installed_hooks import InstalledHooks
from memfit.recording.operation_interception import (
    InterceptionModeAllowingCompilation,
    call_before_compilations,
    exclude_from_compilation,
)
from memfit.recording.optimizer_accessors import parameters_of
from memfit.records import OperationCounts, is_counted_operation


class _Running(threading.local):
    def __init__(self) -> None:
        self.recomputations: list[Counter[Any]] = []
        """What those have run that have not ended, the outermost first."""


_running = _Running()


@contextmanager
def mark_as_recomputed(others: Callable[[], Mapping[Any, int]] = dict) -> Iterator[None]:
    """Mark what runs in this context, in this thread, as recomputed for a backward.

    Args:
        others: returns how often each operation may run of which results are kept: as often as the forward
            calls it otherwise.
    """
    counter, is_outermost, ran = _counting, not _running.recomputations, Counter[Any]()
    _running.recomputations.append(ran)
    try:
        with counter.counting_recomputation() if counter is not None and is_outermost else nullcontext():
            yield
    finally:
        _running.recomputations.pop()
        if counter is not None:
            counter.end(ran, others())


def active_operation_counter() -> "OperationCounter | None":
    """Return what counts at this moment."""
    return _counting


class OperationCounter:
    """Counts from the first call of a planned model to the first update, unless ``torch.compile`` compiles.

    Args:
        on_counted: called at the first update with the counts; by operation, how often its results were kept
            and it was recomputed all the same; and what ``miss`` has noted.
        in_backward: whether operations of the backward are counted besides those that are recomputed for it.
            Autograd then adds up gradients out of place, as under every dispatch mode, which takes memory.
    """

    def __init__(
        self,
        on_counted: Callable[[OperationCounts, dict[str, int], tuple[str, ...]], None],
        *,
        in_backward: bool,
    ) -> None:
        self._on_counted, self._in_backward = on_counted, in_backward
        self._hooks = InstalledHooks()
        self._mode = InterceptionModeAllowingCompilation(self._run, watches=True)
        self._modes = ExitStack()
        self._parameters: set[int] = set()
        self._is_compiled = False
        self._called = 0  # planned models that are being called
        self._forward = self._recomputed = self._backward = 0
        self._again: Counter[str] = Counter()
        self._missing: list[str] = []

    def install(self, hooks: InstalledHooks) -> None:
        """Hook updates, and compilations: a compiler must not see hooks, and decides what a graph keeps."""
        call_before_compilations(self._hooks, self._compiles)
        hooks.on_removal(self._give_up)
        self._updates = register_optimizer_step_pre_hook(self._update)

    def watch(self, model: nn.Module) -> None:
        """Count the calls of a planned model."""
        self._parameters.update(map(id, model.parameters()))
        # Not methods: a copy or pickle of the model has these hooks, too.
        self._hooks.on_removal(model.register_forward_pre_hook(_enter, prepend=True).remove)
        self._hooks.on_removal(model.register_forward_hook(_leave, always_call=True).remove)
        _watched[model] = self

    def enter(self) -> None:
        """Begin to count a forward."""
        global _counting  # noqa: PLW0603 - the one that counts in this process
        if _counting in (None, self):
            if not self._called and not (self._in_backward and _counting is self):
                self._modes.enter_context(self._mode)
            self._called += 1
            _counting = self

    def leave(self) -> None:
        """Stop counting it."""
        if _counting is self and self._called:
            self._called -= 1
            if self._is_compiled:
                self._give_up()
            elif not self._called and not self._in_backward:
                self._modes.close()

    def counting_recomputation(self) -> AbstractContextManager[object]:
        """Return the context of a recomputation that is in no other one."""
        # A script may run its backward in another thread, without the mode that its forward began.
        return nullcontext() if self._mode in _get_current_dispatch_mode_stack() else self._mode

    def end(self, ran: Mapping[Any, int], others: Mapping[Any, int]) -> None:
        """Note which kept results a recomputation that has ended made again."""
        for operation, count in others.items():
            self._again[str(operation)] += max(ran[operation] - count, 0)

    def miss(self, operations: Sequence[str]) -> None:
        """Note calls whose results were to be kept and that were not made: ``aten.mm.default:2``."""
        self._missing += operations

    def _run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and count it."""
        if is_counted_operation(str(operation)):
            if _running.recomputations:
                self._recomputed += 1
                for each in _running.recomputations:
                    each[operation] += 1
            elif _in_backward():
                self._backward += 1
            else:
                self._forward += self._called > 0
        return operation(*args, **kwargs)

    def _update(self, optimizer: Optimizer, *_: Any) -> None:
        if _counting is not self or _in_backward():
            return
        updated = {id(each) for each in parameters_of(optimizer)}
        if not (self._recomputed or self._parameters & updated):
            return  # another model's, such as a discriminator's
        self._stop()
        backward = self._backward if self._in_backward else None
        again = {name: count for name, count in self._again.items() if count}
        counts = OperationCounts(self._forward, self._recomputed, backward)
        self._on_counted(counts, again, tuple(dict.fromkeys(self._missing)))

    def _compiles(self) -> None:
        self._is_compiled = True
        if not self._called:  # otherwise its hooks and its mode are around what is compiled
            self._give_up()

    def _give_up(self) -> None:
        self._updates.remove()
        self._stop()

    def _stop(self) -> None:
        global _counting  # noqa: PLW0603
        if _counting is self:
            _counting = None
            self._modes.close()
        self._hooks.remove()


_counting: OperationCounter | None = None
_watched: WeakKeyDictionary[nn.Module, OperationCounter] = WeakKeyDictionary()


def _enter(model: nn.Module, *_: Any) -> None:
    if (counter := _counter_of(model)) is not None:
        counter.enter()


def _leave(model: nn.Module, *_: Any) -> None:
    if (counter := _counter_of(model)) is not None:
        counter.leave()


exclude_from_compilation(_enter)
exclude_from_compilation(_leave)


def _counter_of(model: nn.Module) -> OperationCounter | None:
    """Return what counts the forward of a model that begins or ends; None for a recomputation."""
    return _watched.get(model) if torch.is_grad_enabled() and not _in_backward() else None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
