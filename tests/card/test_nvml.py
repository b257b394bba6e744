"""What NVML's answers become, without a card: a library that answers as we choose."""

from types import SimpleNamespace

import pytest

from memfit.card.nvml import CardMemoryUse, NvmlLibrary

MIB = 1 << 20
NOT_AVAILABLE = (1 << 64) - 1
NO_PERMISSION = 4


def library(status):
    """Return NVML of a card with 7 MiB in use: 5 MiB by process 11, and an unknown amount by process 12."""

    def count_cards(count):
        count._obj.value = 1
        return 0

    def memory_of(handle, memory):
        memory._obj.used = 7 * MIB
        return 0

    def processes_of(handle, count, processes):
        count._obj.value = 2
        processes[0].pid, processes[0].used = 11, 5 * MIB
        processes[1].pid, processes[1].used = 12, NOT_AVAILABLE
        return status

    return SimpleNamespace(
        nvmlDeviceGetCount_v2=count_cards,
        nvmlDeviceGetHandleByIndex_v2=lambda index, handle: 0,
        nvmlDeviceGetMemoryInfo=memory_of,
        nvmlDeviceGetComputeRunningProcesses_v3=processes_of,
    )


@pytest.mark.parametrize(("status", "processes"), [(0, {11: 5 * MIB}), (NO_PERMISSION, {})])
def test_processes_are_those_whose_bytes_nvml_gives(status, processes):
    assert NvmlLibrary(library(status)).usage() == {0: CardMemoryUse(7 * MIB, processes)}


def test_a_driver_without_a_function_reports_nothing():
    assert NvmlLibrary(SimpleNamespace()).usage() == {}
    assert NvmlLibrary(SimpleNamespace()).driver_version() == ""
