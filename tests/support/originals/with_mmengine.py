"""Rows of tests/support/originals/report.py for MMEngine: its optimizer wrappers in a loop, and its Runner.

``AmpOptimWrapper`` refuses a machine without a card. ``amp_on_cpu`` lets it run there: its own code decides
when to divide, scale, unscale, clip, step and change the scale, with the GradScaler and the autocast that
PyTorch has for the CPU in place of those for CUDA.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from comparison import Row, row, row_of_token_means
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.optim import build_optim_wrapper
from mmengine.runner import Runner
from torch import nn
from training import (
    ADAMW,
    Task,
    Tokens,
    Trained,
    counted_updates,
    train_with_memfit,
    trained,
)

MMLogger.get_instance("originals", log_level="ERROR")

Settings = Mapping[str, Any]
AMP = "mmengine.optim.optimizer.amp_optimizer_wrapper"


class Model(BaseModel):
    """The task's model as MMEngine's users write it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, mode: str = "loss", **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean loss."""
        if mode != "loss":
            raise ValueError(f"The benchmark only trains: mode must be 'loss', not {mode!r}.")
        return {"loss": self.model(**batch)["loss"]}


def train_in_loop(task: Task, settings: Settings, *, knows_length: bool = True) -> Trained:
    """Train in a loop of one's own, in which the wrapper may know how many batches there will be."""
    model = Model(task.build())
    optim_wrapper = build_optim_wrapper(model, dict(settings["optim_wrapper"]))
    if knows_length:
        optim_wrapper.initialize_count_status(model, 0, task.batches * task.epochs)
    with counted_updates() as updates:
        for _ in range(task.epochs):
            for batch in task.loader():
                with optim_wrapper.optim_context(model):
                    loss = model(**batch)["loss"]
                optim_wrapper.update_params(loss)
    return trained(model.model, optim_wrapper.optimizer, len(updates))


@contextmanager
def amp_on_cpu() -> Iterator[None]:
    """Let ``AmpOptimWrapper`` use the CPU's GradScaler and autocast; its own defaults on a card stay."""

    def autocast(dtype: torch.dtype | None = None) -> torch.autocast:
        return torch.autocast("cpu", dtype=dtype or torch.get_autocast_dtype("cuda"))

    with ExitStack() as patches:
        patches.enter_context(patch(f"{AMP}.is_cuda_available", lambda: True))
        patches.enter_context(patch(f"{AMP}.GradScaler", partial(torch.amp.GradScaler, "cpu")))
        patches.enter_context(patch("mmengine.runner.amp.autocast", autocast))
        yield


def train_amp(task: Task, settings: Settings) -> Trained:
    """Train with ``AmpOptimWrapper`` on the CPU."""
    with amp_on_cpu():
        return train_in_loop(task, settings)


def train_with_runner(
    task: Task, settings: Settings, *, counts_batches: bool = False, max_iters: bool = False
) -> Trained:
    """Train with a Runner.

    Args:
        task: what is trained.
        settings: with ``optim_wrapper``.
        counts_batches: whether the scheduler counts batches, or else epochs.
        max_iters: whether the training's length is given in batches, or else in epochs.
    """
    decay = {"type": "StepLR", "step_size": task.decay_every, "gamma": 0.5, "by_epoch": not counts_batches}
    length = {"max_iters": task.batches * task.epochs} if max_iters else {"max_epochs": task.epochs}
    model = Model(task.build())
    with (
        tempfile.TemporaryDirectory() as folder,
        counted_updates() as updates,
        patch("mmengine.runner.loops.time.sleep"),  # with max_iters it waits two seconds after each epoch
    ):
        runner = Runner(
            model,
            folder,
            train_dataloader=task.loader(),
            train_cfg={"by_epoch": not max_iters} | length,
            optim_wrapper=dict(settings["optim_wrapper"]),
            param_scheduler=decay if task.decay_every else None,
            default_hooks={"checkpoint": None, "logger": None},
            log_level="ERROR",
            experiment_name=f"originals-{id(model)}",
        )
        runner.train()
    return trained(model.model, runner.optim_wrapper.optimizer, len(updates))


