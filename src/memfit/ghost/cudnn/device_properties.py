"""A device described to cuDNN, in the words that it asks for."""

from collections.abc import Mapping

from memfit.ghost.device import GhostDevice


def properties(device: GhostDevice, cuda_version: str) -> Mapping[str, object]:
    """Return what cuDNN wants to know of a device.

    Of all this, cuDNN 9.24 was seen to look at the compute capability alone (docs/decisions/0013).

    Args:
        device: as the ghost stands in for it.
        cuda_version: of the driver, as "13.0".

    Source: the keys are those of OpenXLA's xla/backends/gpu/target_config/cudnn_device_props.cc; what
    is the same for every card of compute capability 7.0 to 12.0 is from the CUDA C++ Programming Guide,
    technical specifications per compute capability.
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
        "maxGridSize": [2147483647, 65535, 65535],
        "supportCoopLaunch": 1,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "cudaDeviceId": 0,
        "driverVer": 1000 * major + 10 * minor,
        "deviceName": device.name,
    }
