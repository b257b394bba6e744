"""Every block of a run as columns: its lifetime, its address, and its attribution.

    born                    freed                      done
    ALLOC                   FREE_REQUESTED             FREE_COMPLETED
    |------- allocated -----|- other streams use it ---|   (most often both at once)

An event is a point between two states: a block is live after event ``e`` if ``born <= e < freed``.
"""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt

from memfit.allocator.config import AllocatorConfig
from memfit.allocator.reconstruct_initial_state import InitialAllocatorState, reconstruct_initial_state
from memfit.errors import FileFormatError
from memfit.records import Action, Attribution, Category, Phase, Trace

Numbers = npt.NDArray[np.int64]
EARLIER = len(Category)
"""The category of blocks allocated before the history begins."""
LARGEST = 1 << 53
"""Numbers from here on are not exact in JavaScript; no device has such addresses."""


@dataclass(frozen=True, slots=True)
class BlockColumns:
    """Columns of equal length, sorted by ``born``; blocks older than the history come first."""

    born: Numbers
    """Event of the allocation; -1 if before the history."""
    freed: Numbers
    """Event of the free; -1 if before the history, the number of events if the block is never freed."""
    done: Numbers
    """Event after which the allocator may reuse it; equal to ``freed`` if that is at once."""
    address: Numbers
    requested: Numbers
    size: Numbers
    """Bytes of the block: requested, rounded, with an unsplit remainder."""
    category: Numbers
    """``Category``, or ``EARLIER``."""
    phase: Numbers
    """Index into ``tuple(Phase)``."""
    module: Numbers
    """Index into the attribution's ``modules``, likewise ``op`` and ``line``; -1 before the history."""
    op: Numbers
    line: Numbers
    tensor: Numbers
    """Index into ``Trace.tensors``, or -1."""
    stack: Numbers
    """Index into ``Trace.stacks``, or -1; in a backward, the stack of its forward."""

    def __len__(self) -> int:
        return len(self.born)

    def __getitem__(self, which: npt.NDArray[np.bool_] | Numbers) -> Self:
        return type(self)(*(getattr(self, column.name)[which] for column in fields(self)))


def block_columns_of_trace(trace: Trace, attribution: Attribution) -> BlockColumns:
    """Return all blocks of a trace as columns."""
    events, born = trace.events, attribution.born
    old = _old(trace, reconstruct_initial_state(trace, AllocatorConfig.read(trace.settings)))
    label_stack = np.array([*(label.stack for label in trace.labels), -1], np.int64)
    stack = events.stack[born].astype(np.int64)
    tensor = events.tensor[born] if events.tensor is not None else np.full(len(born), -1)
    unknown = np.full(len(old), -1)
    everywhere = np.concatenate((old[:, 0].astype(np.uint64), events.address[born]))
    size = np.concatenate((old[:, 1], attribution.block))
    if len(size) and int(size.max()) >= LARGEST:
        raise FileFormatError(
            f"Cannot draw this trace: it has a block of {int(size.max()):,} bytes, which is more memory than "
            "any device has. Record the run again."
        )
    if len(size) and int(everywhere.max()) >= LARGEST:
        raise FileFormatError(
            f"Cannot draw this trace: it has a block at {int(everywhere.max()):#x}, which is not an address "
            "on any device. Record the run again."
        )
    address = everywhere.astype(np.int64)
    freed = np.concatenate((old[:, 2], attribution.freed))
    return BlockColumns(
        born=np.concatenate((unknown, np.where(events.action[born] == Action.EARLIER, -1, born))),
        freed=freed,
        done=_done(trace, address, freed),
        address=address,
        requested=np.concatenate((old[:, 1], attribution.requested)),
        size=size,
        category=np.concatenate((np.full(len(old), EARLIER), attribution.category)),
        phase=np.concatenate((np.full(len(old), tuple(Phase).index(Phase.SETUP)), attribution.phase)),
        module=np.concatenate((unknown, attribution.module)),
        op=np.concatenate((unknown, attribution.op)),
        line=np.concatenate((unknown, attribution.line)),
        tensor=np.concatenate((unknown, tensor)),
        stack=np.concatenate((unknown, np.where(stack >= 0, stack, label_stack[events.label[born]]))),
    )


def _old(trace: Trace, start: InitialAllocatorState) -> Numbers:
    """Return rows of address, size and event of the free for each block older than the history.

    Not every history has the requested sizes; the size of the block stands for them.
    """
    events = trace.events
    freeing = np.flatnonzero(events.action == Action.FREE_REQUESTED)[::-1]
    # The first free at an address is that of the block that was live there at the beginning.
    first_free = dict(zip(events.address[freeing].tolist(), freeing.tolist(), strict=True))
    reported = set(events.address[events.action == Action.EARLIER].tolist())
    rows = [
        (address, stop - address, first_free.get(address, len(events)))
        for address, (stop, _) in start.live.items()
        if address not in reported
    ]
    rows.extend((address, stop - address, -1) for address, (stop, _) in start.pending.items())
    return np.array(rows, np.int64).reshape(-1, 3)


def _done(trace: Trace, address: Numbers, freed: Numbers) -> Numbers:
    """Return the event that completes each block's free.

    The allocator does not reuse an address before that, so the frees of an address complete in the order in
    which they were requested.
    """
    count = len(trace.events)
    completed = np.flatnonzero(trace.events.action == Action.FREE_COMPLETED)
    at = trace.events.address[completed].astype(np.int64)
    completed = completed[np.argsort(at, kind="stable")]
    at.sort()
    done = np.full(len(freed), count)
    ended = np.flatnonzero(freed < count)
    ended = ended[np.lexsort((freed[ended], address[ended]))]
    of = address[ended]
    nth = np.arange(len(of)) - np.searchsorted(of, of)  # how many frees of this address came before
    place = np.searchsorted(at, of) + nth
    there = place < np.searchsorted(at, of, side="right")
    done[ended[there]] = completed[place[there]]
    return np.where(done == freed + 1, freed, done)
