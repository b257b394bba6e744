"""What held the memory when there was no more: a trace and a report, written while all of it is alive.

    the allocator fails ── PyTorch's observer ──> trace, report, three lines on standard error
                        ── PyTorch's exception ──> the script

PyTorch calls observers where an allocation has failed for good, with everything still in its place and no
lock held, before it raises. An observer cannot be taken away again; memfit adds one for the process.
"""

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from memfit.allocator.timeline import timeline
from memfit.analysis.attribution import attribute
from memfit.analysis.breakdown import breakdown_at
from memfit.analysis.summary import summarize_attributed
from memfit.atomic_files import write_bytes
from memfit.card.find import is_rehearsal
from memfit.card.outside_allocator import BY_CARD, read_once
from memfit.errors import UsageError
from memfit.recording.allocator_history import UNCACHED
from memfit.recording.recorder import Recorder
from memfit.records import DeviceUse, Figure, GroupBy, Machine, Provenance, ScriptEnd, Trace
from memfit.report.html import page
from memfit.report.terminal.summary import in_words, short_path
from memfit.trace.trace_file import write_trace
from memfit.units import format_bytes
from memfit.user_frame import user_line
from memfit.versions import versions

_ROWS = 3

Observer = Callable[["Failure"], None]


@dataclass(frozen=True, slots=True)
class Failure:
    """An allocation that failed, as PyTorch tells its observers. Bytes."""

    device: int
    requested: int
    total: int
    """What the process may use at most."""
    free: int
    """What the device still has."""


def observe(observer: Observer) -> Callable[[], None]:
    """Have a function called at each failure from now on; return what ends that.

    Call it when CUDA is initialised: PyTorch would do it now.

    Raises:
        RuntimeError: PyTorch's allocator has no observers here (backend:cudaMallocAsync), or does not come
            to know of failures.

    Source: ``malloc`` in c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1, and
    ``_cuda_attach_out_of_memory_observer`` in torch/csrc/cuda/Module.cpp.
    """
    if UNCACHED in os.environ:
        raise RuntimeError(f"PyTorch tells of none without its cache ({UNCACHED}).")
    if not _attached:
        torch._C._cuda_attach_out_of_memory_observer(_tell)  # type: ignore[attr-defined]
        _attached.append(True)
    _observers.append(observer)
    return lambda: _observers.remove(observer)


_attached: list[bool] = []
_observers: list[Observer] = []


def _tell(device: int, requested: int, total: int, free: int) -> None:
    for observer in tuple(_observers):
        observer(Failure(device, requested, total, free))


def write(recorder: Recorder, failure: Failure, folder: Path) -> Iterator[str]:
    """Write a trace and a report of this moment, which is a failure's; yield what to say of it, in lines.

    What is known is said before anything is written, and the report is written after the trace is there.

    Args:
        recorder: what has watched so far.
        failure: that of this moment.
        folder: where the files go.

    Raises:
        UsageError: the folder cannot be written to.
    """
    where = user_line()
    device = _device(failure.device)
    asked = f"{format_bytes(failure.requested)} asked for, {format_bytes(failure.free)} free"
    if failure.total < device.total.bytes:
        asked += f", {format_bytes(failure.total)} allowed (per_process_memory_fraction)"
    trace = recorder.finish(
        device,
        ScriptEnd("out of memory", 1, f"torch.OutOfMemoryError: {asked}", where),
        tuple(sys.argv),
        versions(),
        index=failure.device,
        failed={"action": "oom", "device_free": failure.free, "size": failure.requested, "stream": 0},
    )
    line = timeline(trace)
    attribution = attribute(trace, line)
    found = breakdown_at(trace, line, attribution, len(trace.events) - 1)
    rows = [row for row in found.rows[GroupBy.CATEGORY] if row.bytes][:_ROWS]
    most = ", ".join(f"{row.name} {format_bytes(row.bytes)}" for row in rows)
    place = replace(found.place, line=found.place.line or where)
    yield f"out of memory: {asked}, in {in_words(place)}"
    yield f"{format_bytes(found.allocated)} are allocated: {most}".removesuffix(": ")
    name = _written(trace, folder)
    yield f"written: {short_path(str(name))} (memfit explain)"
    report = name.with_suffix(".html")
    try:
        text = page(trace, line, attribution, summarize_attributed(trace, line, attribution))
        write_bytes(report, text.encode(errors="replace"))
    except Exception as error:  # noqa: BLE001 - the trace is there, and tells as much
        yield f"no report was written: {type(error).__name__}: {error}"
    else:
        yield f"written: {short_path(str(report))}"


def _written(trace: Trace, folder: Path) -> Path:
    """Write a trace to the first name of its kind that nobody has: one that is taken is of a whole file."""
    beside = folder / f".memfit-oom.{secrets.token_hex(4)}"
    try:
        write_trace(trace, beside)
        name = _reserve(folder)
        beside.replace(name)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return name


def _device(index: int) -> DeviceUse:
    seen = read_once(index)
    sure, way = Provenance.MEASURED, f"{seen.way}, less PyTorch's reserved"
    if is_rehearsal():
        sure, way = Provenance.ASSUMED, "rehearsal: the ghost's"
    told_apart = sure if seen.way != BY_CARD else Provenance.ASSUMED
    return DeviceUse(
        name=torch.cuda.get_device_name(index),
        total=Figure(torch.cuda.mem_get_info(index)[1], sure, "cudaMemGetInfo"),
        context=Figure(seen.outside, told_apart, way),
        in_use=seen.others,
        machine=Machine.REHEARSAL if is_rehearsal() else Machine.CARD,
    )


def _reserve(folder: Path) -> Path:
    """Return the first name of its kind that nobody has in a folder, taken by an empty file."""
    number = 0
    while True:
        number += 1
        path = folder / f"memfit-oom-{number}.memfit"
        if path.with_suffix(".html").exists():
            continue
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(
                f"Cannot write {path}: {error.strerror}. Name another folder: memfit.watch(folder=...)."
            ) from None
        return path
