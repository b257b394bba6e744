"""Small networks on the CPU whose training steps are planned: the cases that a planner gets wrong."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from memfit.recording.step_operations import StepOperationRecorder
from memfit.records import StepOperations


@dataclass(frozen=True)
class PlannedNetwork:
    """A model and what computes its loss."""

    model: nn.Module
    loss: Callable[[], torch.Tensor]

    def record(self) -> StepOperations:
        """Run a step, operation by operation."""
        recorder = StepOperationRecorder(self.model)
        recorder.start()
        self.loss().backward()
        return recorder.stop()

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of a step that draws the same random numbers each time."""
        torch.manual_seed(3)
        self.model.zero_grad(set_to_none=True)
        self.loss().backward()
        found = [None if each.grad is None else each.grad.clone() for each in self.model.parameters()]
        for each in self.model.parameters():  # as between the steps of a training
            each.grad = torch.zeros_like(each)
        return found


class Block(nn.Module):
    """A transformer's feed-forward, with dropout in two places."""

    def __init__(self, width, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, *, scale=1.0):
        inner = self.dropout(functional.gelu(self.up(self.norm(x))))
        return x + scale * self.dropout(self.down(inner))


class ConvBlock(nn.Module):
    """A residual block with batch normalisation and in-place activations."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + x)


class Nested(nn.Module):
    """Stages of blocks, a dict between them, keywords, a block that runs twice, and tied weights."""

    def __init__(self, width):
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(Block(width, 0.0), Block(width, 0.0)) for _ in range(2))
        self.shared = Block(width, 0.1)
        self.encode, self.decode = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.decode.weight = self.encode.weight

    def forward(self, *, batch):
        x = self.encode(batch["x"])
        for stage in self.stages:
            x = self.shared(stage(x), scale=0.5)
        return {"result": self.decode(x)}


def feed_forward(blocks=4, samples=128) -> PlannedNetwork:
    model = nn.Sequential(*(Block(32, 0.1) for _ in range(blocks)), nn.Linear(32, 10))
    x, target = torch.randn(samples, 32), torch.randint(0, 10, (samples,))
    return PlannedNetwork(model, lambda: functional.cross_entropy(model(x), target))


def convolutional() -> PlannedNetwork:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), *(ConvBlock(8) for _ in range(4)), nn.Flatten(), nn.LazyLinear(4)
    )
    x = torch.randn(8, 3, 18, 18)
    model(x)
    return PlannedNetwork(model, lambda: model(x).square().mean())


def nested() -> PlannedNetwork:
    model = Nested(32)
    x = torch.randn(128, 32)
    return PlannedNetwork(model, lambda: model(batch={"x": x})["result"].square().mean())


def partly_frozen() -> PlannedNetwork:
    model = nn.Sequential(*(Block(32, 0.0) for _ in range(4)))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    x = torch.randn(128, 32)
    return PlannedNetwork(model, lambda: model(x).square().mean())


class Drawing(nn.Module):
    """Two draws that recomputation must make in the same order, by the operation that a GPU uses."""

    def __init__(self, width, *, also_in_place):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.also_in_place = also_in_place

    def forward(self, x):
        inner, _ = torch.native_dropout(self.up(x).sigmoid(), 0.5, train=True)
        outer, _ = torch.native_dropout(self.down(inner).sigmoid(), 0.5, train=True)
        if self.also_in_place:
            outer = outer * torch.empty_like(outer).bernoulli_(0.5)
        return outer.sin()


def drawing(*, also_in_place=False) -> PlannedNetwork:
    model = nn.Sequential(*(Drawing(32, also_in_place=also_in_place) for _ in range(4)))
    x = torch.randn(128, 32)
    return PlannedNetwork(model, lambda: model(x).square().mean())


def drawing_in_place() -> PlannedNetwork:
    return drawing(also_in_place=True)


NETWORKS = (feed_forward, convolutional, nested, partly_frozen, drawing, drawing_in_place)
