"""Rows of tests/support/originals/report.py for the Trainer of transformers, on a CPU."""

import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from comparison import Row, row, row_of_token_means
from torch import nn
from training import (
    ADAMW,
    IGNORED,
    SAMPLES,
    TOKENS,
    Sample,
    Task,
    Tokens,
    Trained,
    counted_updates,
    cross_entropy,
    train_with_memfit,
    trained,
)

transformers.logging.set_verbosity_error()

WARMUP = 4
"""Updates of the schedules' warm-up."""


class SmallLlamaForCausalLM(transformers.LlamaForCausalLM):
    """A Llama of two layers; the Trainer passes it the number of tokens of all batches of an update.

    transformers finds its loss by the end of the class's name.
    """

    sample = staticmethod(Tokens.sample)

    def __init__(self) -> None:
        super().__init__(
            transformers.LlamaConfig(
                vocab_size=TOKENS,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                use_cache=False,
            )
        )


class EvenLlamaForCausalLM(SmallLlamaForCausalLM):
    """The same, and each batch has 32 tokens that count: sequences of nine have eight next tokens."""

    @staticmethod
    def sample() -> Sample:
        """Draw a sequence."""
        ids = torch.randint(TOKENS, (32 // SAMPLES + 1,))
        return {"input_ids": ids, "labels": ids}


class TokensFloat64(Tokens):
    """``Tokens`` in float64, with a loss as that of transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Return the loss: the sum over the labels that count, divided by ``num_items_in_batch``."""
        logits = super().forward(input_ids, labels)["logits"]
        return {"loss": cross_entropy(logits, labels, "sum") / kwargs["num_items_in_batch"]}


def sum_and_next_tokens(model: nn.Module, batch: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of the next tokens that count, and their number."""
    return model(**batch, num_items_in_batch=1)["loss"], (batch["labels"][:, 1:] != IGNORED).sum()


def sum_and_tokens(model: nn.Module, batch: Sample) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of the tokens that count, and their number."""
    return model(**batch, num_items_in_batch=1)["loss"], (batch["labels"] != IGNORED).sum()


def train(task: Task, settings: Mapping[str, Any], schedule: str = "constant") -> Trained:
    """Train with the Trainer, which creates AdamW itself and is given SGD."""
    model = task.build()
    optimizer = None if task.optimizer is ADAMW else task.make_optimizer(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            num_train_epochs=task.epochs,
            per_device_train_batch_size=SAMPLES,
            train_sampling_strategy="sequential",
            learning_rate=task.optimizer["lr"],
            lr_scheduler_type=schedule,
            warmup_steps=0 if schedule == "constant" else WARMUP,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            **settings,
        )
        trainer = transformers.Trainer(
            model, arguments, train_dataset=task.data(), optimizers=(optimizer, None)
        )
        trainer.remove_callback(transformers.PrinterCallback)
        with counted_updates() as updates:
            trainer.train()
    return trained(model, trainer.optimizer, len(updates))


def scheduled(schedule: str, optimizer: torch.optim.Optimizer) -> Any:
    """Return the scheduler that the Trainer creates for 20 updates."""
    return transformers.get_scheduler(schedule, optimizer, WARMUP, num_training_steps=20)


def rows() -> Iterator[Row]:
    """Yield the comparisons; the last window of an epoch is partial wherever batches are accumulated."""
    clip = {"max_grad_norm": 3.0}
    for settings, task in (
        (clip, Task(4)),
        ({"gradient_accumulation_steps": 2} | clip, Task(7)),
        ({"gradient_accumulation_steps": 3, "optim": "adamw_torch"} | clip, Task(11, optimizer=ADAMW)),
        ({"gradient_accumulation_steps": 4, "optim": "adamw_torch_fused"} | clip, Task(13, optimizer=ADAMW)),
        ({"gradient_accumulation_steps": 4, "bf16": True, "max_grad_norm": 0.0}, Task(13)),
    ):
        yield row(train, task, settings)
    for schedule in "linear", "cosine":
        settings, task = {"gradient_accumulation_steps": 3} | clip, Task(10)
        yield row(
            partial(train, schedule=schedule),
            task,
            settings,
            how=f"lr_scheduler_type={schedule!r}, warmup_steps={WARMUP}",
            ours=partial(train_with_memfit, task, settings, make_scheduler=partial(scheduled, schedule)),
        )
    yield from rows_of_tokens()
    settings, task = {"gradient_accumulation_steps": 2}, Task(7)
    yield row(
        train,
        task,
        settings,
        reason="the Trainer clips gradients to a norm of 1.0 if max_grad_norm is left out",
        alike=partial(train_with_memfit, task, settings | {"max_grad_norm": 1.0}),
    )
    yield row(
        train,
        Task(4),
        {"fp16": True} | clip,
        reason="on a CPU the Trainer trains in float32, without a warning, and memfit in fp16",
        alike=partial(train_with_memfit, Task(4), clip),
    )


def rows_of_tokens() -> Iterator[Row]:
    """Yield the comparisons whose batches have different numbers of tokens."""
    checkpoint = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    task = Task(16, model=EvenLlamaForCausalLM)
    settings = {"gradient_accumulation_steps": 4, "max_grad_norm": 0.8} | checkpoint
    ours = partial(train_with_memfit, task, settings, sum_and_next_tokens)
    yield row(train, task, settings, ours=ours)
    settings = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.0}
    for model, loss in (SmallLlamaForCausalLM, sum_and_next_tokens), (TokensFloat64, sum_and_tokens):
        task = Task(11, model=model)
        yield row(
            train,
            task,
            settings,
            ours=partial(train_with_memfit, task, settings, loss),
            rounding="the Trainer divides each batch's sum by the tokens of all batches, counted before; "
            "memfit by the first batch's, and it corrects the gradients at the end",
        )
    yield row_of_token_means(
        "the Trainer", train, Task(11, model=Tokens), settings, how="model without **kwargs"
    )
