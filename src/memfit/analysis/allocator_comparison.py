"""One trace replayed under several allocator settings: what each needs and costs, and where it fails."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from memfit.allocator.config import check_version, environment_settings, script_settings
from memfit.allocator.requests import RequestKind, Requests, read_requests
from memfit.allocator.setting_outcomes import (
    recommended_outcome,
    replay_setting,
    settings_worth_trying,
    smallest_capacity,
)
from memfit.analysis.location import location_at
from memfit.analysis.replay_caveats import NEWEST, caveats
from memfit.devices import Device
from memfit.errors import UsageError
from memfit.records import (
    AllocatorComparison,
    AllocatorSetting,
    CallRates,
    Machine,
    Replay,
    SettingOutcome,
    Trace,
)
from memfit.units import format_bytes


def compare_settings(
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
        confs: values of ``PYTORCH_ALLOC_CONF``; None tries ``settings_worth_trying``.
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
    asked = read_requests(trace)
    version, rates = torch_version(trace), CallRates()
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
    script = script_settings(trace.settings)
    own = AllocatorSetting(environment_settings(trace.settings))
    if isinstance(confs, str):
        confs = (confs,)
    for conf in confs or ():
        check_version(conf, version)
    tried = [*map(AllocatorSetting, confs)] if confs is not None else _worth_trying(asked, version)
    outcomes: list[SettingOutcome] = []
    for setting in (replace(setting, script=script) for setting in dict.fromkeys((own, *tried))):
        on_progress(setting.name or "default")
        row = replay_setting(asked, setting, total=total, taken=taken, version=version, rates=rates)
        if smallest:
            size = smallest_capacity(asked, setting, taken=taken, version=version)
            row = replace(row, smallest=size)
        outcomes.append(replace(row, replay=_located(trace, row.replay), current=not outcomes))
    return AllocatorComparison(
        outcomes=tuple(outcomes),
        recommended=recommended_outcome(outcomes[1:], outcomes[0]),
        total=total,
        taken=taken,
        rates=rates,
        notes=tuple(caveats(trace, asked, outcomes, total=total, taken=taken, context=context)),
    )


def _located(trace: Trace, replay: Replay) -> Replay:
    """Return a replay of a trace with the place of its failure, if there is one."""
    if (failure := replay.failure) is None:
        return replay
    return replace(replay, failure=replace(failure, where=location_at(trace, failure.event)))


def _gpu(trace: Trace, device: Device | None, memory: int | None) -> tuple[int, int]:
    """Return the bytes of the device, and of the CUDA context."""
    if trace.device.machine is Machine.CPU:
        raise UsageError(
            "This is a trace of CPU tensors. PyTorch does not cache CPU memory, and its allocator settings "
            "apply only to GPUs. To find how much memory the tensors need when their addresses are planned, "
            "use memfit pack."
        )
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


def _worth_trying(asked: Requests, version: tuple[int, int]) -> list[AllocatorSetting]:
    """Return the settings worth trying for these requests.

    Emptying the cache each step needs steps; without its cache PyTorch fails to capture graphs.
    """
    steps = RequestKind.STEP in asked.ask
    return [
        setting
        for setting in settings_worth_trying(version)
        if (steps or not setting.empty_cache_each_step) and (setting.caching or not asked.captures)
    ]


def torch_version(trace: Trace) -> tuple[int, int]:
    """Return PyTorch's version, major and minor."""
    found = re.match(r"(\d+)\.(\d+)", trace.versions.get("torch", ""))
    return (int(found[1]), int(found[2])) if found else NEWEST
