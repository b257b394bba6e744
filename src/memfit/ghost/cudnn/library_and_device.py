"""What a query of cuDNN needs: the library that PyTorch would load here, and the device to plan for."""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from memfit.ghost.device import GhostDevice


def device_properties(device: GhostDevice, cuda_version: str) -> Mapping[str, object]:
    """Return the description of a device for cuDNN.

    cuDNN 9.24 was observed to use only the compute capability (docs/decisions/0013).

    Args:
        device: the device that the ghost stands in for.
        cuda_version: the driver's, such as "13.0".

    Source: the keys are those of OpenXLA's xla/backends/gpu/target_config/cudnn_device_props.cc; values
    shared by all cards of compute capability 7.0 to 12.0 are from the CUDA C++ Programming Guide, technical
    specifications per compute capability.
    """
    major, minor = (int(part) for part in cuda_version.split(".")[:2])
    return {
        "deviceVer": 100 * device.major + 10 * device.minor,
        "multiProcessorCount": device.multiprocessors,
        "warpSize": 32,
        "maxSharedMemoryPerBlock": device.shared_per_block,
        "maxSharedMemoryPerBlockOptin": device.shared_per_block_optin,
        "reservedSharedMemoryPerBlock": 1024 if device.major >= 8 else 0,  # noqa: PLR2004 - capability 8.0
        "maxRegistersPerSM": 65536,
        "maxCtasPerSM": device.blocks_per_multiprocessor,
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": device.threads_per_multiprocessor,
        "regsPerBlock": 65536,
        "totalGlobalMem": device.total_bytes,
        "smClockRateKHz": device.clock_khz,
        "l2CacheSize": device.l2_bytes,
        "maxBlockSize": [1024, 1024, 64],
        "memClockRateKHz": device.memory_clock_khz,
        "memoryBusWidth": device.memory_bus_bits,  # cuDNN 9.28 requires it
        "maxGridSize": [2147483647, 65535, 65535],
        "supportCoopLaunch": 1,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "cudaDeviceId": 0,
        "driverVer": 1000 * major + 10 * minor,
        "deviceName": device.name,
    }


_SYSTEM = ("/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")


def find_library(soname: str, torch_folder: Path) -> Path | None:
    """Return the file that PyTorch would load for a SONAME ("libcudnn.so.9"), or None.

    Source: the RPATH of libtorch_cuda.so in PyTorch's wheels, then _preload_cuda_deps in
    torch/__init__.py 2.14 (nvidia/*/lib of every folder on the path); conda installs it in the
    environment's lib; then the system loader's folders.
    """
    return next((path for folder in _folders(torch_folder) if (path := folder / soname).is_file()), None)


def _folders(torch_folder: Path) -> Iterator[Path]:
    yield torch_folder / "lib"
    for entry in (torch_folder.parent, *map(Path, sys.path)):
        yield from sorted(entry.glob("nvidia/*/lib"))
    yield Path(sys.prefix) / "lib"
    yield from (Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry)
    yield from map(Path, _SYSTEM)
