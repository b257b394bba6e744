"""Measure what the engine costs compared with the best hand-written loop.

    python benchmarks/engine_overhead.py [--rounds 40] [--ghost]

The engine and the loop split a batch into micro-batches, clip the gradients and step AdamW, on one thread of
the CPU, in alternating steps on copies of one model. In the small models, whose step is nearly all overhead,
the engine may take 40 us of a step and of each further micro-batch; in the others, 1 % of a step. Each figure
is the median over rounds of the difference between two consecutive steps, because the speed of a shared
machine changes from second to second. "No retry" is ``Engine(retry=False)``, which copies neither buffers nor
random numbers before each step. Exits with 1 if a figure is above its limit.

``--ghost`` measures the same on the ghost GPU instead: the time that the host takes to launch a step, without
the kernels' own. A busy GPU hides this time; it counts where kernels take less time than their launches. The
engine may take 40 us of it in every case.
"""

import contextlib
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_map

import memfit
from memfit.devices import find_device
from memfit.ghost.build.runtime_library import build_ghost
from memfit.ghost.ghost_device import GhostDevice

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.fork_pool import ForkPool, PoolJob

MICROSECONDS, SHARE = 40, 0.01
"""What the engine may take: of a small step and of each of its further micro-batches; of other steps."""


class Transformer(nn.Module):
    """A language model of 6 layers with a width of 256."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, length, 1000)."""
        return self.head(self.layers(self.embedding(tokens)))


def small() -> tuple[nn.Module, Any]:
    """Return a perceptron and a batch, so small that Python takes as long as the computation."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(32, 16)


def small_with_buffers() -> tuple[nn.Module, Any]:
    """Return a perceptron with batch norms and dropout, whose buffers and random numbers can be restored."""
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1)]
    layers += [nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)]
    return nn.Sequential(*layers), (torch.randn(32, 16), torch.randint(4, (32,)))


def milliseconds() -> tuple[nn.Module, Any]:
    """Return a perceptron of eight layers with batch norms, whose step takes 5 to 10 ms."""
    layers = [nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(256, 4)), (torch.randn(128, 256), torch.randint(4, (128,)))


def medium() -> tuple[nn.Module, Any]:
    """Return the transformer, and 32 sequences of 64 tokens."""
    return Transformer(), torch.randint(1000, (32, 64))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean loss over the batch."""
    if isinstance(batch, tuple):
        return F.cross_entropy(model(batch[0]), batch[1])
    out = model(batch)
    if batch.is_floating_point():
        return out.square().mean()
    return F.cross_entropy(out.flatten(0, 1), batch.flatten())


def by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> Callable[[Any], torch.Tensor | None]:
    """Return an expert's hand-written step: mean loss, clipped gradients, cleared after the update."""

    def step(batch: Any) -> torch.Tensor | None:
        total = None
        for part in parts(batch, steps):
            loss = loss_of(model, part)
            (loss / steps if steps > 1 else loss).backward()
            total = loss.detach() if total is None else total.add_(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def parts(batch: Any, steps: int) -> Any:
    """Return the micro-batches of a batch."""
    if steps == 1:
        return (batch,)
    if isinstance(batch, tuple):
        return zip(*(each.chunk(steps) for each in batch), strict=True)
    return batch.chunk(steps)


def seconds(step: Callable[[Any], object], batch: Any, repeat: int) -> float:
    """Return the seconds of one step, the mean over ``repeat`` steps."""
    began = time.perf_counter()
    for _ in range(repeat):
        step(batch)
    return (time.perf_counter() - began) / repeat


def compare(
    make: Callable[[], tuple[nn.Module, Any]], steps: int, rounds: int, repeat: int, *, retry: bool
) -> tuple[float, float]:
    """Return the median seconds of a hand-written step, and the engine's median additional seconds."""
    torch.manual_seed(0)
    model, batch = make()
    if torch.cuda.is_available():
        model, batch = model.cuda(), tree_map(torch.Tensor.cuda, batch)
    other = copy.deepcopy(model)
    hand = by_hand(model, torch.optim.AdamW(model.parameters()), steps)
    engine = memfit.Engine(
        other,
        memfit.Accumulation(parts_per_batch=steps),
        optimizer=torch.optim.AdamW(other.parameters()),
        loss=loss_of,
        max_grad_norm=1.0,
        retry=retry,
    )
    sides = [hand, engine.step]
    for side in sides:
        side(batch)
    times: list[tuple[float, float]] = []
    for turn in range(rounds):
        order = (0, 1) if turn % 2 else (1, 0)
        taken = {which: seconds(sides[which], batch, repeat) for which in order}
        times.append((taken[0], taken[1]))
    return statistics.median(hand for hand, _ in times), statistics.median(
        ours - hand for hand, ours in times
    )


@dataclass(frozen=True)
class Case:
    """A model, and in how many micro-batches it trains."""

    name: str
    make: Callable[[], tuple[nn.Module, Any]]
    steps: int
    repeat: int
    """Steps per measurement."""
    is_small: bool = False
    """Whether the limit is a time rather than a share."""

    def measured(self, rounds: int, *, retry: bool) -> tuple[float, float]:
        """Return the seconds of a hand-written step, and the engine's additional seconds."""
        rounds *= 5 if self.repeat > 1 else 1
        return compare(self.make, self.steps, rounds, self.repeat, retry=retry)

    def reported(self, hand: float, more: float, *, retry: bool, on_ghost: bool) -> bool:
        """Print the engine's cost; return whether it is within its limit."""
        limit = MICROSECONDS * 1e-6 * self.steps if self.is_small or on_ghost else SHARE * hand
        how = f"{self.name}, {self.steps} micro-batch{'es' * (self.steps > 1)}{'' if retry else ', no retry'}"
        print(
            f"{how:43} by hand {hand * 1e3:8.3f} ms  engine {more * 1e6:+8.1f} us {more / hand:+7.2%}  "
            f"at most {limit * 1e6:6.0f} us{'' if more <= limit else '  ABOVE'}",
            flush=True,
        )
        return more <= limit


CASES = [
    Case(name, make, steps, repeat, is_small)
    for name, make, repeat, is_small in (
        ("perceptron", small, 20, True),
        ("with batch norms", small_with_buffers, 20, True),
        ("eight layers", milliseconds, 2, False),
        ("transformer", medium, 1, False),
    )
    for steps in (1, 4)
]


def on_ghost(case: int, rounds: int, *, retry: bool) -> tuple[float, float]:
    """Measure one of the cases in a process on the ghost."""
    prepare()
    return CASES[case].measured(rounds, retry=retry)


def prepare() -> None:
    """Have each process measure on one thread."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of batch norms under accumulation, which the loop has too


def main() -> int:
    """Print the cost in each case; return 1 if one is above its limit."""
    from measuring import command_line  # the pool's processes do not find it

    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ghost", action="store_true")
    arguments = parser.parse_args()
    prepare()
    with contextlib.ExitStack() as stack:
        pool = None
        if arguments.ghost:
            pool = stack.enter_context(ForkPool(build_ghost(), GhostDevice.of(find_device("A100-80GB"))))
        within = []
        for place, case in enumerate(CASES):
            for retry in (True, False):
                if pool is None:
                    hand, more = case.measured(arguments.rounds, retry=retry)
                else:
                    settings = {"case": place, "rounds": arguments.rounds, "retry": retry}
                    hand, more = pool.run(PoolJob(f"{__file__}:on_ghost", settings))
                within.append(case.reported(hand, more, retry=retry, on_ghost=pool is not None))
    return int(not all(within))


if __name__ == "__main__":
    sys.exit(main())
