"""Report less memory to the script than the ghost has: the script may choose its batch or caches by it.

PyTorch's C++ code still sees all of it: ``set_per_process_memory_fraction`` takes its share of that.
"""

import functools

import torch


def show_memory(total: int) -> None:
    """Have PyTorch's Python functions report a device of so many bytes, and what is free of them."""
    original = torch.cuda.mem_get_info

    @functools.wraps(original)
    def mem_get_info(device: "torch.types.Device" = None) -> tuple[int, int]:
        free, all_memory = original(device)
        return max(total - (all_memory - free), 0), total

    torch.cuda.mem_get_info = torch.cuda.memory.mem_get_info = mem_get_info
    torch._C._CudaDeviceProperties.total_memory = property(lambda _: total)  # type: ignore[assignment]
