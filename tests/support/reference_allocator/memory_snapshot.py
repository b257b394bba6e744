"""Segments and their blocks as ``torch.cuda.memory_snapshot()`` reports them.

Source: ``snapshot`` of ``DeviceCachingAllocator``, c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1.
"""

from collections.abc import Iterable

from memfit import records
from memfit.records import DEFAULT_POOL, Segment
from support.reference_allocator.blocks import Block


def snapshot(blocks: Iterable[Block]) -> tuple[Segment, ...]:
    """Return every segment, by address; an expandable segment counts as one per mapped range.

    Args:
        blocks: every block of an allocator, by address.
    """
    heads = (block for block in blocks if block.mapped and (block.prev is None or not block.prev.mapped))
    return tuple(map(_segment, heads))


def _segment(head: Block) -> Segment:
    blocks, block, address, owner = [], head, head.address, head.pool.owner
    while block is not None and block.mapped:
        requested = 0 if block.free else block.requested
        blocks.append(records.SnapshotBlock(block.address, block.size, requested, _state(block)))
        address += block.size
        block = block.next  # type: ignore[assignment]
    return Segment(
        address=head.address,
        size=address - head.address,
        stream=head.stream,
        kind="small" if head.pool.small else "large",
        pool=DEFAULT_POOL if owner is None else owner.id,
        expandable=head.expandable is not None,
        blocks=tuple(blocks),
    )


def _state(block: Block) -> str:
    if block.free:
        return "inactive"
    return "active_awaiting_free" if block.waits else "active_allocated"
