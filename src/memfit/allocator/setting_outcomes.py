"""One trace under many settings: what each reserves and costs in time, and the smallest device for it."""

import math
from collections.abc import Callable, Iterable

from memfit.allocator.block_and_segment_sizes import GRANULE
from memfit.allocator.config import FIRST_VERSION, AllocatorConfig
from memfit.allocator.replay import replay_requests
from memfit.allocator.requests import AllocatorRequests
from memfit.errors import UsageError
from memfit.records import AllocatorSetting, SecondsPerDriverCall, SettingOutcome
from memfit.units import MIB

EXHAUSTIVE = 2000
"""Replays of one search that descend by 2 MiB, before its strides double."""
NEGLIGIBLE = 1e-3
"""Seconds a step that a setting may cost and still be recommended; the report names the cost."""


def allocator_config_of_setting(setting: AllocatorSetting) -> AllocatorConfig:
    """Read a setting."""
    config = AllocatorConfig.of(",".join(filter(None, (setting.conf, setting.script))))
    if not config.has_segments:
        raise UsageError(
            f"Cannot replay with the allocator setting backend:{config.backend}, because memfit has no model "
            "of CUDA's own allocator."
        )
    if config.expandable_segments and config.large_segment_size % GRANULE:
        raise UsageError(
            "expandable_segments:True needs a large_segment_size_mb that is a multiple of 2. With "
            f"large_segment_size_mb:{config.large_segment_size // MIB}, PyTorch fails at the first large "
            "tensor."
        )
    return config if setting.caching else AllocatorConfig(caching=False)


def replay_under_setting(
    asked: AllocatorRequests,
    setting: AllocatorSetting,
    *,
    total: int,
    taken: int,
    version: tuple[int, int],
    rates: SecondsPerDriverCall,
) -> SettingOutcome:
    """Replay requests under a setting."""
    config = allocator_config_of_setting(setting)
    done = replay_requests(
        asked,
        config,
        total=total,
        taken=taken,
        version=version,
        empty_cache_each_step=setting.empty_cache_each_step,
    )
    seconds = None if done.calls_per_step is None else rates.seconds(done.calls_per_step)
    return SettingOutcome(setting, done, seconds, config.per_process_memory_fraction)


def smallest_device_that_fits(
    asked: AllocatorRequests,
    setting: AllocatorSetting,
    *,
    taken: int,
    version: tuple[int, int],
    fails_at: int = 0,
    exhaustive: int = EXHAUSTIVE,
    on_replay: Callable[[int], None] = lambda _: None,
) -> int:
    """Return the bytes of the smallest device on which a trace fits, as it does on every larger one.

    The search goes down from unlimited memory in steps of 2 MiB. If a replay never used more than *n* bytes,
    it is the same on every device of at least *n* bytes: those are skipped. Success need not be monotone,
    because a smaller device makes the allocator release its cache and place blocks differently, so the
    search does not bisect: the first failure ends it. Only after ``exhaustive`` replays do the strides
    double, and then a failure is followed by bisection; larger devices that were not tried may then fail.

    Args:
        asked: what ``allocator_requests_of_trace(trace)`` returned.
        setting: the settings to replay under.
        taken: bytes that the context and other processes hold.
        version: of PyTorch, major and minor.
        fails_at: bytes of a device on which the trace is known not to fit.
        exhaustive: how many replays descend in steps of 2 MiB.
        on_replay: called with each capacity tried.
    """
    config = allocator_config_of_setting(setting)
    fraction = config.per_process_memory_fraction

    def enough_for(capacity: int) -> int | None:
        on_replay(capacity)
        done = replay_requests(
            asked,
            config,
            total=capacity,
            taken=taken,
            version=version,
            empty_cache_each_step=setting.empty_cache_each_step,
        )
        if not done.fits:
            return None
        # With a fraction, devices are skipped only if that share of them holds the bytes used.
        enough = done.most_taken if fraction is None else math.ceil(done.most_taken / fraction)
        return min(capacity, _granules(enough))

    too_small = max(fails_at, taken) // GRANULE * GRANULE
    runs_on = math.ceil(_unlimited(asked, taken) / (fraction or 1))
    runs_on = max(enough_for(runs_on) or runs_on, too_small + GRANULE)
    stride, tried, failed = GRANULE, 0, False
    while (range_left := runs_on - too_small) > GRANULE:
        tried += 1
        if failed:
            stride = max(GRANULE, range_left // 2 // GRANULE * GRANULE)
        elif tried > exhaustive:
            stride *= 2
        capacity = max(runs_on - stride, too_small + GRANULE)
        enough = enough_for(capacity)
        if enough is None:
            too_small, failed = capacity, True
        else:
            runs_on = max(enough, too_small + GRANULE)
    return runs_on


def _unlimited(asked: AllocatorRequests, taken: int) -> int:
    most = sum(max(size, GRANULE) for size in asked.size)
    return taken + 2 * _granules(most)


def _granules(size: int) -> int:
    return -(-size // GRANULE) * GRANULE


def allocator_settings_worth_trying(version: tuple[int, int]) -> tuple[AllocatorSetting, ...]:
    """Return the settings worth trying, best known first."""
    confs = ["", "expandable_segments:True", "max_split_size_mb:128", "max_split_size_mb:512"]
    confs += ["roundup_power2_divisions:8"]
    if version >= FIRST_VERSION["large_segment_size_mb"]:
        confs += ["large_segment_size_mb:12", "large_segment_size_mb:64"]
    # Without a fraction no garbage is collected.
    confs += ["garbage_collection_threshold:0.8,per_process_memory_fraction:0.99"]
    settings = [AllocatorSetting(conf) for conf in confs]
    return (*settings, AllocatorSetting(empty_cache_each_step=True), AllocatorSetting(caching=False))


def recommended_setting_outcome(
    outcomes: Iterable[SettingOutcome], current: SettingOutcome
) -> SettingOutcome | None:
    """Return the outcome that reserves least, if it is worth setting; otherwise None.

    It must fit when the current settings do not, or reserve at least 1 % less, and cost at most
    ``NEGLIGIBLE`` more in a steady step than the current settings.
    """
    enough = current.replay.peak_reserved * 99 // 100 if current.replay.fits else None
    allowed = (current.seconds_per_step or 0.0) + NEGLIGIBLE
    gains = [
        row
        for row in outcomes
        if row.replay.fits
        and row.setting.caching
        and not row.setting.empty_cache_each_step
        and (enough is None or row.replay.peak_reserved < enough)
        and (row.seconds_per_step or 0.0) <= allowed
    ]
    return min(gains, key=lambda row: row.replay.peak_reserved, default=None)
