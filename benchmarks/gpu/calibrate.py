"""Measure a card's memory, and the bytes that cudaMalloc takes for each request size. Prints JSON."""

import ctypes
import json
import re
import sys
from pathlib import Path

import torch

COPIES = 64
KIB, MIB = 1 << 10, 1 << 20
SIZES = (1, 512, 4 * KIB, 64 * KIB, 512 * KIB, MIB, MIB + 1, 2 * MIB, 3 * MIB, 20 * MIB + 1)


def runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that PyTorch has loaded into this process."""
    loaded = re.search(r"(/\S*libcudart[^/\s]*\.so\S*)", Path("/proc/self/maps").read_text())
    if loaded is None:
        sys.exit("PyTorch has loaded no libcudart in this process, so cudaMalloc cannot be measured.")
    return ctypes.CDLL(loaded[1])


def taken(library: ctypes.CDLL, size: int) -> dict[str, int | float]:
    """Allocate a size ``COPIES`` times; return the bytes by which free memory fell, first and on average."""
    pointers = [ctypes.c_void_p() for _ in range(COPIES)]
    before, _ = torch.cuda.mem_get_info(0)
    first = 0
    for number, pointer in enumerate(pointers):
        if library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) != 0:
            sys.exit(f"cudaMalloc of {size:,} bytes failed")
        if number == 0:
            first = before - torch.cuda.mem_get_info(0)[0]
    each = (before - torch.cuda.mem_get_info(0)[0]) / COPIES
    for pointer in pointers:
        library.cudaFree(pointer)
    return {"requested": size, "first": first, "each": each}


def main() -> None:
    """Print the figures of the first card."""
    torch.empty(1, device="cuda")
    properties = torch.cuda.get_device_properties(0)
    library = runtime()
    print(
        json.dumps(
            {
                "total_by_cudaMemGetInfo": torch.cuda.mem_get_info(0)[1],
                "total_by_properties": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
                "l2_cache": properties.L2_cache_size,
                "compute_capability": [properties.major, properties.minor],
                "cudnn": torch.backends.cudnn.version(),
                "cudaMalloc": [taken(library, size) for size in SIZES],
            }
        )
    )


if __name__ == "__main__":
    main()
