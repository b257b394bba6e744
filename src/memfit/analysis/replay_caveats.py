"""What must be known of the replays of a trace: what is assumed in them, and what no history tells."""

from collections.abc import Iterator, Sequence

from memfit.allocator.config import script_settings
from memfit.allocator.requests import RequestKind, Requests
from memfit.records import MarkKind, Note, Provenance, SettingOutcome, Trace
from memfit.units import format_bytes

NEWEST = (2, 14)
"""Version of PyTorch that a snapshot, which names none, is taken to be of."""


def caveats(
    trace: Trace, asked: Requests, outcomes: Sequence[SettingOutcome], *, total: int, taken: int, context: int
) -> Iterator[Note]:
    """Return a note for each.

    Args:
        trace: that was replayed.
        asked: its requests.
        outcomes: how it fared; under its own settings first.
        total: bytes of the device.
        taken: bytes of it that the context and other processes hold.
        context: bytes of those that are the context's.
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
            f"A snapshot does not say which PyTorch wrote it: it is taken to be {version}.",
        )
    script = script_settings(trace.settings)
    if script:
        yield Note(Provenance.EXACT, f"The script itself sets {script}: so does every row.")
    if any(not row.setting.caching for row in outcomes):
        text = "Without its cache PyTorch takes as much as cudaMalloc gives: whole 2 MiB, from 1 MiB upwards."
        yield Note(Provenance.ASSUMED, text)


def _of_the_device(trace: Trace, context: int) -> Iterator[Note]:
    if context and trace.device.context.provenance is Provenance.ASSUMED:
        yield Note(Provenance.ASSUMED, f"What the CUDA context takes, {format_bytes(context)}, is assumed.")
    if not context:
        yield Note(
            Provenance.ASSUMED,
            "What the CUDA context takes is not counted: the trace does not say. --gpu NAME adds it.",
        )


def _of_the_history(trace: Trace, asked: Requests) -> Iterator[Note]:
    if asked.reserved_before:
        yield Note(
            Provenance.ASSUMED,
            f"The history begins with {asked.reserved_before:,} bytes reserved. What was live of them is "
            "taken to be allocated anew, in the order of addresses; what was cached, and where, is unknown.",
        )
    if failed := asked.ask.count(RequestKind.FAILED):
        yield Note(
            Provenance.ASSUMED,
            f"The script went on without {failed} mallocs that failed. So do replays, on a larger GPU, too.",
        )
    if trace.end.reason == "out of memory":
        yield Note(
            Provenance.ASSUMED,
            "The script ran out of memory: what it would have asked for after that is not known.",
        )


def _of_graphs(trace: Trace, asked: Requests) -> Iterator[Note]:
    if asked.captures:
        yield Note(
            Provenance.ASSUMED,
            "When a CUDA graph was deleted is not told: its pool counts as used until some of it was given "
            "back. PyTorch may need less where memory is short in between.",
        )
    if asked.captures and not any(mark.kind is MarkKind.CAPTURE_BEGIN for mark in trace.marks):
        yield Note(
            Provenance.ASSUMED,
            "When CUDA graphs were captured is not told: a malloc that is short of memory while capturing "
            "fails in PyTorch, and empties the cache here.",
        )


def _disagreement(trace: Trace, own: SettingOutcome, *, total: int, taken: int) -> Iterator[Note]:
    """Say so where the trace's own settings on its own device do not end as PyTorch did."""
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
            f" reserved, PyTorch with {theirs[0]:,} and {theirs[1]:,}: the script did what is not modelled, "
            "and the figures are as far off. docs/allocator.md lists what is known.",
        )
