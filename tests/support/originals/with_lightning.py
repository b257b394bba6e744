"""Rows of tests/support/originals/report.py for Lightning: its Trainer on a CPU."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import lightning
import torch
from comparison import Row, row, row_of_token_means, rows_of_partial_windows
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn import functional as F  # noqa: N812
from training import (
    ADAMW,
    Task,
    Tokens,
    Trained,
    counted_updates,
    cross_entropy,
    train_with_memfit,
    trained,
)

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Shared(Tokens):
    """``Tokens`` with a layer that is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(32, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean loss."""
        hidden = self.hidden(self.embedding(input_ids))
        for _ in range(3):
            hidden = hidden + F.gelu(self.shared(hidden))
        return {"loss": cross_entropy(self.head(hidden), labels)}


class SharedUncached(Shared):
    """The same without autocast's cache of weights, which autocast enables again afterwards."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean loss."""
        torch.set_autocast_cache_enabled(False)
        return super().forward(input_ids, labels)


class Module(lightning.LightningModule):
    """The task as Lightning's users write it."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task, self.model = task, model

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        """Return the mean loss."""
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> dict[str, Any]:
        """Return the optimizer, and the scheduler with what it counts."""
        optimizer = self.task.make_optimizer(self.model.parameters())
        scheduler = self.task.make_scheduler(optimizer)
        if scheduler is None:
            return {"optimizer": optimizer}
        interval = {"update": "step", "epoch": "epoch"}[self.task.decay_counts]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}


def train(task: Task, settings: Mapping[str, Any], **more: Any) -> Trained:
    """Train with Lightning's Trainer."""
    model = task.build()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=task.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
        **more,
    )
    with counted_updates() as updates:
        trainer.fit(Module(task, model), task.loader())
    return trained(model, trainer.optimizers[0], len(updates))


def train_in_fp16(task: Task, settings: Mapping[str, Any]) -> Trained:
    """Train with Lightning's fp16 plugin, which the Trainer itself does not create on a CPU."""
    scaler = torch.amp.GradScaler("cpu", **settings.get("loss_scale", {}))
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    given = {name: value for name, value in settings.items() if name not in ("precision", "loss_scale")}
    return train(task, given, plugins=[plugin])


def rows() -> Iterator[Row]:
    """Yield the comparisons."""
    clip = {"gradient_clip_val": 3.0}
    for settings, task in (
        ({"precision": "32-true"}, Task(4)),
        ({"accumulate_grad_batches": 2} | clip, Task(8, optimizer=ADAMW)),
        ({"accumulate_grad_batches": 3} | clip, Task(12, decay_every=6)),
        ({"accumulate_grad_batches": 4}, Task(16, decay_every=2, decay_counts="epoch", optimizer=ADAMW)),
        ({"precision": "bf16-mixed", "accumulate_grad_batches": 3} | clip, Task(12)),
        ({"precision": "bf16-true"} | clip, Task(4)),
    ):
        yield row(train, task, settings)
    yield from rows_of_partial_windows("Lightning", train, "accumulate_grad_batches")
    yield row_of_token_means("Lightning", train, Task(12, model=Tokens), {"accumulate_grad_batches": 3})
    yield from rows_of_low_precision(clip)


def rows_of_low_precision(clip: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the comparisons that are about bf16 and fp16 themselves."""
    task, settings = Task(16), {"precision": "bf16-true", "accumulate_grad_batches": 4}
    yield row(
        train,
        task,
        settings,
        reason="Lightning sums gradients in bf16, memfit in float32 unless gradient_dtype='bfloat16'",
        alike=partial(train_with_memfit, task, settings | {"gradient_dtype": "bfloat16"}),
    )
    task, settings = Task(4, model=Shared), {"precision": "bf16-mixed"}
    yield row(
        train,
        task,
        settings,
        reason="Lightning disables autocast's cache: a shared layer's gradients are not summed in bf16",
        alike=partial(train_with_memfit, replace(task, model=SharedUncached), settings),
    )
    task, settings = Task(4), {"precision": "16-mixed"}
    yield row(
        train,
        task,
        settings,
        reason="on a CPU Lightning trains in bf16 (with a warning), memfit in fp16",
        alike=partial(train_with_memfit, task, {"precision": "bf16-mixed"}),
    )
    plugin = {"how": "plugins=[MixedPrecision(...)]"}
    task, more = (
        Task(8, optimizer=ADAMW),
        {"accumulate_grad_batches": 2, "loss_scale": {"init_scale": 1024.0}},
    )
    yield row(train_in_fp16, task, settings | more | clip, **plugin)
    yield row(train_in_fp16, Task(7, 3), settings, **plugin)  # one update is skipped
    task = Task(7, 3, decay_every=4)
    yield row(
        train_in_fp16,
        task,
        settings,
        **plugin,
        reason="Lightning steps the scheduler after an update that was skipped, too",
        alike=partial(train_with_memfit, task, settings, scheduler_moves_always=True),
    )
