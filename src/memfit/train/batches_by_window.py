"""Windows that gather a loader's batches: each batch is a micro-batch.

epoch 1     |-- window --|-- window --|-- wi      remainder="carry": the window goes on in epoch 2
epoch 2     ndow --|-- window --|-- window --|
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.train.accumulation_ledger import AccumulationLedger
from memfit.train.accumulation_window import AccumulationWindow
from memfit.train.data.loader_position import check_loader_batch_size

if TYPE_CHECKING:
    from memfit.train.accumulation_window import StepResult


@dataclass(frozen=True, slots=True, eq=False)
class WindowBatches:
    """The batches of one epoch that belong to one window."""

    window: AccumulationWindow
    """Not open yet, unless it has batches of an earlier epoch."""
    batches: list[Any]
    done: int
    """How many of them went backward before the run was saved."""

    @property
    def left(self) -> list[Any]:
        """The batches that are still to be processed."""
        return self.batches[self.done :]

    @property
    def fills(self) -> bool:
        """Whether the window is full after these batches."""
        return self.window.done + len(self.left) == self.window.planned


def gather_batches_by_window(
    ledger: AccumulationLedger,
    settings: Accumulation,
    loader: Iterable[Any],
    batches_left: Callable[[], int | None] = lambda: None,
) -> Iterator[WindowBatches]:
    """Yield one epoch's batches, by window.

    All batches of a group are fetched before it is yielded, so that the last window, which may be smaller, is
    divided by its actual number.

    Args:
        ledger: its open window, if it has one, continues with ``remainder="carry"``.
        settings: how many batches make a window.
        loader: yields the batches.
        batches_left: how many batches there will be in all, also in later epochs; None if that is unknown.

    Raises:
        UsageError: a window is open, or the loader's batches have another size than the settings.
    """
    check_loader_batch_size(settings, loader)
    carries = settings.remainder == "carry"
    if ledger.window is not None and (ledger.window.by_hand or not carries):
        ledger.expect_closed()
    carried = 0 if ledger.window is None else ledger.window.done
    position = ledger.position
    for group in position.groups(loader, settings.steps, settings.remainder or "step", carried):
        window, ledger.resumed_window = ledger.resumed_window or ledger.window, None
        if window is None:
            left = batches_left() if carries else len(group)
            window = AccumulationWindow(settings.steps if left is None else min(settings.steps, left))
        yield WindowBatches(window, group, window.done - position.carried_into_group)


class MicroBatches:
    """Micro-batches of one window; call ``engine.backward`` once for each."""

    def __init__(
        self,
        group: WindowBatches,
        ledger: AccumulationLedger,
        *,
        closes: bool,
    ) -> None:
        self._group, self._ledger, self._closes = group, ledger, closes
        self.result: StepResult | None = None
        """The window's result, after the backward of its last micro-batch; None if the next epoch has it."""

    def __len__(self) -> int:
        """Return their number, including those that went backward before a state was saved."""
        return len(self._group.batches)

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches; after the last one, update."""
        window = self._group.window
        for item in self._group.left:
            done = window.done
            self._ledger.position.hand_out()
            yield item
            if window.done != done + 1:
                raise UsageError(
                    "engine.backward must be called exactly once for each micro-batch of an accumulation "
                    "window."
                )
        if self._closes:
            self.result = self._ledger.close(window)
