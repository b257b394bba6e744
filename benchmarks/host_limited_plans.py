"""Compare, on the CPU, plans of a network whose host limits the step: the chosen one, and others.

    python benchmarks/host_limited_plans.py

24 blocks of width 32 at batch 1: arithmetic is nothing. Interleaved rounds on one thread, processor time. The
plans are those that `memfit plan --bitwise` weighs for such a script: whole modules, single operations kept,
and tensors recomputed one by one.
"""

import statistics
import time

import torch
from measuring import command_line, write_json
from torch import nn

import memfit

WIDTH, BLOCKS, ROUNDS = 32, 24, 15


class Block(nn.Module):
    """A transformer's block without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the block makes of (1, positions, width)."""
        heads = (each.unflatten(2, (4, -1)).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, 2))
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def network(plan: list[object]) -> nn.Module:
    """Return the network under a plan."""
    made = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    return memfit.apply(made, plan) if plan else made


def main() -> None:
    """Run the benchmark."""
    options = command_line(__doc__, results=True).parse_args()
    torch.set_num_threads(1)
    first, most = (tuple(map(str, range(count))) for count in (14, 23))
    kept = ("aten.addmm.default:1", "aten.addmm.default:0", "aten.addmm.default:2")
    networks = {
        "as written": network([]),
        "14 modules recomputed": network([memfit.Checkpointing(modules=first)]),
        "23 in part": network([memfit.Checkpointing(modules=most, save_ops=kept)]),
        "tensor by tensor": network([memfit.Checkpointing(recompute="tensors")]),
    }
    inputs, took = torch.randn(1, 8, WIDTH), {name: [] for name in networks}
    for number in range(ROUNDS + 1):
        for name, each in networks.items():
            began = time.process_time()
            each(inputs).square().mean().backward()
            if number:  # the first compiles nothing, but fills caches
                took[name].append(time.process_time() - began)
    medians = {name: statistics.median(seconds) for name, seconds in took.items()}
    for name, seconds in medians.items():
        print(f"{name:<24}{1e3 * seconds:8.1f} ms {seconds / medians['as written']:6.2f}x")
    write_json(options.json, medians)


if __name__ == "__main__":
    main()
