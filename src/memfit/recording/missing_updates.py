"""Find the updates that a script did not make although it trained, and the GPU reads that may be why.

    forward   backward 1 │ ...reads, update │ forward   backward 2 │ ...reads │ forward   backward 3 ...
              └────────── window 1 ─────────┴─────────┘ └──────── window 2 ───────────┘

A read makes a script skip an update if it is made in the backward pass or after it, before the next forward.
The ghost returns the same value each time, so such a read is in no window with an update. Accumulated
gradients also leave windows without one: updates count as skipped only if the windows at the end are more
than ever preceded an update.
"""

import weakref
from collections import Counter

from torch.optim.optimizer import Optimizer

from memfit.recording.optimizer_accessors import parameters_of
from memfit.records import StandIn


class UpdateWatcher:
    """Follows a script's backward passes, its updates, and what it reads in between."""

    def __init__(self) -> None:
        self._had_optimizer = False
        self._existing: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._backwards = 0
        self._updates = 0  # windows with one
        self._updated = False  # the current window has one
        self._trains = False  # its forward did
        self._listens = False  # a read now belongs to it
        self._read: dict[str, StandIn] = {}  # in the current window, oldest first
        self._seen: dict[str, StandIn] = {}  # in any window, oldest first
        self._harmless: set[str] = set()  # read in windows with an update
        self._skips: Counter[frozenset[str]] = Counter()  # what was read in windows without an update
        self._since_update = 0  # windows without an update, since the last one
        self._most_before_update = 0

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Note that an optimizer exists."""
        self._had_optimizer = True
        self._existing.add(optimizer)

    def enter_forward(self) -> None:
        """Note that an outermost module is about to run: what is read now decides about no earlier update."""
        self._listens = False

    def enter_backward(self, *, trains: bool) -> None:
        """Note that an outermost backward pass begins.

        Args:
            trains: whether the module that ran before is in training mode.
        """
        self._close_window()
        self._backwards += 1
        self._trains, self._listens = trains, True

    def note_read(self, read: StandIn) -> None:
        """Note that the script got a stand-in."""
        if self._listens:
            self._read.pop(read.key, None)
            self._read[read.key] = read

    def note_update(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped, and not only its scaler decided to skip the step."""
        self.note_optimizer(optimizer)
        self._stepped.add(optimizer)
        self._updated = True

    def missing(self, *, stopped: bool) -> tuple[str, tuple[StandIn, ...]]:
        """Return which updates the script did not make, and what it read before it went on without them.

        Args:
            stopped: whether memfit ended the script, which may have made them later.

        Returns:
            A sentence without a full stop, and the reads, newest first; an empty sentence if none is missing.
        """
        self._close_window()
        if not self._had_optimizer or not self._backwards:
            return "", ()
        suspects = [read for key, read in reversed(self._seen.items()) if key not in self._harmless]
        if not self._stepped and not self._updates:
            passes = f"{self._backwards} backward pass{'es' * (self._backwards != 1)}"
            return f"The script ran {passes}, and its optimizers never stepped", tuple(suspects)
        waiting = self._waiting()
        if waiting and (suspects or not stopped):
            text = f"{waiting} of {len(self._existing)} optimizers never stepped"
            return f"{text}, although there are gradients for {'it' if waiting == 1 else 'them'}", (
                *suspects,
            )
        named = {read.key for read in suspects}
        skipped = sum(count for read, count in self._skips.items() if read & named)
        if stopped or not skipped or self._since_update <= self._most_before_update:
            return "", ()
        return f"{skipped} of {skipped + self._updates} updates were skipped", tuple(suspects)

    def _close_window(self) -> None:
        if self._updated:
            self._updates += 1
            self._harmless.update(self._read)
            self._most_before_update = max(self._most_before_update, self._since_update)
            self._since_update = 0
        elif self._trains:
            self._since_update += 1
            self._skips[frozenset(self._read)] += 1
        for key, read in self._read.items() if self._trains else ():
            self._seen.pop(key, None)
            self._seen[key] = read
        self._read = {}
        self._updated = self._trains = self._listens = False

    def _waiting(self) -> int:
        """Return how many optimizers never stepped, although parameters that are theirs have gradients."""
        updated = {id(each) for optimizer in self._stepped for each in parameters_of(optimizer)}
        return sum(
            any(each.grad is not None and id(each) not in updated for each in parameters_of(optimizer))
            for optimizer in self._existing - self._stepped
        )
