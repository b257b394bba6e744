"""The log of a caching allocator: one flat list of ints, a row of five per change.

    kind, bytes, requested bytes, change of the number of split blocks, change of their bytes

``memory_stats.py`` computes ``torch.cuda.memory_stats()`` from it.
"""

# Kinds of the small pool; add LARGE for the large pool.
ALLOC, FREE, FREE_REQUESTED, FREE_COMPLETED = range(4)
SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP = range(4, 8)
LARGE = 8
ROW = 5
