"""A small training loop on the CPU, with or without an arena."""

import contextlib

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(4 * 64, 10)
        self.extra = 0

    def forward(self, images):
        hidden = torch.relu(self.norm(self.first(images)))
        if self.extra:
            hidden = hidden + torch.zeros(self.extra)[0]
        return self.last(hidden.flatten(1))


class Training:
    """A training loop that records every loss and gradient."""

    def __init__(self, arena=None):
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.images, self.labels = torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))
        self.arena = arena
        self.seen = []

    def step(self, size=8):
        with self.arena.train(self.images[:size]) if self.arena else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(self.model(self.images[:size]), self.labels[:size])
            loss.backward()
            self.seen.append(
                [loss.item(), *(parameter.grad.numpy().copy() for parameter in self.model.parameters())]
            )
            self.optimizer.step()
            self.optimizer.zero_grad()

    def run(self, steps):
        for _ in range(steps):
            self.step()
        return self


def same(left, right):
    """Return whether two trainings are bit-identical."""
    return len(left) == len(right) and all(map(equal_steps, left, right))


def equal_steps(left, right):
    """Return whether two steps have the same loss and gradients, bit for bit."""
    return len(left) == len(right) and all(map(np.array_equal, left, right))


def kind_of(arena):
    """Return the only kind of step that an arena has seen."""
    (kind,) = arena._kinds.values()
    return kind
