"""How long the planner thinks: networks of planned_networks.py, a Llama of 32 layers, and 1,001 modules.

    python benchmarks/planning_time.py

A step of each network is recorded on the CPU; of the last two at a small width, which changes none of the
operations. Times are processor time for one budget each: the program is built and solved. The
runs on the ghost take further time.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from measuring import seconds_of, table_head, table_line
from planned_networks import NETWORKS as PLANNED
from torch import nn

from memfit.devices import DEFAULT, find_device
from memfit.planning.choose_checkpointing import CheckpointChooser
from memfit.planning.run_changes_on_ghost import kernel_time_estimator
from memfit.recording.step_operations import StepOperationRecorder
from memfit.records import Operation, StepOperations

SHARES = (0.9, 0.7, 0.5, 0.3)


class Block(nn.Module):
    """A residual feed-forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to what comes in."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def blocks(count: int) -> StepOperations:
    """Record a network of so many blocks: five modules each."""
    model, x = nn.Sequential(*(Block(8) for _ in range(count))), torch.randn(512, 8)
    return recorded(model, lambda: model(x).square().mean())


def llama() -> StepOperations:
    """Record a Llama of 32 layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=176, num_hidden_layers=32, num_attention_heads=4
    )
    model, tokens = LlamaForCausalLM(config), torch.randint(512, (2, 64))
    return recorded(model, lambda: model(input_ids=tokens, labels=tokens).loss)


def planned(name: str) -> StepOperations:
    """Record a network of planned_networks.py."""
    network = PLANNED[name]()
    return recorded(network.model, lambda: network.loss(network.model, network.inputs, network.targets))


def recorded(model: nn.Module, loss: Callable[[], torch.Tensor]) -> StepOperations:
    """Return a step's operations."""
    recorder = StepOperationRecorder(model)
    recorder.start()
    loss().backward()
    return recorder.stop()


def solve(step: StepOperations, seconds: Callable[[Operation], float], share: float) -> None:
    """Build the program of a step, and solve it for a share of the peak."""
    chooser = CheckpointChooser(step, seconds)
    _ = chooser.choose(int(share * chooser.plain_peak)) or chooser.smallest


def main() -> None:
    """Print a row for each network."""
    seconds = kernel_time_estimator(find_device(DEFAULT))
    shares = ", ".join(f"{share:.0%}" for share in SHARES)
    print(
        table_head(("network", "modules", "operations", f"build and solve at {shares}", "longest"), "lrrrr")
    )
    for name, record in NETWORKS.items():
        step = record()
        times = [seconds_of(partial(solve, step, seconds, share), time.process_time) for share in SHARES]
        modules = len({call.module for call in step.calls})
        operations = len(step.forward) + len(step.backward)
        each = ", ".join(f"{took:.1f}" for took in times)
        row = name, f"{modules:,}", f"{operations:,}", f"{each} s", f"{max(times):.1f} s"
        print(table_line(row), flush=True)


NETWORKS = {
    **{name: partial(planned, name) for name in PLANNED},
    "Llama, 32 layers": llama,
    "250 blocks": partial(blocks, 250),
}


if __name__ == "__main__":
    main()
