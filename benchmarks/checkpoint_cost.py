"""Measure what checkpointing a block costs beyond recomputation, with and without restoring the RNG state.

    python benchmarks/checkpoint_cost.py [--runs 300] [--json FILE]

Each figure is the median time of one forward and backward of a small block on the CPU, in microseconds, with
one thread and alternating variants.
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
from measuring import at_least_1, command_line, in_turns, seconds_of, write_json
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.strategies.checkpointing import Checkpointing

WARM_UP = 20


def block() -> nn.Module:
    """Return a block that draws no random numbers, so that a variant need not restore them."""
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))


def by_hand(**options: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the block under plain torch.utils.checkpoint, which updates norm statistics twice."""
    module = block()
    return lambda x: checkpoint(module, x, use_reentrant=False, **options)


def checkpointed(**options: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a model of one block, which memfit checkpoints."""
    model = nn.Sequential(block())
    Checkpointing("0", **options).apply(model)
    return model


def main() -> int:
    """Time the variants in alternation and print the table."""
    parser = command_line(__doc__, results=True)
    parser.add_argument("--runs", type=at_least_1, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    variants = {
        "plain": block(),
        "by hand": by_hand(),
        "by hand, RNG state not restored": by_hand(preserve_rng_state=False),
        "memfit": checkpointed(),
        "memfit, RNG state not restored": checkpointed(preserve_rng_state=False),
    }
    x = torch.randn(16, 64, requires_grad=True)

    def step(call: Callable[[torch.Tensor], torch.Tensor]) -> float:
        return seconds_of(lambda: call(x).sum().backward())

    steps = {name: partial(step, call) for name, call in variants.items()}
    rounds = [*in_turns(steps, arguments.runs + WARM_UP)][WARM_UP:]
    medians = {name: 1e6 * statistics.median(each[name] for each in rounds) for name in variants}
    for name, microseconds in medians.items():
        print(f"{name:34} {microseconds:8.0f} µs   {microseconds - medians['plain']:+8.0f}")
    write_json(arguments.json, medians)
    return 0


if __name__ == "__main__":
    sys.exit(main())
