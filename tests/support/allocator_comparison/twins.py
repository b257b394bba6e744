"""Compare the compiled allocator with the reference in Python on the same random requests."""

import random
from typing import Any

from memfit.allocator.config import AllocatorConfig
from memfit.allocator.replay import replay_requests
from memfit.allocator.requests import AllocatorRequests, RequestKind
from memfit.records import ReplayResult
from support.allocator_comparison.model import DifferenceError
from support.allocator_comparison.watched import CONFS, random_size
from support.reference_allocator.replay import replay_in_python

TWIN_CONFS = (*CONFS, "roundup_power2_divisions:8", "max_split_size_mb:20")
GIB = 1 << 30
STREAMS = ([0], [0, 7], [0, -5, 1 << 50])
POOLS = ((0, 0), (0, 1), (0, 2))
MANY = (30, 200)  # live blocks at a time
SELDOM = [
    ask
    for ask in RequestKind
    if ask
    not in (
        RequestKind.MALLOC,
        RequestKind.FREE,
        RequestKind.FREE_LATER,
        RequestKind.USE,
        RequestKind.CAPTURE_END,
    )
]
SELDOM += 4 * [RequestKind.GONE_ON]


class RandomRequests:
    """A generator of random requests of every kind."""

    def __init__(self, dice: random.Random) -> None:
        self.requests = AllocatorRequests(pools=POOLS)
        self._dice = dice
        self._streams, self._many = dice.choice(STREAMS), dice.choice(MANY)
        self._live: list[int] = []
        self._later: list[int] = []
        self._capturing, self._pool = False, 0

    def add_request(self, event: int) -> None:
        """Add a random request."""
        dice, few = self._dice, len(self._live) < self._many
        kinds = {"malloc": 65 if few else 35, "free": 35 if few else 65, "use": 2, "seldom": 4}
        (kind,) = dice.choices(tuple(kinds), tuple(kinds.values()))
        if kind == "malloc" or not self._live:
            size, stream = random_size(dice), dice.choice(self._streams)
            self.requests.add(RequestKind.MALLOC, event, event, size, stream, self._pool)
            self._live.append(event)
        elif kind == "use":
            self.requests.add(
                RequestKind.USE, event, dice.choice(self._live), stream=dice.choice(self._streams)
            )
        elif kind == "free":
            self._free(event, self._live.pop(dice.randrange(len(self._live))))
        else:
            self._seldom(event)

    def _free(self, event: int, block: int) -> None:
        later = self._dice.choice((True, *(False,) * 9))
        self.requests.add(RequestKind.FREE_LATER if later else RequestKind.FREE, event, block)
        self._later += [block] if later else []

    def _seldom(self, event: int) -> None:
        dice, requests = self._dice, self.requests
        ask = dice.choice(SELDOM)
        if ask is RequestKind.GONE_ON and self._later:
            requests.add(ask, event, self._later.pop(dice.randrange(len(self._later))))
        elif ask is RequestKind.CAPTURE_BEGIN:
            requests.add(RequestKind.CAPTURE_END if self._capturing else RequestKind.CAPTURE_BEGIN, event)
            self._capturing = not self._capturing
        elif ask is RequestKind.FAILED:
            requests.add(ask, event, -1, dice.randint(1, 1 << 34), dice.choice(self._streams), self._pool)
        elif ask in (RequestKind.RELEASE_POOL, RequestKind.EMPTY_POOL):
            requests.add(ask, event, pool=self._pool)
            self._pool = dice.choice((0, 1, 2, self._pool))
        else:
            requests.add(ask, event)


def random_requests(dice: random.Random, count: int) -> AllocatorRequests:
    """Return ``count`` random requests."""
    generator = RandomRequests(dice)
    for event in range(count):
        generator.add_request(event)
    return generator.requests


def both(
    requests: AllocatorRequests, config: AllocatorConfig, **options: Any
) -> tuple[ReplayResult, ReplayResult]:
    """Replay requests with the compiled allocator and in Python."""
    return replay_requests(requests, config, **options), replay_in_python(requests, config, **options)


def compare(conf: str, seed: int, requests: int = 1200) -> None:
    """Replay the same random requests with both allocators.

    Raises:
        DifferenceError: the replays differ.
    """
    dice = random.Random(f"{conf} {seed}")  # noqa: S311 - nothing secret
    compiled, interpreted = both(
        random_requests(dice, requests),
        AllocatorConfig.of(conf),
        total=dice.choice((1, 3, 8, 80)) * GIB,
        taken=dice.choice((0, 300 << 20)),
        version=dice.choice(((2, 8), (2, 14))),
        empty_cache_each_step=dice.choice((True, False, False)),
    )
    if compiled != interpreted:
        differing = [
            name
            for name in ReplayResult.__dataclass_fields__
            if getattr(compiled, name) != getattr(interpreted, name)
        ]
        raise DifferenceError(f"{conf or 'default'}, seed {seed}: different {', '.join(differing)}")
