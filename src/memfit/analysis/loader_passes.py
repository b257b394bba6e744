"""Follow a script's passes over its loaders through the marks of a run."""

import itertools
from collections import Counter
from dataclasses import dataclass


@dataclass(slots=True)
class _Pass:
    """A pass over a loader."""

    number: int
    reads: int = 0
    """Batches asked for before its first forward: with more than one, the script reads ahead."""
    begun: bool = False
    """Whether that forward has come."""


class LoaderPasses:
    """The passes that a script is in, and the batches that it has not yet passed to a forward.

    A script that reads ahead, as accelerate does, finds the end of a loader before it uses the last batches:

        BATCH BATCH FORWARD BATCH LOADER_END FORWARD
    """

    def __init__(self) -> None:
        self._open: dict[int, _Pass] = {}  # by loader, the one read last at the end
        self._numbers = itertools.count()
        self._since_backward: Counter[int] = Counter()  # batches of each pass
        self._batch: int | None = None  # a mark at which the script asked for what the next forward uses
        self._ahead = False  # the loader has ended, and the script has yet to use batches of it
        self._ended: int | None = None  # the pass that these belong to, until the script reads another
        self._last: int | None = None  # the pass that has just ended, until a batch or a forward follows
        self.trained: set[int] = set()
        """Passes that had a backward."""
        self.ended: set[int] = set()
        """Passes whose loader had no more batches."""

    @property
    def current(self) -> int:
        """The pass over the loader that was read last; -1 outside of one."""
        if self._ended is not None:
            return self._ended
        return next((each.number for each in reversed(self._open.values())), -1)

    @property
    def open(self) -> list[int]:
        """Passes that have not ended."""
        return [each.number for each in self._open.values()]

    def begin(self) -> None:
        """Begin to count marks from 0 again."""
        self._batch = None if self._batch is None else 0

    def read(self, loader: int, index: int) -> None:
        """Note that mark ``index`` asks a loader for a batch."""
        current = self._open.pop(loader, None) or _Pass(next(self._numbers))
        self._open[loader] = current
        current.reads += not current.begun
        self._since_backward[current.number] += 1
        if self._batch is None or self._ahead:
            self._batch = index
        self._ahead, self._ended, self._last = False, None, None

    def end(self, loader: int) -> None:
        """Note the end of a loader, which the script has just asked for a batch."""
        ended = self._open.pop(loader, None)
        if ended is not None:
            self.ended.add(ended.number)
            self._last = ended.number
        self._ahead = ended is not None and ended.reads > 1
        self._ended = ended.number if ended is not None and self._ahead else None
        if not self._ahead:
            self._batch = None

    def forward(self, index: int) -> int:
        """Return where the passage of forward ``index`` begins: at the mark of its batch, if it has one."""
        begin = index if self._batch is None else self._batch
        self._batch, self._ahead, self._last = None, False, None
        for each in itertools.islice(reversed(self._open.values()), 1):
            each.begun = True
        return begin

    def backward(self) -> None:
        """Note a backward.

        A script may read loaders side by side, one batch of each. If it has read more batches of one, it left
        that pass early. It may also sum a loss over a whole pass, and call backward after the pass.
        """
        side_by_side = (number for number, count in self._since_backward.items() if count == 1)
        self.trained |= {self.current, *side_by_side}
        if self._last is not None:
            self.trained.add(self._last)
        self._since_backward.clear()

    def checkpoint(self) -> None:
        """Note that a state is saved or loaded: a script that reads ahead does not do so before it trains."""
        if self._ahead:
            self._batch, self._ahead, self._ended = None, False, None
