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
            f"A snapshot does not record its PyTorch version; {version} is assumed.",
        )
    script = script_settings(trace.settings)
    if script:
        yield Note(Provenance.EXACT, f"The script itself sets {script}: every row includes it.")
    if any(not row.setting.caching for row in outcomes):
        text = "Without its cache PyTorch takes what cudaMalloc allocates: multiples of 2 MiB, from 1 MiB up."
        yield Note(Provenance.ASSUMED, text)


def _of_the_device(trace: Trace, context: int) -> Iterator[Note]:
    if context and trace.device.context.provenance is Provenance.ASSUMED:
        yield Note(Provenance.ASSUMED, f"The size of the CUDA context, {format_bytes(context)}, is assumed.")
    if not context:
        yield Note(
            Provenance.ASSUMED,
            "The CUDA context is not counted: the trace does not record its size. --gpu NAME adds it.",
        )


def _of_the_history(trace: Trace, asked: Requests) -> Iterator[Note]:
    if asked.reserved_before:
        yield Note(
            Provenance.ASSUMED,
            f"The history begins with {asked.reserved_before:,} bytes already reserved. Replays "
            "allocate the live blocks first, in the order of addresses; the cached blocks are unknown.",
        )
    if failed := asked.ask.count(RequestKind.FAILED):
        yield Note(
            Provenance.ASSUMED,
            f"The script continued after {failed} failed mallocs. Replays do so even on a larger GPU.",
        )
    if trace.end.reason == "out of memory":
        yield Note(
            Provenance.ASSUMED,
            "The script ran out of memory: what it would have requested after that is unknown.",
        )


def _of_graphs(trace: Trace, asked: Requests) -> Iterator[Note]:
    if asked.captures:
        yield Note(
            Provenance.ASSUMED,
            "The history does not record when a CUDA graph was deleted: its pool counts as used until part "
            "of it is released. PyTorch may need less if memory is short in between.",
        )
    if asked.captures and not any(mark.kind is MarkKind.CAPTURE_BEGIN for mark in trace.marks):
        yield Note(
            Provenance.ASSUMED,
            "The history does not record when CUDA graphs were captured: a malloc that runs short of memory "
            "during a capture fails in PyTorch, but empties the cache here.",
        )


def _disagreement(trace: Trace, own: SettingOutcome, *, total: int, taken: int) -> Iterator[Note]:
    """Yield a note if a replay under the trace's own settings ends differently from PyTorch."""
    device = trace.device
    same = (total, taken) == (device.total.bytes, device.context.bytes + device.in_use)
    if not same or not own.replay.fits or not trace.statistics:
        return
    names = ("allocated_bytes.all.current", "reserved_bytes.all.current")
    theirs = [trace.statistics.get(name, 0) for name in names]
    ours = [own.replay.statistics[name] for name in names]
    if theirs != ours:
        yield Note(
            Provenance.ASSUMED,
            f"Under the trace's own settings the replay ends with {ours[0]:,} bytes allocated and {ours[1]:,}"
            f" reserved, PyTorch with {theirs[0]:,} and {theirs[1]:,}: the script did something that "
            "memfit does not model, and the figures are off by as much. docs/allocator.md lists known cases.",
        )
