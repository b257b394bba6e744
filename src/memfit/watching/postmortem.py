"""What held the memory when it ran out: a trace and a report, written while all tensors are still alive.

    the allocator fails ── PyTorch's observer ──> trace, report, a few lines on standard error
                        ── PyTorch's exception ──> the script

PyTorch calls its observers when an allocation has failed for good, with all memory still allocated and no
lock held, before it raises. An observer cannot be removed again, so memfit adds one per process.
"""

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from memfit.allocator.timeline import memory_timeline
from memfit.analysis.attribution import attribute_allocations
from memfit.analysis.breakdown import breakdown_at
from memfit.analysis.dry_run_result import dry_run_of_attributed_trace
from memfit.analysis.run_stages import stage_of_event
from memfit.atomic_files import write_output_file
from memfit.card.detect_card import is_ghost_loaded
from memfit.card.outside_allocator import BY_CARD, read_outside_memory
from memfit.errors import UsageError
from memfit.recording.allocator_history import UNCACHED
from memfit.recording.recorder import Recorder
from memfit.records import DeviceUse, Figure, GroupBy, MachineKind, Provenance, ScriptEnd, Trace
from memfit.report.html import run_report_html
from memfit.report.places_in_words import location_in_words, short_path
from memfit.trace.trace_file import write_trace
from memfit.units import format_bytes
from memfit.user_lines import innermost_user_line
from memfit.versions import software_versions

_ROWS = 3

Observer = Callable[["AllocationFailure"], None]


@dataclass(frozen=True, slots=True)
class AllocationFailure:
    """An allocation that failed, as PyTorch reports it to its observers; in bytes but for the device."""

    device: int
    requested: int
    total: int
    """The most that the process may use."""
    free: int
    """Free memory of the device."""


def observe_allocation_failures(observer: Observer) -> Callable[[], None]:
    """Call a function at each failure from now on; return a function that ends that.

    Call it after CUDA is initialised; otherwise it initialises CUDA.

    Raises:
        RuntimeError: PyTorch's allocator supports no observers here (backend:cudaMallocAsync), or is not
            informed of failures.

    Source: ``malloc`` in c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1, and
    ``_cuda_attach_out_of_memory_observer`` in torch/csrc/cuda/Module.cpp.
    """
    if UNCACHED in os.environ:
        raise RuntimeError(f"PyTorch does not report failed allocations while {UNCACHED} is set. Unset it.")
    if not _attached:
        torch._C._cuda_attach_out_of_memory_observer(_notify)  # type: ignore[attr-defined]
        _attached.append(True)
    _observers.append(observer)
    return lambda: _observers.remove(observer)


_attached: list[bool] = []
_observers: list[Observer] = []


def _notify(device: int, requested: int, total: int, free: int) -> None:
    for observer in tuple(_observers):
        observer(AllocationFailure(device, requested, total, free))


def write_postmortem(recorder: Recorder, failure: AllocationFailure, folder: Path) -> Iterator[str]:
    """Write a trace and a report of the failure that is happening now; yield lines to print.

    The first lines come before anything is written, and the trace is written before the report.

    Raises:
        UsageError: the folder is not writable.
    """
    where = innermost_user_line()
    device = _device(failure.device)
    shortage = f"{format_bytes(failure.requested)} requested, {format_bytes(failure.free)} free"
    if failure.total < device.total.bytes:
        shortage += f", {format_bytes(failure.total)} allowed (per_process_memory_fraction)"
    trace = recorder.finish(
        device,
        ScriptEnd("out of memory", 1, f"torch.OutOfMemoryError: {shortage}", where),
        tuple(sys.argv),
        software_versions(),
        index=failure.device,
        failed={"action": "oom", "device_free": failure.free, "size": failure.requested, "stream": 0},
    )
    line = memory_timeline(trace)
    attribution = attribute_allocations(trace, line)
    found = breakdown_at(trace, line, attribution, len(trace.events) - 1)
    rows = [row for row in found.rows[GroupBy.CATEGORY] if row.bytes][:_ROWS]
    most = ", ".join(f"{row.name} {format_bytes(row.bytes)}" for row in rows)
    stage = stage_of_event(trace, len(trace.events) - 1)
    place = replace(found.place, line=found.place.line or where, stage=stage)
    yield f"out of memory: {shortage}, in {location_in_words(place)}"
    yield f"{format_bytes(found.allocated)} allocated: {most}".removesuffix(": ")
    name = _write_trace(trace, folder)
    yield f"written: {short_path(str(name))} (memfit explain)"
    report = name.with_suffix(".html")
    try:
        text = run_report_html(
            trace, line, attribution, dry_run_of_attributed_trace(trace, line, attribution)
        )
        write_output_file(report, text.encode(errors="replace"))
    except Exception as error:  # noqa: BLE001 - the trace, which holds the same, is written
        yield f"no report was written: {type(error).__name__}: {error}"
    else:
        yield f"written: {short_path(str(report))}"


def _write_trace(trace: Trace, folder: Path) -> Path:
    """Write a trace under the first unused numbered file name, so that the named file is always complete."""
    beside = folder / f".memfit-oom.{secrets.token_hex(4)}"
    try:
        write_trace(trace, beside)
        name = _reserve_name(folder)
        beside.replace(name)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return name


def _device(index: int) -> DeviceUse:
    seen = read_outside_memory(index)
    provenance, way = Provenance.MEASURED, f"{seen.way}, minus PyTorch's reserved bytes"
    if is_ghost_loaded():
        provenance, way = Provenance.ASSUMED, "rehearsal: the ghost's"
    context = provenance if seen.way != BY_CARD else Provenance.ASSUMED
    return DeviceUse(
        name=torch.cuda.get_device_name(index),
        total=Figure(torch.cuda.mem_get_info(index)[1], provenance, "cudaMemGetInfo"),
        context=Figure(seen.outside, context, way),
        in_use=seen.others,
        machine=MachineKind.REHEARSAL if is_ghost_loaded() else MachineKind.CARD,
    )


def _reserve_name(folder: Path) -> Path:
    """Create an empty file under the first unused numbered file name in a folder; return its path."""
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
                f"Cannot write {path}: {error.strerror}. Choose another folder with memfit.watch(folder=...)."
            ) from None
        return path
