"""Rows of tests/support/originals/report.py for Accelerate: the loop of its documentation, on a CPU."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin
from comparison import Row, row, row_of_token_means, rows_of_partial_windows
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


def train(task: Task, settings: Mapping[str, Any], *, carries: bool = False) -> Trained:
    """Train in a loop of one's own; ``carries`` lets windows go on in the next epoch."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    given = dict(settings)
    norm = given.pop("max_grad_norm", None)
    if carries:
        del given["remainder"]
        steps = given.pop("gradient_accumulation_steps")
        given["gradient_accumulation_plugin"] = GradientAccumulationPlugin(steps, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, **given)
    model = task.build()
    own = task.make_optimizer(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, own, task.loader())
    scheduler = task.make_scheduler(own)
    if scheduler is not None:
        scheduler = accelerator.prepare(scheduler)
    with counted_updates() as updates:
        for _ in range(task.epochs):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = cross_entropy(model(**batch)["logits"], batch["labels"])
                    accelerator.backward(loss)
                    if norm is not None and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), norm)
                    optimizer.step()
                    if scheduler is not None:
                        scheduler.step()
                    optimizer.zero_grad()
    return trained(accelerator.unwrap_model(model), own, len(updates))


def rows() -> Iterator[Row]:
    """Yield the comparisons."""
    clip = {"max_grad_norm": 3.0}
    for settings, task in (
        ({"mixed_precision": "no"}, Task(4)),
        ({"gradient_accumulation_steps": 2} | clip, Task(8, optimizer=ADAMW)),
        ({"gradient_accumulation_steps": 3} | clip, Task(12, decay_every=6)),
        ({"gradient_accumulation_steps": 4, "mixed_precision": "bf16"} | clip, Task(16)),
    ):
        yield row(train, task, settings)
    settings, how = {"gradient_accumulation_steps": 4, "remainder": "carry"}, "sync_with_dataloader=False"
    yield row(partial(train, carries=True), Task(10, 8), settings, how=how)
    yield from rows_of_partial_windows("Accelerate", train, "gradient_accumulation_steps")
    yield row(
        train,
        Task(4),
        {"mixed_precision": "fp16"} | clip,
        reason="on a CPU Accelerate trains in float32, without a warning, and memfit in fp16",
        alike=partial(train_with_memfit, Task(4), clip),
    )
    yield row_of_token_means("Accelerate", train, Task(12, model=Tokens), {"gradient_accumulation_steps": 3})
