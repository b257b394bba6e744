"""What a caching allocator did: one flat list of ints, a row of five for each change.

    kind, bytes, requested bytes, change of the number of split blocks, change of their bytes

``statistics.py`` makes ``torch.cuda.memory_stats()`` of it.
"""

# The kinds of the small pool are these, those of the large pool LARGE more.
ALLOC, FREE, FREE_REQUESTED, FREE_COMPLETED = range(4)
SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP = range(4, 8)
LARGE = 8
ROW = 5
