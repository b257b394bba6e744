"""Count the operations of a training step: of its forward, of recomputations, and of its backward.

model(inputs)               forward
loss.backward()             backward
  a region runs again       recomputed: all but those whose results it keeps
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memfit.recording.compiled_step import before_compilations
from memfit.recording.dispatched_operations import OperationsBesideGraphs
from memfit.recording.hooks import InstalledHooks
from memfit.records import OperationCounts, is_counted


class _Running(threading.local):
    def __init__(self) -> None:
        self.recomputations: list[Counter[Any]] = []
        """What those have run that have not ended, the outermost first."""


_running = _Running()


@contextmanager
def recomputing(others: Callable[[], Mapping[Any, int]] = dict) -> Iterator[None]:
    """Mark what runs in this context, in this thread, as recomputed for a backward.

    Args:
        others: returns how often each operation may run of which results are kept: as often as the forward
            calls it otherwise.
    """
    _running.recomputations.append(Counter())
    try:
        yield
    finally:
        ran = _running.recomputations.pop()
        if _counting is not None:
            _counting.end(ran, others())


class OperationCounter:
    """Counts from the first call of a planned model to the first update, unless ``torch.compile`` compiles.

    Args:
        on_counted: called with the counts at the first update.
    """

    def __init__(self, on_counted: Callable[[OperationCounts], None]) -> None:
        self._on_counted = on_counted
        self._hooks = InstalledHooks()
        self._mode = ExitStack()
        self._parameters: set[int] = set()
        self.called = 0
        """Planned models that are being called."""
        self._forward = self._recomputed = self._backward = 0
        self._again: Counter[str] = Counter()

    def install(self) -> None:
        """Hook updates, and compilations: a compiler must not see hooks, and decides what a graph keeps."""
        before_compilations(self._hooks, self._give_up)
        self._updates = register_optimizer_step_pre_hook(self._update)

    def watch(self, model: nn.Module) -> None:
        """Count the calls of a planned model."""
        self._parameters.update(map(id, model.parameters()))
        # Not methods: a copy or pickle of the model has these hooks, too.
        self._hooks.on_removal(model.register_forward_pre_hook(_enter, prepend=True).remove)
        self._hooks.on_removal(model.register_forward_hook(_leave, always_call=True).remove)
        _watched[model] = self

    def start(self) -> None:
        """Begin to count, unless it has begun."""
        global _counting  # noqa: PLW0603 - the one that counts in this process
        if _counting is None:
            _counting = self
            self._mode.enter_context(OperationsBesideGraphs(self.run))

    def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and count it."""
        if is_counted(str(operation)):
            if _running.recomputations:
                self._recomputed += 1
                for each in _running.recomputations:
                    each[operation] += 1
            elif _in_backward():
                self._backward += 1
            else:
                self._forward += self.called > 0
        return operation(*args, **kwargs)

    def end(self, ran: Mapping[Any, int], others: Mapping[Any, int]) -> None:
        """Note which kept results a recomputation that has ended made again."""
        for operation, count in others.items():
            self._again[str(operation)] += max(ran[operation] - count, 0)

    def _update(self, optimizer: Optimizer, *_: Any) -> None:
        if _counting is not self or _in_backward():
            return
        updated = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if not (self._recomputed or self._parameters & updated):
            return  # another model's, such as a discriminator's
        self._stop()
        again = {name: count for name, count in self._again.items() if count}
        self._on_counted(OperationCounts(self._forward, self._recomputed, self._backward, again))

    def _give_up(self) -> None:
        self._updates.remove()
        self._stop()

    def _stop(self) -> None:
        global _counting  # noqa: PLW0603
        if _counting is self:
            _counting = None
            self._mode.close()
        self._hooks.remove()


_counting: OperationCounter | None = None
_watched: WeakKeyDictionary[nn.Module, OperationCounter] = WeakKeyDictionary()


def _enter(model: nn.Module, *_: Any) -> None:
    if (counter := _counter_of(model)) is not None:
        counter.start()
        counter.called += 1


def _leave(model: nn.Module, *_: Any) -> None:
    if (counter := _counter_of(model)) is not None:
        counter.called -= 1


def _counter_of(model: nn.Module) -> OperationCounter | None:
    """Return what counts the forward of a model that begins or ends; None for a recomputation."""
    return _watched.get(model) if torch.is_grad_enabled() and not _in_backward() else None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
