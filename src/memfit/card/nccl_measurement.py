"""Measure what NCCL takes of its own on this machine's GPUs, beside the rule that dry runs use."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from memfit.card.nccl_probe import STAGES, NcclProbeRank, NcclProbeResult
from memfit.devices import find_device
from memfit.errors import UnknownDeviceError
from memfit.ghost.ranks.nccl_memory import KERNELS, Communicator, nccl_memory
from memfit.python_command import code_running_module
from memfit.records import NcclMeasurement, NcclStage
from memfit.temporary_folders import TemporaryFolder

_TIMEOUT = 180  # seconds for all processes
_LAST_LINES = 5


def measure_nccl(card: str, count: int) -> NcclMeasurement | None:
    """Measure what rank 0 of a communicator over this machine's GPUs takes; None with fewer than two GPUs.

    Args:
        card: the name of the GPUs, as the driver gives it.
        count: how many GPUs CUDA shows this process.
    """
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu] or range(count)
    gpus = [str(gpu) for gpu in visible][:count]
    if len(gpus) <= 1:
        return None
    with TemporaryFolder() as folder:
        found = _probe(gpus, Path(folder))
    if isinstance(found, str):
        return NcclMeasurement(len(gpus), (), found)
    before = found.outside[0]
    rows = zip(STAGES[1:], found.outside[1:], _rule(card, len(gpus)), strict=True)
    return NcclMeasurement(
        len(gpus), tuple(NcclStage(what, held - before, rule) for what, held, rule in rows)
    )


def _rule(card: str, ranks: int) -> tuple[int | None, ...]:
    """Return the bytes that dry runs assume after each stage; None for a card that memfit does not know."""
    used: tuple[dict[str, Any], ...] = (
        {},
        {"collectives": True},
        {"collectives": True, "all_reduces": True},
        {"collectives": True, "all_reduces": True, "sends": ranks - 1, "receives": ranks - 1},
    )
    try:
        device = find_device(card)
    except UnknownDeviceError:
        return (None,) * len(used)
    return tuple(
        KERNELS + nccl_memory(Communicator(ranks=ranks, local_ranks=ranks, **some), device, os.environ).total
        for some in used
    )


def _probe(gpus: list[str], folder: Path) -> NcclProbeResult | str:
    """Run a process on each GPU; return what rank 0 measured, or the last lines of the first error."""
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                code_running_module("memfit.card.nccl_probe"),
                msgspec.json.encode(NcclProbeRank(rank, len(gpus), str(folder / "store"))).decode(),
            ],
            stdout=subprocess.PIPE,
            stderr=(folder / f"{rank}").open("wb"),
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
        )
        for rank, gpu in enumerate(gpus)
    ]
    until = time.monotonic() + _TIMEOUT
    try:
        out, _ = processes[0].communicate(timeout=_TIMEOUT)
        for process in processes[1:]:
            process.wait(max(1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"no answer within {_TIMEOUT} s"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, process in enumerate(processes):
        if process.returncode:
            lines = (folder / f"{rank}").read_text(errors="replace").splitlines()
            return "\n".join([f"rank {rank}:", *lines[-_LAST_LINES:]])
    return msgspec.json.decode(out.splitlines()[-1], type=NcclProbeResult)
