"""The head in chunks beside the plain head and PyTorch's own operation, on the CPU.

    python benchmarks/chunked_head.py [--positions 1024] [--features 512] [--classes 16384] [--rounds 15]

All variants take turns, one forward and backward each, on one thread. Times are processor time, relative to
the plain head in the same round: the median, and the interval that covers the true median with 95 %. The peak
is that of the storages that a step allocates, over parameters, hidden states and their gradients. Errors are
the largest difference of a gradient from the plain head's in float64, relative to the largest gradient.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from measuring import MIB, command_line, in_turns, interval, seconds_of, table_head, table_line
from torch import nn
from torch.nn.functional import cross_entropy

import memfit
from memfit.recording.step_operations import StepOperationRecorder

Loss = Callable[[nn.Linear, torch.Tensor, torch.Tensor], torch.Tensor]
LIMIT = 1.5
"""How much larger than the plain head's errors may be."""


def plain(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of all logits."""
    return cross_entropy(head(hidden), targets)


def chunked(chunks: int) -> Loss:
    """Return memfit's loss."""
    return lambda head, hidden, targets: memfit.ChunkedHead(head, chunks)(hidden, targets)


def of_pytorch(chunks: int) -> Loss:
    """Return PyTorch's chunked loss."""

    def loss(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        options = nn.LinearCrossEntropyOptions(
            batch_chunk_size=-(-len(hidden) // chunks), chunking_method=None
        )
        return nn.functional.linear_cross_entropy(hidden, head.weight, targets, options=options)

    return loss


def checkpointed(chunks: int) -> Loss:
    """Return the loss of slices that are recomputed in the backward."""
    from torch.utils.checkpoint import checkpoint

    def loss(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        def of_slice(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return cross_entropy(head(part), wanted, reduction="sum")

        parts = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
        losses = [checkpoint(of_slice, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / len(targets)

    return loss


def variants() -> dict[str, Loss]:
    """Return what is compared; PyTorch's operation if this PyTorch has it."""
    found: dict[str, Loss] = {"plain": plain}
    for chunks in (1, 8, 24):
        found[f"ChunkedHead, {chunks}"] = chunked(chunks)
    if hasattr(nn, "LinearCrossEntropyOptions"):
        for chunks in (8, 24):
            found[f"F.linear_cross_entropy, {chunks}"] = of_pytorch(chunks)
    found["each slice checkpointed, 8"] = checkpointed(8)
    return found


class Case:
    """A head, hidden states and targets."""

    def __init__(self, positions: int, features: int, classes: int) -> None:
        torch.manual_seed(0)
        self.head = nn.Linear(features, classes, bias=False)
        self.hidden = torch.randn(positions, features, requires_grad=True)
        self.targets = torch.randint(classes, (positions,))
        self.leaves = (self.hidden, *self.head.parameters())

    def step(self, loss: Loss) -> float:
        """Run a forward and a backward, and return their processor time."""
        for each in self.leaves:
            each.grad = None
        return seconds_of(lambda: loss(self.head, self.hidden, self.targets).backward(), time.process_time)

    def peak(self, loss: Loss) -> float:
        """Return the peak of a step, in MiB."""
        self.step(loss)  # gradients exist, and count as what was there before
        recorder = StepOperationRecorder(self.head)
        recorder.start()
        loss(self.head, self.hidden, self.targets).backward()
        step = recorder.stop()
        return max(each.allocated for each in (*step.forward, *step.backward)) / MIB

    def error(self, loss: Loss, exact: list[torch.Tensor]) -> float:
        """Return the largest error of a gradient."""
        self.step(loss)
        pairs = zip((each.grad.double() for each in self.leaves), exact, strict=True)
        return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)


def main() -> None:
    """Measure, and print a row for each variant."""
    parser = command_line(__doc__)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--classes", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    case = Case(options.positions, options.features, options.classes)
    hidden = case.hidden.detach().double().requires_grad_()
    head = copy.deepcopy(case.head).double()
    plain(head, hidden, case.targets).backward()
    exact = [hidden.grad, head.weight.grad]
    losses = variants()
    ratios: dict[str, list[float]] = {name: [] for name in losses}
    for seconds in in_turns(
        {name: partial(case.step, loss) for name, loss in losses.items()}, options.rounds
    ):
        for name, each in seconds.items():
            ratios[name].append(each / seconds["plain"])
    print(table_head(("slices", "peak MiB", "time", "95 %", "error"), "lrrrr"))
    errors = {name: case.error(loss, exact) for name, loss in losses.items()}
    for name, loss in losses.items():
        low, high = interval(ratios[name])
        time = f"{statistics.median(ratios[name]):.3f}", f"{low:.3f} to {high:.3f}"
        print(table_line((name, f"{case.peak(loss):.1f}", *time, f"{errors[name]:.1e}")))
    sys.exit(max(errors.values()) > LIMIT * errors["plain"])


if __name__ == "__main__":
    main()
