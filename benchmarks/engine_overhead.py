"""Measure what the engine costs compared with the best hand-written loop.

    python benchmarks/engine_overhead.py [--rounds 40]

The engine and the loop split a batch into micro-batches, clip the gradients and step AdamW, on the CPU, in
alternating steps on copies of one model. The medium model shows the engine's share of a step; the small one,
whose step is nearly all overhead, shows its microseconds. Each figure is the median over rounds of the
difference between two consecutive steps, because the speed of a shared machine changes from second to second.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import memfit


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


def small() -> tuple[nn.Module, torch.Tensor]:
    """Return a perceptron and a batch, so small that Python takes as long as the computation."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(32, 16)


def medium() -> tuple[nn.Module, torch.Tensor]:
    """Return the transformer, and 32 sequences of 64 tokens."""
    return Transformer(), torch.randint(1000, (32, 64))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over the batch."""
    out = model(batch)
    if batch.is_floating_point():
        return out.square().mean()
    return F.cross_entropy(out.flatten(0, 1), batch.flatten())


def by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return an expert's hand-written step: mean loss, clipped gradients, cleared after the update."""

    def step(batch: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for part in batch.split(len(batch) // steps):
            loss = loss_of(model, part) / steps
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def seconds(step: Callable[[torch.Tensor], object], batch: torch.Tensor, repeat: int) -> float:
    """Return the seconds of one step, the mean over ``repeat`` steps."""
    began = time.perf_counter()
    for _ in range(repeat):
        step(batch)
    return (time.perf_counter() - began) / repeat


def compare(
    make: Callable[[], tuple[nn.Module, torch.Tensor]], steps: int, rounds: int, repeat: int
) -> tuple[float, float]:
    """Return the median seconds of a hand-written step, and the engine's median additional seconds."""
    torch.manual_seed(0)
    model, batch = make()
    other = copy.deepcopy(model)
    hand = by_hand(model, torch.optim.AdamW(model.parameters()), steps)
    engine = memfit.Engine(
        other,
        memfit.Accumulation(parts_per_batch=steps),
        optimizer=torch.optim.AdamW(other.parameters()),
        loss=loss_of,
        max_grad_norm=1.0,
    )
    sides = [hand, engine.step]
    for side in sides:
        side(batch)
    times: list[tuple[float, float]] = []
    for turn in range(rounds):
        order = (0, 1) if turn % 2 else (1, 0)
        taken = {which: seconds(sides[which], batch, repeat) for which in order}
        times.append((taken[0], taken[1]))
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    return statistics.median(hand for hand, _ in times), statistics.median(
        ours - hand for hand, ours in times
    )


def main() -> None:
    """Print the overhead for both models."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    for steps in (1, 4):
        hand, more = compare(small, steps, 5 * rounds, 20)
        print(
            f"small   {steps} micro-steps   by hand {hand / steps * 1e6:7.0f} us each   "
            f"engine {more / steps * 1e6:+7.1f} us each (at most 50)"
        )
    for steps in (1, 4):
        hand, more = compare(medium, steps, rounds, 1)
        print(
            f"medium  {steps} micro-steps   by hand {hand * 1e3:7.1f} ms a step "
            f"engine {more / hand:+7.2%} (at most 1 %)"
        )


if __name__ == "__main__":
    main()
