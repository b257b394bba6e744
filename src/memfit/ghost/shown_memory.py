"""Report less memory to the script than the ghost has: the script may choose its batch or caches by it.

PyTorch's C++ code still sees all of it: ``set_per_process_memory_fraction`` takes its share of that.
"""

import functools
from collections.abc import Callable
from typing import Any

from memfit.patching.patches import Patch

_FREE = Patch("torch.cuda.memory", "mem_get_info", also="torch.cuda", why="report a smaller card")
_TOTAL = Patch("torch._C:_CudaDeviceProperties", "total_memory", why="report a smaller card")


def show_memory(total: int) -> None:
    """Have PyTorch's Python functions report a device of so many bytes, and what is free of them."""

    def shown(original: Callable[[Any], tuple[int, int]]) -> Callable[[Any], tuple[int, int]]:
        @functools.wraps(original)
        def mem_get_info(device: Any = None) -> tuple[int, int]:
            free, all_memory = original(device)
            return max(total - (all_memory - free), 0), total

        return mem_get_info

    _FREE.install("mem_get_info", shown)
    _TOTAL.install("total_memory", lambda _: property(lambda _: total))
