"""The models, batches and optimizers of report.py, and how memfit trains them."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

import memfit

SGD = {"type": "SGD", "lr": 0.05, "momentum": 0.9}
ADAMW = {"type": "AdamW", "lr": 0.01, "weight_decay": 0.0}
"""Optimizers as MMEngine's dicts name them; other systems create the same class with the same arguments."""
SAMPLES = 4
CLASSES, TOKENS, LENGTH = 10, 50, 12
IGNORED = -100
"""The label of a token that does not count."""

Sample = dict[str, torch.Tensor]
Loss = Callable[[nn.Module, Any], Any]


class Images(nn.Module):
    """Classify 8 x 8 images by a convolution, a batch norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 8 * 8, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the ``logits``, (samples, classes), and their mean ``loss``."""
        features = F.relu(self.norm(self.convolution(x.to(self.head.weight.dtype))))
        logits = self.head(features.flatten(1))
        return {"loss": cross_entropy(logits, labels), "logits": logits}

    @staticmethod
    def sample() -> Sample:
        """Draw an image and its class."""
        return {"x": torch.randn(3, 8, 8), "labels": torch.randint(CLASSES, ())}


class Tokens(nn.Module):
    """Label each token of a sequence by an embedding and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.hidden = nn.Linear(16, 32)
        self.head = nn.Linear(32, TOKENS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the ``logits``, (samples, length, tokens), and the mean ``loss`` over labels that count."""
        logits = self.head(F.gelu(self.hidden(self.embedding(input_ids))))
        return {"loss": cross_entropy(logits, labels), "logits": logits}

    @staticmethod
    def sample() -> Sample:
        """Draw a sequence in which between 1 and all of the labels count."""
        ids = torch.randint(TOKENS, (LENGTH,))
        ignored = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, ())
        return {"input_ids": ids, "labels": ids.masked_fill(ignored, IGNORED)}


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Return the loss over the labels that count."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction=reduction)


def mean(model: nn.Module, batch: Sample) -> torch.Tensor:
    """Return the loss that the model computes: the mean over a batch."""
    return model(**batch)["loss"]


def sum_and_count(model: nn.Module, batch: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of a batch's tokens, and how many tokens count."""
    labels = batch["labels"]
    return cross_entropy(model(**batch)["logits"], labels, "sum"), (labels != IGNORED).sum()


@dataclass(frozen=True, slots=True)
class Task:
    """A training: the same initial weights and the same batches in the same order each time it is asked."""

    batches: int
    """Per epoch."""
    epochs: int = 5
    optimizer: Mapping[str, Any] = field(default_factory=lambda: SGD)
    decay_every: int = 0
    """Updates or epochs after which the learning rate is halved; 0 for never."""
    decay_counts: str = "update"
    """What ``decay_every`` counts: ``"update"`` or ``"epoch"``."""
    model: type[nn.Module] = Images

    def __str__(self) -> str:
        text = f"{self.model.__name__}, {self.batches} batches x {self.epochs}, {self.optimizer['type']}"
        if not self.decay_every:
            return text
        every = f"{self.decay_every} {self.decay_counts}s" if self.decay_every > 1 else self.decay_counts
        return f"{text}, rate halved every {every}"

    def build(self) -> nn.Module:
        """Return the model with its initial weights."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.model()

    def data(self) -> list[Sample]:
        """Return the samples of an epoch."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return [self.model.sample() for _ in range(self.batches * SAMPLES)]

    def loader(self) -> DataLoader[Sample]:
        """Return the batches of an epoch."""
        return DataLoader(self.data(), batch_size=SAMPLES)

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Create the optimizer."""
        arguments = {name: value for name, value in self.optimizer.items() if name != "type"}
        return getattr(torch.optim, self.optimizer["type"])(parameters, **arguments)

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """Create the scheduler, None if the learning rate is constant."""
        if not self.decay_every:
            return None
        return torch.optim.lr_scheduler.StepLR(optimizer, self.decay_every, 0.5)


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training left: parameters, buffers and the optimizer's state by name, and its updates."""

    values: dict[str, torch.Tensor]
    updates: int

    def rounding(self) -> float:
        """Return one unit in the last place of the largest value, times the updates."""
        values = [value for value in self.values.values() if value.is_floating_point()]
        largest = max(value.abs().max().item() for value in values)
        return self.updates * largest * min(torch.finfo(value.dtype).eps for value in values)

    def difference(self, other: "Trained") -> float:
        """Return the largest absolute difference of two values; infinite if names or dtypes differ."""
        kinds = [{name: value.dtype for name, value in each.values.items()} for each in (self, other)]
        if kinds[0] != kinds[1]:
            return float("inf")
        return max(
            (value.double() - other.values[name].double()).abs().max().item()
            for name, value in self.values.items()
        )


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, updates: int) -> Trained:
    """Return what a training left."""
    values = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                values[f"{name}: {key}"] = value
    for name, value in values.items():
        if not value.isfinite().all():
            raise AssertionError(f"{name} is not finite: such a training compares nothing.")
    return Trained(copy.deepcopy(values), updates)


