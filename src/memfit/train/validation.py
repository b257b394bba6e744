"""Validation: means over a loader, in evaluation mode, without gradients."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from numbers import Real
from typing import Any

import torch
from torch import nn

from memfit.errors import AmbiguousBatchError, UsageError
from memfit.strategies.mechanisms.module_patterns import class_name
from memfit.train.ranks.rank_agreement import SingleRank
from memfit.user_lines import warn_user

Metric = Callable[[nn.Module, Any], Any]
"""``metric(model, batch)`` returns, as a loss does, a mean or a pair: the sum and its divisor."""


def validation_metric_names(metrics: Mapping[str, Metric] | None, loader: Iterable[Any] | None) -> list[str]:
    """Return the names of the metrics that ``fit`` validates."""
    if loader is not None:
        return list(metrics or ["loss"])
    if metrics:
        raise UsageError("engine.fit(metrics=...) also needs validate=..., the batches to validate.")
    return []


def run_validation(  # noqa: PLR0913 - what the engine knows about its validation
    model: nn.Module,
    loader: Iterable[Any],
    metrics: Mapping[str, Metric],
    autocast: Callable[[], AbstractContextManager[Any]],
    step: Callable[[Any], AbstractContextManager[Any]],
    size: Callable[[Any], int],
    ranks: SingleRank,
    *,
    together: bool,
) -> dict[str, float]:
    """Return the means of metrics over a loader's samples; over those of all ranks.

    Args:
        model: is in evaluation mode meanwhile; each of its modules then returns to the mode that it had.
        loader: yields batches.
        metrics: by name.
        autocast: the context of a forward.
        step: the context of all metrics of a batch.
        size: the number of samples of a batch; batches of unknown size count alike.
        ranks: that validate together, each with a loader of its own.
        together: whether the ranks run each forward together (fsdp2): one with fewer batches repeats one.
    """
    sums: dict[str, Any] = {}
    with _evaluating(model):
        for batch, counts in _equally_many(loader, ranks) if together else ((each, True) for each in loader):
            with step(batch):
                found = {
                    name: _sum_of(name, metric, model, batch, autocast, size)
                    for name, metric in metrics.items()
                }
            for name, (total, weight) in found.items() if counts else ():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + total, before[1] + weight
    if not ranks.agree("engine.validate", len(sums))[0]:
        raise UsageError(
            "The validation loader returned no batches. A generator, for example, can be iterated only once."
        )
    for name in metrics:
        total, weight = sums.get(name, (0.0, 0.0))
        sums[name] = ranks.total(float(total), float(weight))
    nothing = [name for name, (_, weight) in sums.items() if not weight]
    if nothing:
        raise UsageError(f"The metric {nothing[0]!r} has no mean: the divisors that it returned add up to 0.")
    return {name: float(total) / float(weight) for name, (total, weight) in sums.items()}


def warn_of_evaluation_mode(model: nn.Module) -> None:
    """Warn if a whole model is about to be trained in evaluation mode, as ``from_pretrained`` returns it."""
    if not any(part.training for part in model.modules()):
        warn_user(
            f"The whole {class_name(model)} is in evaluation mode, and stays in it: dropout drops "
            "nothing, and batch norms learn no statistics. Call model.train() before engine.fit."
        )


def _equally_many(loader: Iterable[Any], ranks: SingleRank) -> Iterator[tuple[Any, bool]]:
    """Yield batches, and whether they count, until no rank has more of its own."""
    own, last = iter(loader), None
    while True:
        batch = next(own, None)
        if not ranks.agree("engine.validate", batch is not None)[0]:
            return
        if batch is None and last is None:
            raise UsageError(
                "A rank has no batch to validate. With fsdp2 all ranks run each forward together: give each "
                "rank at least one."
            )
        counts, last = batch is not None, last if batch is None else batch
        yield last, counts


def _sum_of(
    name: str,
    metric: Metric,
    model: nn.Module,
    batch: Any,
    autocast: Callable[[], AbstractContextManager[Any]],
    size: Callable[[Any], int],
) -> tuple[Any, Any]:
    """Return the sum of a metric over a batch, and its divisor."""
    with autocast():
        value = metric(model, batch)
    pair = value if isinstance(value, tuple) else (value, 1)
    if len(pair) != 2 or not all(map(_is_number, pair)):  # noqa: PLR2004
        raise UsageError(
            f"The metric {name!r} returned {value!r}. It must return a mean, as a number or a tensor of one "
            "element, or a pair: the sum and its divisor."
        )
    if isinstance(value, tuple):
        return _plain(value[0]), _plain(value[1])
    samples = _size(batch, size)
    return _plain(value) * samples, samples


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:  # not model.train(): frozen parts stay in evaluation mode
            part.training = training


def _is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, Real)


def _plain(value: Any) -> Any:
    """Return a number, or a tensor that loses no digits in a sum; it stays on its device."""
    return value.detach().double() if isinstance(value, torch.Tensor) else value


def _size(batch: Any, size: Callable[[Any], int]) -> int:
    try:
        return size(batch)
    except AmbiguousBatchError:
        raise
    except UsageError:
        return 1
