"""Measure what checkpointing a block costs beyond recomputation, with and without restoring the RNG state.

    python benchmarks/checkpoint_cost.py [--runs 300] [--json FILE]

Each figure is the median time of one forward and backward of a small block on the CPU, in microseconds, with
one thread and alternating variants.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.strategies.checkpointing import Checkpointing


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error("--runs must be at least 1")
    torch.set_num_threads(1)
    variants = {
        "plain": block(),
        "by hand": by_hand(),
        "by hand, RNG state not restored": by_hand(preserve_rng_state=False),
        "memfit": checkpointed(),
        "memfit, RNG state not restored": checkpointed(preserve_rng_state=False),
    }
    x = torch.randn(16, 64, requires_grad=True)
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for run in range(arguments.runs + 20):
        for name, call in variants.items():
            begun = time.perf_counter()
            call(x).sum().backward()
            if run >= 20:  # noqa: PLR2004 - warm by then
                taken[name].append(1e6 * (time.perf_counter() - begun))
    medians = {name: statistics.median(times) for name, times in taken.items()}
    for name, microseconds in medians.items():
        print(f"{name:34} {microseconds:8.0f} µs   {microseconds - medians['plain']:+8.0f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(medians, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