@contextmanager
def counted_updates() -> Iterator[list[None]]:
    """Yield a list that gets an entry for every step of an optimizer."""
    steps: list[None] = []
    hook = register_optimizer_step_post_hook(lambda *_: steps.append(None))
    try:
        yield steps
    finally:
        hook.remove()


class _Windows(memfit.Callback):
    """Keeps the norms of the gradients; steps a scheduler, if it has one, after skipped updates too."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.norms: list[float] = []

    def on_window_end(self, engine: Any, result: Any) -> None:
        """Step the scheduler."""
        if result.grad_norm is not None:
            self.norms.append(result.grad_norm)
        if self.scheduler is not None:
            self.scheduler.step()


def train_with_memfit(
    task: Task,
    settings: Mapping[str, Any],
    loss: Loss = mean,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    *,
    scheduler_moves_always: bool = False,
) -> Trained:
    """Train with memfit under another system's settings.

    Args:
        task: what is trained.
        settings: as ``memfit.configure`` reads them.
        loss: the engine's.
        make_scheduler: in place of the task's; it counts updates.
        scheduler_moves_always: whether the scheduler counts skipped updates too.

    Raises:
        ValueError: gradients are to be clipped, and none or all were. Neither would show whether they are
            divided correctly and clipped when they should be.
    """
    settings = memfit.configure(settings)
    model = task.build()
    optimizer = task.make_optimizer(model.parameters())
    scheduler = (make_scheduler or task.make_scheduler)(optimizer)
    interval = None if scheduler is None else "update" if make_scheduler else task.decay_counts
    windows = _Windows(scheduler if scheduler_moves_always else None)
    engine = memfit.Engine(
        model,
        settings,
        optimizer=optimizer,
        loss=loss,
        scheduler=None if scheduler_moves_always else scheduler,
        scheduler_interval=None if scheduler_moves_always else interval,
        callbacks=[windows],
    )
    with counted_updates() as updates:
        engine.fit(task.loader(), epochs=task.epochs)
    limit = settings.max_grad_norm
    if limit is not None and not min(windows.norms) < limit < max(windows.norms):
        raise ValueError(f"A norm of {limit} clips none or all of {task}'s updates: {windows.norms}")
    return trained(model, optimizer, len(updates))


def divided_by_full_window(task: Task, window: int) -> Loss:
    """Return a loss that makes memfit divide the last, partial window of each epoch by the full window.

    memfit divides these batches' losses by their number; here they are multiplied by number / window before.
    """
    rest, calls = task.batches % window, count()

    def loss(model: nn.Module, batch: Sample) -> torch.Tensor:
        is_last = next(calls) % task.batches >= task.batches - rest
        return mean(model, batch) * (rest / window if is_last else 1.0)

    return loss