def rows() -> Iterator[Row]:
    """Yield the comparisons; windows go on in the next epoch, and most trainings end with a partial one."""
    clip = {"clip_grad": {"max_norm": 3.0, "norm_type": 2}}
    for task, fields in (
        (Task(4), {}),
        (Task(8, optimizer=ADAMW), {"accumulative_counts": 2} | clip),
        (Task(13, 3), {"accumulative_counts": 2}),
        (Task(29, 2), {"accumulative_counts": 3} | clip),
        (Task(13, 6, optimizer=ADAMW), {"accumulative_counts": 4} | clip),
    ):
        yield row(train_in_loop, task, wrapper(task, fields), how="loop")
    for task, fields in (
        (Task(13, 3, decay_every=1, decay_counts="epoch"), {"accumulative_counts": 2} | clip),
        (Task(13, 6, optimizer=ADAMW), {"accumulative_counts": 4}),
    ):
        yield row(train_with_runner, task, wrapper(task, fields), how="Runner")
    task = Task(29, 2)
    settings = wrapper(task, {"accumulative_counts": 3})
    yield row(partial(train_with_runner, max_iters=True), task, settings, how="Runner, max_iters=58")
    yield from rows_of_amp(clip)
    yield from rows_that_differ()


def rows_of_amp(clip: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the comparisons of ``AmpOptimWrapper``."""
    amp, task = {"type": "AmpOptimWrapper"}, Task(29, 2)
    yield row(train_in_loop, task, wrapper(task, amp), how="loop", refusal="only available training on gpu")
    three = amp | clip | {"accumulative_counts": 3}
    growing = {"loss_scale": {"init_scale": 2.0**18, "growth_interval": 4}}
    for task, fields in (
        (Task(29, 2), three | {"dtype": "bfloat16"}),
        (Task(29, 2), three | {"loss_scale": 512.0}),
        (Task(13, 4, optimizer=ADAMW), amp | {"accumulative_counts": 2} | growing),  # six are skipped
        (Task(7, 3), amp | {"dtype": "float16", "loss_scale": "dynamic"}),  # one is skipped
    ):
        yield row(train_amp, task, wrapper(task, fields), how="loop, amp_on_cpu")


def rows_that_differ() -> Iterator[Row]:
    """Yield the comparisons that show where MMEngine and memfit differ."""
    # Without a batch norm: MMEngine runs the forwards of the batches that it leaves out, and memfit does not.
    task = Task(62, 1, model=Tokens)
    settings = wrapper(task, {"accumulative_counts": 3})
    yield row(
        partial(train_in_loop, knows_length=False),
        task,
        settings,
        how="loop without initialize_count_status",
        reason="MMEngine leaves out the last, partial window, as memfit does with remainder='drop'",
        alike=partial(train_with_memfit, task, settings | {"remainder": "drop"}),
    )
    task = Task(8, decay_every=8)
    settings = wrapper(task, {"accumulative_counts": 2})
    yield row(
        partial(train_with_runner, counts_batches=True),
        task,
        settings,
        how="Runner, by_epoch=False",
        reason="MMEngine's scheduler counts batches, memfit's counts updates",
        alike=partial(train_with_memfit, replace(task, decay_every=4), settings),
    )
    task = Task(12, model=Tokens)
    settings = wrapper(task, {"accumulative_counts": 3})
    yield row_of_token_means("MMEngine", train_in_loop, task, settings, how="loop")


def wrapper(task: Task, fields: Mapping[str, Any]) -> Settings:
    """Return the line of a configuration file with these fields."""
    return {"optim_wrapper": {"type": "OptimWrapper", "optimizer": task.optimizer} | dict(fields)}
