"""Find the updates that a script did not make although it trained, and the GPU reads that may be why.

    forward   backward 1 │ ...reads, update │ forward   backward 2 │ ...reads │ forward   backward 3 ...
              └────────── window 1 ─────────┴─────────┘ └──────── window 2 ───────────┘

A read makes a script skip an update if it is made in the backward pass or after it, before the next forward,
and the script decides by it how to go on (``use_of_read.py``). The ghost returns the same value each time, so
such a read is in no window with an update. Accumulated gradients also leave windows without one: updates
count as skipped only if the windows at the end are more than ever preceded an update. A script that runs no
backward pass may have skipped them all after a read that it made while it was to train.

A window has an update if an optimizer steps that has gradients or state, or if parameters are written by
hand. Without such reads, a script that asks no optimizer to step would not do so on a GPU either.
"""

import weakref
from collections import Counter

import torch
from torch.optim.optimizer import Optimizer

from memfit.recording.optimizer_accessors import parameters_of
from memfit.recording.use_of_read import Branch, ReadUse, running_branches
from memfit.records import CHECK, FINITE_CHECK, StandIn


class UpdateWatcher:
    """Follows a script's backward passes, its updates, and what it reads in between."""

    def __init__(self) -> None:
        self._had_optimizer = False
        self._existing: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._backwards = 0
        self._updates = 0  # windows with one
        self._updated = False  # the current window has one
        self._asked = False  # an optimizer was to step
        # Of the parameters of each optimizer when the current window began: how often they had been written.
        self._writes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._trains = False  # its forward did
        self._listens = False  # a read now belongs to it
        self._is_to_train = True  # the last module was in training mode
        self._read: dict[str, StandIn] = {}  # in the current window, oldest first
        self._unused: dict[str, StandIn] = {}  # while the script was to train, and ran no backward pass yet
        self._steering: dict[str, StandIn] = {}  # that decide which turns of a loop are run, oldest first
        self._left_out: dict[Branch, StandIn] = {}  # what decides about branches that have not been run
        self._run: set[Branch] = set()
        self._seen: dict[str, StandIn] = {}  # in any window, oldest first
        self._harmless: set[str] = set()  # read in windows with an update
        self._skips: Counter[frozenset[str]] = Counter()  # what was read in windows without an update
        self._since_update = 0  # windows without an update, since the last one
        self._most_before_update = 0

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Note that an optimizer exists."""
        self._had_optimizer = True
        self._existing.add(optimizer)

    def enter_forward(self, *, trains: bool) -> None:
        """Note that an outermost module is about to run: what is read now decides about no earlier update."""
        self._listens = False
        self._is_to_train = trains
        self.note_branches()

    def enter_backward(self, *, trains: bool) -> None:
        """Note that an outermost backward pass begins.

        Args:
            trains: whether the module that ran before is in training mode.
        """
        self._close_window()
        self.note_branches()
        self._backwards += 1
        self._trains, self._listens = trains, True
        if not self._stepped:
            self._writes.update((each, _writes_to(each)) for each in self._existing)

    def note_branches(self) -> None:
        """Note that a module, or a backward pass, is about to run: branches around it are not left out."""
        for branch in running_branches(tuple(self._left_out)):
            self._left_out.pop(branch, None)
            self._run.add(branch)

    def note_read(self, read: StandIn, use: ReadUse, branches: tuple[Branch, ...] = ()) -> None:
        """Note that the script got a stand-in, what it does with it, and which branches it decides about."""
        if read.what != FINITE_CHECK:
            self._left_out.update((each, read) for each in branches if each not in self._run)
        if use is ReadUse.REPORTED:
            return
        if use is ReadUse.STEERS and read.what not in (CHECK, FINITE_CHECK):
            _put_last(self._steering, read)
        if self._listens:
            _put_last(self._read, read)
        elif not self._backwards and self._is_to_train and torch.is_grad_enabled():
            _put_last(self._unused, read)

    def note_attempt(self) -> None:
        """Note that the script asks an optimizer, or its scaler, for an update."""
        self._asked = True

    def note_update(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped, and not only its scaler decided to skip the step."""
        self.note_optimizer(optimizer)
        if optimizer.state or any(each.grad is not None for each in parameters_of(optimizer)):
            self._stepped.add(optimizer)
            self._updated = True

    def steering(self, *, stopped: bool) -> tuple[StandIn, ...]:
        """Return the reads by which the script left out branches that run a model, newest first.

        Unless memfit ``stopped`` the script, also those by which it decides which turns of its loops it runs.
        """
        reads = {read.key: read for read in self._left_out.values()}
        return tuple(reversed((reads if stopped else reads | self._steering).values()))

    def missing(self, *, stopped: bool, shortened: bool = False) -> tuple[str, tuple[StandIn, ...]]:
        """Return which updates the script did not make, and what it read before it went on without them.

        Args:
            stopped: whether memfit ended the script, which may have made them later.
            shortened: whether memfit made the script's loops shorter.

        Returns:
            A sentence without a full stop, and the reads, newest first; an empty sentence if none is missing.
        """
        self._close_window()
        if not self._had_optimizer:
            return "", ()
        suspects = [read for key, read in reversed(self._seen.items()) if key not in self._harmless]
        if not self._updates and not self._backwards:
            unused = () if stopped else tuple(reversed(self._unused.values()))
            return "The script made an optimizer and ran no backward pass for its updates" * bool(
                unused
            ), unused
        if not self._updates:
            passes = f"{self._backwards} backward pass{'es' * (self._backwards != 1)}"
            text = f"The script ran {passes}, and its optimizers never stepped"
            text += ", or without gradients" * self._asked
            is_missing = suspects or self._asked or stopped or shortened
            return (text, tuple(suspects)) if is_missing else ("", ())
        waiting = self._waiting() if self._stepped else 0  # none where all updates are made by hand
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
        written = any(before != _writes_to(each) for each, before in self._writes.items())
        self._writes.clear()
        if self._updated or written:
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


def _writes_to(optimizer: Optimizer) -> int:
    """Return how often the parameters of an optimizer have been written in place, as autograd counts it."""
    return sum(0 if each.is_inference() else each._version for each in parameters_of(optimizer))


def _put_last(reads: dict[str, StandIn], read: StandIn) -> None:
    reads.pop(read.key, None)
    reads[read.key] = read
