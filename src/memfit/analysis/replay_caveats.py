"""Caveats of a trace's replays: what they assume, and what a history does not record."""

from collections.abc import Iterator, Sequence

from memfit.allocator.config import script_settings
from memfit.allocator.requests import RequestKind, Requests
from memfit.records import MarkKind, Note, Provenance, SettingOutcome, Trace
from memfit.units import format_bytes

NEWEST = (2, 14)
"""PyTorch version assumed for a snapshot, which records none."""


def caveats(
    trace: Trace, asked: Requests, outcomes: Sequence[SettingOutcome], *, total: int, taken: int, context: int
) -> Iterator[Note]:
    """Yield a note for each caveat.

    Args:
        trace: the trace that was replayed.
        asked: its requests.
        outcomes: one for each setting; the trace's own first.
        total: bytes of the device.
        taken: bytes of it that the context and other processes hold.
        context: bytes of these that the context holds.
    """
    yield from _of_the_settings(trace, outcomes)
    yield from _of_the_device(trace, context)
    yield from _of_the_history(trace, asked)
    yield from _of_graphs(trace, asked)
    if not asked.reserved_before:
        yield from _disagreement(trace, outcomes[0], total=total, taken=taken)


def _of_the_settings(trace: Trace, outcomes: Sequence[SettingOutcome]) -> Iterator[Note]:
    if not trace.versions.get("torch"):
        version = ".".join(map(str, NEWEST))
        yield Note(
            Provenance.ASSUMED,
            f"A memory snapshot does not record its PyTorch version; memfit assumes {version}.",
        )
    script = script_settings(trace.settings)
    if script:
        yield Note(Provenance.EXACT, f"The script itself sets {script}, so every row includes this setting.")
    if any(not row.setting.caching for row in outcomes):
        text = (
            "Without its cache, PyTorch calls cudaMalloc for each tensor, and cudaMalloc rounds sizes of "
            "1 MiB and more up to multiples of 2 MiB."
        )
        yield Note(Provenance.ASSUMED, text)


def _of_the_device(trace: Trace, context: int) -> Iterator[Note]:
    if context and trace.device.context.provenance is Provenance.ASSUMED:
        yield Note(Provenance.ASSUMED, f"The size of the CUDA context, {format_bytes(context)}, is assumed.")
    if not context:
        yield Note(
            Provenance.ASSUMED,
            "The CUDA context is not counted, because the trace does not record its size. With --gpu NAME, "
            "memfit counts the context of that GPU.",
        )


def _of_the_history(trace: Trace, asked: Requests) -> Iterator[Note]:
    if asked.reserved_before:
        yield Note(
            Provenance.ASSUMED,
            f"The allocator history begins with {asked.reserved_before:,} bytes already reserved. Replays "
            "first allocate the blocks that were live then, in the order of their addresses; which blocks "
            "were cached then is unknown.",
        )
    if failed := asked.ask.count(RequestKind.FAILED):
        yield Note(
            Provenance.ASSUMED,
            f"The script continued after {failed} failed allocations. These allocations fail in replays, "
            "too, even on a larger GPU.",
        )
    if trace.end.reason == "out of memory":
        yield Note(
            Provenance.ASSUMED,
            "The script ran out of memory. The allocations that would have followed are unknown.",
        )


def _of_graphs(trace: Trace, asked: Requests) -> Iterator[Note]:
    if asked.captures:
        yield Note(
            Provenance.ASSUMED,
            "The allocator history does not record when a CUDA graph was deleted. In a replay, the graph's "
            "memory pool stays in use until part of the pool is released. PyTorch may need less memory if "
            "memory runs short before that.",
        )
    if asked.captures and not any(mark.kind is MarkKind.CAPTURE_BEGIN for mark in trace.marks):
        yield Note(
            Provenance.ASSUMED,
            "The allocator history does not record when CUDA graphs were captured. If memory runs short "
            "during a capture, the allocation fails in PyTorch; in a replay, it empties the cache instead.",
        )


def _disagreement(trace: Trace, own: SettingOutcome, *, total: int, taken: int) -> Iterator[Note]:
    """Yield a note if a replay under the trace's own settings ends differently from PyTorch."""
    device = trace.device
    same = (total, taken) == (device.total.bytes, device.outside.bytes + device.in_use)
    if not same or not own.replay.fits or not trace.statistics:
        return
    names = ("allocated_bytes.all.current", "reserved_bytes.all.current")
    theirs = [trace.statistics.get(name, 0) for name in names]
    ours = [own.replay.statistics[name] for name in names]
    if theirs != ours:
        yield Note(
            Provenance.ASSUMED,
            f"Under the trace's own settings, the replay ends with {ours[0]:,} bytes allocated and "
            f"{ours[1]:,} reserved, but PyTorch ended with {theirs[0]:,} allocated and {theirs[1]:,} "
            "reserved. The script did something that memfit does not model, and the figures are off by the "
            "difference. docs/allocator.md lists known cases.",
        )
