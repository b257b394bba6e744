"""One trace replayed under several allocator settings: what each needs and costs, and where it fails."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from memfit.allocator.config import (
    allocator_conf_from_environment,
    allocator_settings_made_by_script,
    check_torch_has_settings,
)
from memfit.allocator.requests import AllocatorRequests, RequestKind, allocator_requests_of_trace
from memfit.allocator.setting_outcomes import (
    allocator_settings_worth_trying,
    recommended_setting_outcome,
    replay_under_setting,
    smallest_device_that_fits,
)
from memfit.analysis.event_locations import script_location_at
from memfit.devices import Device
from memfit.errors import UsageError
from memfit.records import (
    AllocatorComparison,
    AllocatorSetting,
    MarkKind,
    Note,
    Provenance,
    ReplayResult,
    SecondsPerDriverCall,
    SettingOutcome,
    Trace,
)
from memfit.units import format_bytes

NEWEST = (2, 14)
"""PyTorch version assumed for a snapshot, which records none."""


def compare_allocator_settings(
    trace: Trace,
    confs: Iterable[str] | str | None,
    *,
    device: Device | None = None,
    memory: int | None = None,
    in_use: int | None = None,
    smallest: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> AllocatorComparison:
    """Replay a trace under its own settings first, and then under each of the others.

    Args:
        trace: the history to replay.
        confs: values of ``PYTORCH_ALLOC_CONF``; None tries ``allocator_settings_worth_trying``.
        device: replaces the device that the trace was made for.
        memory: bytes of device memory instead of that device's.
        in_use: bytes that other processes hold; by default as when the trace was made.
        smallest: also find the smallest device for each setting.
        on_progress: called with the name of each setting before it is tried.

    Returns:
        One outcome for each setting, with notes on all of them.

    Raises:
        UsageError: the trace is of CPU tensors; PyTorch does not accept a conf; the device's memory is
            unknown, or none of it is left.
        FileFormatError: the trace does not record the requests.
    """
    total, context = _gpu(trace, device, memory)
    asked = allocator_requests_of_trace(trace)
    version, rates = torch_version(trace), SecondsPerDriverCall()
    others = trace.device.in_use if in_use is None else in_use
    for name, value in (("memory", total), ("in_use", others)):
        if not isinstance(value, int) or value < 0:
            raise UsageError(f"{name} must be a whole number of bytes, 0 or more, not {value!r}.")
    taken = context + others
    if taken >= total:
        raise UsageError(
            f"The GPU has no memory left for the script: of its {format_bytes(total)}, the CUDA context uses "
            f"{format_bytes(context)}, and other processes use {format_bytes(others)}."
        )
    script = allocator_settings_made_by_script(trace.settings)
    own = AllocatorSetting(allocator_conf_from_environment(trace.settings))
    if isinstance(confs, str):
        confs = (confs,)
    for conf in confs or ():
        check_torch_has_settings(conf, version)
    tried = [*map(AllocatorSetting, confs)] if confs is not None else _worth_trying(asked, version)
    outcomes: list[SettingOutcome] = []
    for setting in (replace(setting, script=script) for setting in dict.fromkeys((own, *tried))):
        on_progress(setting.name or "default")
        row = replay_under_setting(asked, setting, total=total, taken=taken, version=version, rates=rates)
        if smallest:
            size = smallest_device_that_fits(asked, setting, taken=taken, version=version)
            row = replace(row, smallest=size)
        outcomes.append(replace(row, replay=_located(trace, row.replay), current=not outcomes))
    return AllocatorComparison(
        outcomes=tuple(outcomes),
        recommended=recommended_setting_outcome(outcomes[1:], outcomes[0]),
        total=total,
        taken=taken,
        rates=rates,
        notes=tuple(_caveats_of_replays(trace, asked, outcomes, total=total, taken=taken, context=context)),
    )


def _located(trace: Trace, replay: ReplayResult) -> ReplayResult:
    """Return a replay of a trace with the place of its failure, if there is one."""
    if (failure := replay.failure) is None:
        return replay
    return replace(replay, failure=replace(failure, where=script_location_at(trace, failure.event)))


def _gpu(trace: Trace, device: Device | None, memory: int | None) -> tuple[int, int]:
    """Return the bytes of the device, and of the CUDA context."""
    total, context = (
        (device.total_bytes, device.context_bytes)
        if device is not None
        else (trace.device.total.bytes, trace.device.outside.bytes)
    )
    if memory is None and not total:
        raise UsageError(
            "This trace does not record its GPU. Name a GPU with --gpu, or give the GPU's memory with "
            "--memory, for example --memory 24GiB."
        )
    return total if memory is None else memory, context


def _worth_trying(asked: AllocatorRequests, version: tuple[int, int]) -> list[AllocatorSetting]:
    """Return the settings worth trying for these requests.

    Emptying the cache each step needs steps; without its cache PyTorch fails to capture graphs.
    """
    steps = RequestKind.STEP in asked.ask
    return [
        setting
        for setting in allocator_settings_worth_trying(version)
        if (steps or not setting.empty_cache_each_step) and (setting.caching or not asked.captures)
    ]


def torch_version(trace: Trace) -> tuple[int, int]:
    """Return PyTorch's version, major and minor."""
    found = re.match(r"(\d+)\.(\d+)", trace.versions.get("torch", ""))
    return (int(found[1]), int(found[2])) if found else NEWEST


