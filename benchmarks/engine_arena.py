"""Train and validate with memfit.Engine on the CPU, without and with Caffe's ``mem_param``.

    python benchmarks/engine_arena.py [--models resnet50 vgg16] [--updates 8]

One process each. The benchmark compares parameters and validated losses bit for bit, and reports the peak
resident memory of the process in the second epoch, in which all updates and validated batches are planned.
"""

import hashlib
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from arena_cpu import BATCHES, compare_models, status
from measuring import MIB
from packed_networks import model_of
from torch import nn

import memfit

EXCLUDED = {"resnet50": "layer4", "vgg16": "classifier.3"}
VALIDATED = 4  # batches


class Measuring(memfit.Callback):
    """Reads the peak of the process in each epoch."""

    def __init__(self) -> None:
        self.updates = self.whole = 0

    def on_epoch_begin(self, engine: Any) -> None:  # noqa: ARG002
        """Reset the peak."""
        Path("/proc/self/clear_refs").write_text("5")

    def on_window_end(self, engine: Any, result: memfit.StepResult) -> None:  # noqa: ARG002
        """Read the peak of the updates."""
        self.updates = status("VmHWM")

    def on_epoch_end(self, engine: Any) -> None:  # noqa: ARG002
        """Read the peak of the updates and the validation."""
        self.whole = status("VmHWM")


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a batch of images."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(name: str, updates: int, *, placed: bool, pipe: Connection) -> None:
    """Train, validate and send the figures."""
    torch.manual_seed(0)
    model, shape = model_of(name), BATCHES[name]
    batch = torch.randn(shape), torch.arange(shape[0])
    mem_param = {"optimize_train": True, "optimize_test": True, "exclude_blob": EXCLUDED[name]}
    measuring = Measuring()
    engine = memfit.Engine(
        model,
        {"mem_param": mem_param} if placed else None,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        loss=loss,
        callbacks=[measuring],
    )
    engine.fit([batch] * updates, 2, validate=[batch] * VALIDATED)
    digest = hashlib.sha256(str(engine.metrics).encode())
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    steps = engine.arena.report().steps if engine.arena else ()
    pipe.send((digest.hexdigest(), measuring.updates, measuring.whole, steps))


def compare(name: str, updates: int) -> None:
    """Train in two processes, one after the other, and print the comparison."""
    context = multiprocessing.get_context("spawn")
    results = []
    for placed in (False, True):
        ours, theirs = context.Pipe()
        options = {"placed": placed, "pipe": theirs}
        child = context.Process(target=train, args=(name, updates), kwargs=options)
        child.start()
        results.append(ours.recv())
        child.join()
    (plain, *default, _), (digest, *peaks, steps) = results
    print(f"{name} {BATCHES[name]}: {'bit-identical' if plain == digest else 'DIFFERENT'}")
    for what, peak, other in zip(("updates", "epoch"), peaks, default, strict=True):
        ratio = f"{peak / other:.3f} of the default's ({other / MIB:,.0f} MiB)"
        print(f"  peak of the {what:<8}{peak / MIB:,.0f} MiB, {ratio}")
    for step in steps:
        print(
            f"  {step.name}: {step.placed} placed, {step.kept} kept, {step.unplanned} unplanned; planned "
            f"{step.planned / MIB:,.0f} MiB, live {step.live / MIB:,.0f}, each by itself "
            f"{step.unshared / MIB:,.0f}",
            flush=True,
        )


if __name__ == "__main__":
    compare_models(__doc__, compare, EXCLUDED, "--updates", 8)
