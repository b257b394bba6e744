"""One trace under many settings: what each reserves, what it costs in time, and how small a device may be."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from memfit.allocator.config import SINCE, AllocatorConfig
from memfit.allocator.device_memory import GRANULE, Calls
from memfit.allocator.replay import Replay, replay
from memfit.allocator.requests import Requests
from memfit.errors import UsageError
from memfit.units import MIB

MOST_REPLAYS = 2000
"""For one smallest capacity."""
NEGLIGIBLE = 1e-3
"""Seconds a step that a setting may cost and still be recommended; the cost is said."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of one call. Assumed, to within a factor of several: nothing of it was measured on a card.

    Source: cudaMalloc took 50 us and more on a card of 2010 (University of Virginia, "Memory Allocation
    Overhead"); PyTorch's Note [Expandable Segments] puts mapping all of a device at milliseconds.
    """

    malloc: float = 100e-6
    free: float = 100e-6
    map: float = 50e-6
    unmap: float = 50e-6
    synchronize: float = 50e-6

    def seconds(self, calls: Calls) -> float:
        """Return what these calls take. The work on the GPU that a cudaFree waits for is not in it."""
        return (
            self.malloc * calls.malloc
            + self.free * calls.free
            + self.map * calls.map
            + self.unmap * calls.unmap
            + self.synchronize * calls.synchronize
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings to try."""

    conf: str = ""
    """``PYTORCH_ALLOC_CONF``."""
    caching: bool = True
    empty_cache_each_step: bool = False
    script: str = field(default="", compare=False)
    """Settings that the script makes itself, whatever the environment says; in the same form."""

    @property
    def name(self) -> str:
        """As a user would write it."""
        if not self.caching:
            return "PYTORCH_NO_CUDA_MEMORY_CACHING=1"
        return self.conf + (" " * bool(self.conf) + "empty_cache() every step") * self.empty_cache_each_step

    def config(self) -> AllocatorConfig:
        """Read it.

        Raises:
            UsageError: it is not what PyTorch takes.
        """
        config = AllocatorConfig.of(",".join(filter(None, (self.conf, self.script))))
        if not config.has_segments:
            raise UsageError(f"backend:{config.backend} is CUDA's own allocator: memfit has no model of it.")
        if config.expandable_segments and config.large_segment_size % GRANULE:
            raise UsageError(
                "expandable_segments:True needs a large_segment_size_mb that is a multiple of 2: with "
                f"{config.large_segment_size // MIB} PyTorch fails at the first large tensor."
            )
        return config if self.caching else AllocatorConfig(caching=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trace fares under a setting."""

    setting: Setting
    replay: Replay
    seconds_per_step: float | None
    """In a steady step, by assumed rates; None if too few steps were seen."""
    smallest: int | None = None
    """Bytes of the smallest device on which it runs, and on every larger one tried; None if not asked for."""


def outcome(
    asked: Requests, setting: Setting, *, total: int, taken: int, version: tuple[int, int], rates: Rates
) -> Outcome:
    """Replay under a setting."""
    done = replay(
        asked,
        setting.config(),
        total=total,
        taken=taken,
        version=version,
        empty_cache_each_step=setting.empty_cache_each_step,
    )
    return Outcome(setting, done, rates.seconds(done.calls_per_step) if done.calls_per_step else None)


def smallest_capacity(
    asked: Requests,
    setting: Setting,
    *,
    taken: int,
    version: tuple[int, int],
    on_replay: Callable[[int], None] = lambda _: None,
) -> int:
    """Return the bytes of the smallest device on which a trace runs, and on every larger one.

    From a device without end downwards, in steps of 2 MiB. Where a replay never took more than *n* bytes, it
    goes the same way on every device of at least *n*: those are passed over. Success need not be monotone,
    for a smaller device makes the allocator give back its cache and pack anew, so the search does not halve:
    the first failure ends it.

    Args:
        asked: what ``requests(trace)`` returned.
        setting: the settings to replay under.
        taken: bytes that the context and other processes hold.
        version: of PyTorch, major and minor.
        on_replay: called with each capacity that is tried.
    """
    config = setting.config()
    fraction = config.per_process_memory_fraction
    capacity, runs_on = _without_end(asked, taken), 0
    for _ in range(MOST_REPLAYS):
        on_replay(capacity)
        done = replay(
            asked,
            config,
            total=capacity,
            taken=taken,
            version=version,
            empty_cache_each_step=setting.empty_cache_each_step,
        )
        if not done.fits:
            break
        # With a fraction, devices are passed over only if that share of them holds what was taken.
        enough = done.most_taken if fraction is None else math.ceil(done.most_taken / fraction)
        runs_on = min(capacity, _granules(enough))
        capacity = runs_on - GRANULE
    return runs_on


def _without_end(asked: Requests, taken: int) -> int:
    most = sum(max(size, GRANULE) for size in asked.size)
    return taken + 2 * _granules(most)


def _granules(size: int) -> int:
    return -(-size // GRANULE) * GRANULE


def sensible(version: tuple[int, int]) -> tuple[Setting, ...]:
    """Return the settings that are worth trying, in the order in which people know them."""
    confs = ["", "expandable_segments:True", "max_split_size_mb:128", "max_split_size_mb:512"]
    confs += ["roundup_power2_divisions:8"]
    if version >= SINCE["large_segment_size_mb"]:
        confs += ["large_segment_size_mb:12", "large_segment_size_mb:64"]
    if version >= SINCE["per_process_memory_fraction"]:  # without a fraction no garbage is collected
        confs += ["garbage_collection_threshold:0.8,per_process_memory_fraction:0.99"]
    settings = [Setting(conf) for conf in confs]
    return (*settings, Setting(empty_cache_each_step=True), Setting(caching=False))


def recommended(outcomes: Iterable[Outcome], current: Outcome) -> Outcome | None:
    """Return what reserves least, if that is worth a line in the environment.

    It must fit where the current settings do not, or reserve 1 % less; and cost no more than ``NEGLIGIBLE``
    in a steady step beyond what the current settings do.
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