def _caveats_of_replays(
    trace: Trace,
    asked: AllocatorRequests,
    outcomes: Sequence[SettingOutcome],
    *,
    total: int,
    taken: int,
    context: int,
) -> Iterator[Note]:
    """Yield a note for each caveat."""
    if not trace.versions.get("torch"):
        version = ".".join(map(str, NEWEST))
        yield _assumed(f"A memory snapshot does not record its PyTorch version; memfit assumes {version}.")
    if script := allocator_settings_made_by_script(trace.settings):
        yield Note(Provenance.EXACT, f"The script itself sets {script}, so every row includes this setting.")
    if any(not row.setting.caching for row in outcomes):
        yield _assumed(
            "Without its cache, PyTorch calls cudaMalloc for each tensor, and cudaMalloc rounds sizes of "
            "1 MiB and more up to multiples of 2 MiB."
        )
    if not context:
        yield _assumed(
            "The CUDA context is not counted, because the trace does not record its size. With --gpu NAME, "
            "memfit counts the context of that GPU."
        )
    elif trace.device.context.provenance is Provenance.ASSUMED:
        yield _assumed(f"The size of the CUDA context, {format_bytes(context)}, is assumed.")
    yield from _caveats_of_requests(trace, asked)
    if not asked.reserved_before:
        yield from _disagreement(trace, outcomes[0], total=total, taken=taken)


_assumed = partial(Note, Provenance.ASSUMED)


def _caveats_of_requests(trace: Trace, asked: AllocatorRequests) -> Iterator[Note]:
    if asked.reserved_before:
        yield _assumed(
            f"The allocator history begins with {asked.reserved_before:,} bytes already reserved. Replays "
            "first allocate the blocks that were live then, in the order of their addresses; which blocks "
            "were cached then is unknown."
        )
    if failed := asked.ask.count(RequestKind.FAILED):
        yield _assumed(
            f"The script continued after {failed} failed allocations. These allocations fail in replays, "
            "too, even on a larger GPU."
        )
    if trace.end.reason == "out of memory":
        yield _assumed("The script ran out of memory. The allocations that would have followed are unknown.")
    if asked.captures:
        yield _assumed(
            "The allocator history does not record when a CUDA graph was deleted. In a replay, the graph's "
            "memory pool stays in use until part of the pool is released. PyTorch may need less memory if "
            "memory runs short before that."
        )
    if asked.captures and not any(mark.kind is MarkKind.CAPTURE_BEGIN for mark in trace.marks):
        yield _assumed(
            "The allocator history does not record when CUDA graphs were captured. If memory runs short "
            "during a capture, the allocation fails in PyTorch; in a replay, it empties the cache instead."
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
