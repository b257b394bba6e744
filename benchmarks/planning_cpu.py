"""Plans carried out on the CPU, beside the policies that people use: peak and time of a step, measured.

    python benchmarks/planning_cpu.py [--network gpt] [--budgets 410,330,213] [--rounds 15]

The planner gets the seconds of each operation as measured on this machine, and a budget in MiB. All variants
take turns, one step each, on one thread. The peak is that of the storages that a step allocates, over
parameters, gradients and inputs; the scratch memory of libraries is not in it. Times are processor time,
relative to the plain step of the same round: the median, and the interval that covers the true median with
95 %. Gradients of every variant are compared with those of the plain step.
"""

import argparse
import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit.planning.choose import CheckpointChooser
from memfit.recording.step_operations import StepOperationRecorder
from memfit.records import StepOperations

MIB = 1 << 20
MATRIX_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten._scaled_dot_product_flash_attention_for_cpu")


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the feed-forward."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """The GPT of the table in docs/benchmarks.md."""

    def __init__(self, layers: int = 8, width: int = 512, heads: int = 8, vocabulary: int = 2048) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class Variant:
    """A model under one policy."""

    name: str
    model: nn.Module
    loss: Callable[[nn.Module], torch.Tensor]
    ratios: list[float]
    peak: int = 0
    exact: bool = True

    def step(self) -> float:
        """Run a step, and return its processor time."""
        for parameter in self.model.parameters():
            parameter.grad.zero_()
        started = time.process_time()
        self.loss(self.model).backward()
        return time.process_time() - started

    def record(self) -> StepOperations:
        """Run a step, operation by operation."""
        recorder = StepOperationRecorder(self.model)
        recorder.start()
        self.loss(self.model).backward()
        return recorder.stop()


def gpt() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor], str]:
    """Return a GPT, its loss, and the name of its blocks."""
    tokens, targets = torch.randint(2048, (4, 512)), torch.randint(2048, (4 * 512,))
    return Gpt(), lambda model: functional.cross_entropy(model(tokens).flatten(0, 1), targets), "blocks.*"


def resnet50() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor], str]:
    """Return torchvision's ResNet-50, its loss, and the name of its blocks."""
    import torchvision

    images, labels = torch.randn(8, 3, 128, 128), torch.randint(1000, (8,))
    model = torchvision.models.resnet50()
    return model, lambda model: functional.cross_entropy(model(images), labels), "layer?.*"


NETWORKS = {"gpt": (gpt, (500, 410, 330, 213, 142)), "resnet50": (resnet50, (180, 160, 135))}


def main() -> None:
    """Measure, and print a row for each policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", choices=NETWORKS, default="gpt")
    parser.add_argument("--budgets", help="MiB, separated by commas")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, budgets = NETWORKS[options.network]
    if options.budgets:
        budgets = tuple(map(int, options.budgets.split(",")))
    variants = list(_variants(*make(), budgets))
    for number in range(options.rounds):
        turn = number % len(variants)
        seconds = {id(each): each.step() for each in (*variants[turn:], *variants[:turn])}
        for each in variants:
            each.ratios.append(seconds[id(each)] / seconds[id(variants[0])])
    print("| policy | peak MiB | time | 95 % | bit for bit |\n|---|--:|--:|--:|---|")
    for each in variants:
        low, high = interval(each.ratios)
        print(
            f"| {each.name} | {each.peak / MIB:.1f} | {statistics.median(each.ratios):.3f} | "
            f"{low:.3f} to {high:.3f} | {'yes' if each.exact else 'NO'} |"
        )
    sys.exit(not all(each.exact for each in variants))


def _variants(
    model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], blocks: str, budgets: tuple[int, ...]
) -> Iterator[Variant]:
    def variant(name: str, plan: memfit.Checkpointing | None) -> Variant:
        made = Variant(name, copy.deepcopy(model), loss, [])
        if plan is not None:
            memfit.apply(made.model, plan)
        for parameter in made.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return made

    plain = variant("none", None)
    plain.record()
    best = min(
        (plain.record() for _ in range(3)), key=lambda step: sum(each.seconds for each in step.forward)
    )
    plain.step()
    gradients = [each.grad.clone() for each in plain.model.parameters()]
    policies: list[tuple[str, memfit.Checkpointing | None]] = [
        ("every block", memfit.Checkpointing(blocks)),
        ("every 2nd block", memfit.Checkpointing(blocks, every=2)),
        ("every block, matrix products kept", memfit.Checkpointing(blocks, save_ops=MATRIX_PRODUCTS)),
    ]
    started = time.monotonic()
    chooser = CheckpointChooser(best, lambda operation: operation.seconds)
    for budget in budgets:
        choice = chooser.choose(budget * MIB)
        if choice is None:
            print(f"{budget} MiB: no plan; the smallest needs {math.ceil(chooser.smallest.peak / MIB)} MiB")
            continue
        regions = tuple(memfit.Region(module, ops) for module, ops in choice.save_ops.items())
        policies.append(
            (f"plan for {budget} MiB", memfit.Checkpointing(regions=regions) if regions else None)
        )
    print(f"planned {len(budgets)} budgets in {time.monotonic() - started:.1f} s")
    for made in (plain, *(variant(name, plan) for name, plan in policies)):
        step = made.record()
        made.peak = max(each.allocated for each in (*step.forward, *step.backward))
        made.step()
        made.exact = all(map(torch.equal, gradients, (each.grad for each in made.model.parameters())))
        yield made


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the order statistics between which the median lies with 95 %."""
    ordered, count = sorted(ratios), len(ratios)
    below = max(math.floor(count / 2 - 0.98 * math.sqrt(count)), 0)
    return ordered[below], ordered[count - 1 - below]


if __name__ == "__main__":
    main()
