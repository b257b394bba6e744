"""Give the script a few chosen batches of a loader in place of its first ones.

    asked for   1        2        3       4        5 ...
    given       largest  largest  median  between  the loader's own

The loader still draws its own batches, and memfit replaces them: the pass is as long as without memfit, and
its random numbers are the same. The largest is used in two training steps, because the first has no optimizer
state yet.
"""

import copy
import dataclasses
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from memfit.patching.patches import Patch
from memfit.recording.loader_scan import DrawnBatch
from memfit.recording.recorder import Recorder
from memfit.records import LoaderScan, MarkKind

_ITERATOR = Patch(
    "torch.utils.data.dataloader:_BaseDataLoaderIter",
    "_next_data",
    why="give the largest batch first",
)

_OWN = 3
"""In the index of a mark: the loader's own batch."""
_PATIENCE = 8
"""Forwards with a batch after which the script is taken to make no backward."""


class ReplacedBatches:
    """The chosen batches of one loader, and which of them the script gets next."""

    def __init__(
        self, number: int, scan: LoaderScan, chosen: Sequence[DrawnBatch], recorder: Recorder
    ) -> None:
        self._number, self._scan, self._chosen, self._recorder = number, scan, chosen, recorder
        self._now = 0  # which of the chosen
        self._since: int | None = None  # training steps completed when it was first given
        self._unused = 0  # forwards with it that no backward followed
        self._before: tuple[int, int] | None = None  # forwards and backwards at the last request of this pass
        self._trains = self._ahead = False

    @property
    def scan(self) -> LoaderScan:
        """What was seen of the loader, and how the script reads it."""
        return dataclasses.replace(self._scan, trains=self._trains, ahead=self._ahead)

    @property
    def is_over(self) -> bool:
        """Whether the script has had all of them."""
        return self._now >= len(self._chosen)

    def serve(self, iterator: Any, most: int | None) -> None:
        """Have the iterator of a new pass return the chosen batches first."""
        self._before = None
        own = type(iterator)._next_data
        here = weakref.ref(iterator)  # a cycle would keep its workers alive
        limit = min(self._scan.seen, most or sys.maxsize)
        was_taken = False  # by the scan: the data set can be read only once

        def next_data() -> Any:
            nonlocal was_taken
            current: Any = here()
            batch = None
            try:
                batch = own(current)
            except StopIteration:
                was_taken |= not current._num_yielded
                if not was_taken or current._num_yielded >= limit:
                    raise
            if not self.is_over:
                self._advance()
            if self.is_over and not was_taken:
                del current._next_data
                self._recorder.book.mark(MarkKind.SERVED, self._number * (_OWN + 1) + _OWN)
                return batch
            return self._copy(current, batch)

        _ITERATOR.install("_next_data", lambda _: next_data, on=iterator)

    def _advance(self) -> None:
        """Go on to the next of the chosen batches if the script has used this one often enough."""
        steps = self._recorder.steps
        before, self._before = self._before, (steps.forwards, steps.backwards)
        if self._since is None:
            self._since = steps.completed
        if before is None:
            return
        forwards, backwards = steps.forwards - before[0], steps.backwards - before[1]
        self._trains |= backwards > 0
        self._ahead |= not forwards and not backwards
        self._unused = 0 if backwards else self._unused + forwards
        evaluates = forwards and not backwards and not torch.is_grad_enabled()
        wanted = 2 if self._ahead or not self._now else 1
        if steps.completed - self._since >= wanted or evaluates or self._unused >= _PATIENCE:
            self._now, self._since, self._unused = self._now + 1, steps.completed, 0

    def _copy(self, iterator: Any, own: Any) -> Any:
        """Return a copy of the batch: the script may move it to the GPU in place."""
        number = min(self._now, len(self._chosen) - 1)
        try:
            batch = copy.deepcopy(self._chosen[number].batch)
        except Exception:  # noqa: BLE001 - the script's own classes may raise anything
            self._now = len(self._chosen)
            return own
        if iterator._pin_memory:
            batch = pin_memory(batch, iterator._pin_memory_device)  # type: ignore[no-untyped-call]
        self._recorder.book.mark(MarkKind.SERVED, self._number * (_OWN + 1) + number)
        return batch
