"""Whether a model computes each sample by itself: two samples of the first batch, together and each alone.

Their outputs show along which dimension samples lie, and how the model's loss, if there is one, weighs them.
Nothing is kept for a backward, and random numbers are drawn again afterwards: the step that follows is as it
would be.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import TreeSpec, tree_flatten

from memfit.card.detect_card import is_ghost_loaded
from memfit.errors import MemfitError, UsageError
from memfit.random_state import DrawnRandomNumbers
from memfit.strategies.mechanisms.in_place_gradient_accumulation import autocast_dtype, autocast_to
from memfit.strategies.mechanisms.inspect_tensors import leaf_beside, tensor_version, tensors_in_object
from memfit.strategies.mechanisms.join_outputs import OutputLayouts, SamplesInOutput
from memfit.strategies.mechanisms.loss_divisor import LossRule
from memfit.strategies.mechanisms.slice_parameters import (
    can_be_replaced,
    leaf_aliases,
    parameters_replaced,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")
ADVICE = "Leave out batch_slices, or divide batches in the training loop."
_TOLERANCE, _LOW_TOLERANCE = 1e-2, 1e-1
"""Of the norm: kernels for another number of samples round differently, in half precision even more."""


def expect_independent_layers(module: nn.Module) -> None:
    """Refuse layers whose results depend on the other samples of the batch.

    Raises:
        UsageError: there is one.
    """
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and (part.training or not part.track_running_stats):
            raise UsageError(
                f"batch_slices: {name or 'the model'} is a {type(part).__name__} in training mode, and its "
                "statistics would be those of a slice, not of the batch. Use GroupNorm or LayerNorm, freeze "
                "the statistics (module.eval()), or leave out batch_slices."
            )


def _expecting_nothing_kept(learn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have a function refuse a model of which a tensor is left when the function's own are gone."""

    @wraps(learn)
    def learning(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        begin = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        learned = learn(*args, **kwargs)
        _expect_nothing_kept(begin)
        return learned

    return learning


@_expecting_nothing_kept
def learn_outputs(
    module: nn.Module,
    calls: Sequence[Callable[[], Any]],
    inputs: Sequence[torch.Tensor],
    passed: Sequence[Any],
    layouts: OutputLayouts,
) -> LossRule | None:
    """Learn what a model returns, and check that it does not combine samples.

    Args:
        module: the model.
        calls: its forward on two samples, on the first and on the second.
        inputs: the arguments that require a gradient.
        passed: the arguments that every slice gets as they are.
        layouts: completed.

    Returns:
        How the loss of a batch is made of those of slices; None if the model returns no loss.

    Raises:
        UsageError: the batches of this model cannot be divided.
    """
    aliases = leaf_aliases(module) if can_be_replaced(module) else {}
    generators = (torch.default_generator,)
    kind = next((each.device.type for each in module.parameters()), "cpu")
    with (
        DrawnRandomNumbers.start(generators).replay(),
        autocast_to(kind, lower := autocast_dtype(kind), cache=False),
        parameters_replaced(module, aliases),
    ):
        before, draws = _state(module), DrawnRandomNumbers.start(generators)
        pair_outputs = _flat_outputs(calls[:1])
        before = _state(module) | before  # a first call may make what it keeps, such as a mask
        outputs = [*pair_outputs, *_flat_outputs(calls[1:])]
        _expect_same_state(before, _state(module))
        rule = None
        (pair, spec), *single = outputs
        if any(other != spec for _, other in single):
            raise UsageError(
                "batch_slices: the model returns differently built outputs for one and for two samples of a "
                f"batch. {ADVICE}"
            )
        numbers = [
            (one, two)
            for one, two in zip(single[0][0], pair, strict=True)
            if isinstance(one, int | float) and one != two
        ]
        if numbers:
            raise UsageError(
                f"batch_slices: the model returns a number that depends on the samples: {numbers[0][1]} for "
                f"two, {numbers[0][0]} for one. Each slice would return its own. Compute it outside of the "
                f"model, or return a tensor with a row for each sample. {ADVICE}"
            )
        if (place := place_of_loss(pair)) is not None:
            losses = [leaves[place] for leaves, _ in outputs]
            if aliases and (leaf := leaf_beside(losses[0], [*aliases.values(), *inputs])) is not None:
                raise UsageError(
                    "batch_slices: the model returns its loss, which depends on a tensor that requires a "
                    f"gradient ({tuple(leaf.shape)}) and is neither a parameter nor an argument of the "
                    f"model. Register it as a parameter. {ADVICE}"
                )
            rule = LossRule(losses[0], losses[1:], passed)
        layouts[spec] = tuple(
            layouts.place(one, two, 1, 2) if isinstance(one, torch.Tensor) and index != place else None
            for index, (one, two) in enumerate(zip(single[0][0], pair, strict=True))
        )
        draws.keep_drawn()
        if not is_ghost_loaded():
            if draws.before:
                with _evaluating(module):
                    draws = DrawnRandomNumbers.start(generators)
                    outputs = _flat_outputs(calls)
                    draws.keep_drawn()
            if not draws.before:
                _expect_equal_values(outputs, layouts, rule, _TOLERANCE if lower is None else _LOW_TOLERANCE)
    return rule


def _flat_outputs(calls: Sequence[Callable[[], Any]]) -> list[tuple[list[Any], TreeSpec]]:
    try:
        with keeping_shapes_alone():
            outputs = [tree_flatten(call()) for call in calls]
    except (MemfitError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UsageError(
            "batch_slices: the model fails for one or two samples of the batch "
            f"({type(error).__name__}: {error}). {ADVICE}"
        ) from error
    for each in outputs[0][0]:
        if not isinstance(each, torch.Tensor) and tensors_in_object(each):
            raise UsageError(
                f"batch_slices: the model returns an object of type {type(each).__name__}, and memfit cannot "
                "join the tensors that it holds. Return tensors in tuples or dicts, or register a dataclass "
                "with torch.utils._pytree.register_dataclass. In transformers, set "
                "model.config.use_cache = False."
            )
    return outputs


def keeping_shapes_alone() -> AbstractContextManager[Any]:
    """Return a context whose operations save no tensors for a backward, which will not come."""
    return torch.autograd.graph.saved_tensors_hooks(_shape_alone, lambda each: each)


def _shape_alone(saved: torch.Tensor) -> torch.Tensor:
    """Return something of a tensor's shape, and of no size; the number itself if it is one."""
    return saved if saved.numel() <= 1 else saved.new_empty(()).expand(saved.shape)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = [part for part in module.modules() if part.training]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True


def _expect_equal_values(
    outputs: Sequence[tuple[list[Any], Any]], layouts: OutputLayouts, rule: LossRule | None, tolerance: float
) -> None:
    (pair, spec), *single = outputs
    if spec not in layouts or any(other != spec for _, other in single):
        return  # in evaluation, the model returns something else
    known = [*layouts[spec]]
    for index, place in enumerate(known):
        whole, parts = pair[index], [leaves[index] for leaves, _ in single]
        if not isinstance(whole, torch.Tensor) or not whole.is_floating_point():
            continue
        low = tolerance if whole.dtype in (torch.float32, torch.float64) else _LOW_TOLERANCE
        if place is not None:
            off = _difference(place.joined(parts), whole)
            other = SamplesInOutput(place.dim, not place.alternate)
            if off > low and _difference(other.joined(parts), whole) <= low:
                known[index], off = other, 0.0
        elif rule is not None and whole.requires_grad and not whole.dim():
            off = _difference(rule.joined(parts), whole)
        else:
            continue
        if off > low:
            raise UsageError(
                "batch_slices: the model combines samples with each other: what it returns for two samples "
                f"of the batch differs from what it returns for each alone, by {off:.0%}. "
                "If samples do not lie along dimension 0 of its inputs, pass dim=...; otherwise, leave out "
                "batch_slices."
            )
    layouts[spec] = tuple(known)


def _difference(joined: torch.Tensor, whole: torch.Tensor) -> float:
    """Return by how much two outputs differ, relative to the norm of the second."""
    with torch.no_grad():
        off, size = (each.double().norm() for each in (joined - whole, whole))
    return float(off / size) if off else 0.0


_State = dict[str, tuple[torch.Tensor, int]]
"""Tensors by name, each with its version. They are held: another may get the identity of one that is gone."""


def _state(module: nn.Module) -> _State:
    """Return buffers, and tensors that are plain attributes."""
    return {
        f"{prefix}.{name}".lstrip("."): (value, tensor_version(value))
        for prefix, part in module.named_modules()
        for name, value in (*part._buffers.items(), *vars(part).items())
        if isinstance(value, torch.Tensor)
    }


def _expect_same_state(before: _State, after: _State) -> None:
    for name, (value, version) in after.items():
        was, version_before = before.get(name, (None, 0))
        if was is not value or version_before != version:
            raise UsageError(
                f"batch_slices: the model's forward changes its tensor {name!r}, and would change it "
                f"once in each slice. {ADVICE}"
            )


def _expect_nothing_kept(begin: int) -> None:
    """Refuse a model whose forward leaves a tensor behind, beside its outputs: a loss could use a slice's.

    Args:
        begin: autograd's count of operations before the forward. The outputs are gone.
    """
    end = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    if _with_graph(begin, end):
        gc.collect()
    if kept := _with_graph(begin, end):
        last = max(kept, key=lambda each: each.grad_fn._sequence_nr())
        name, shape = last.grad_fn.name(), " x ".join(map(str, last.shape)) or "one number"
        raise UsageError(
            f"batch_slices: the model's forward, or a hook on a layer, keeps a result of {name} ({shape} for "
            "one sample) beside what the model returns. A loss of it would be that of one slice. Return it "
            f"from the model's forward, or detach it. {ADVICE}"
        )


def _with_graph(begin: int, end: int) -> list[Any]:
    """Return the tensors that operations of an interval have computed, and that can be differentiated."""
    found = []
    for each in gc.get_objects():
        if type(each) is torch.Tensor:  # and no compiler's fake one
            with suppress(RuntimeError):  # autograd refuses to say it of some views that were written to
                if each.grad_fn is not None and begin <= each.grad_fn._sequence_nr() < end:
                    found.append(each)
    return found


def place_of_loss(leaves: Sequence[Any]) -> int | None:
    """Return which of a model's outputs is its loss; None if none is.

    Raises:
        UsageError: several may be.
    """
    found = [
        index
        for index, each in enumerate(leaves)
        if isinstance(each, torch.Tensor) and not each.dim() and each.requires_grad
    ]
    if len(found) > 1:
        raise UsageError(
            f"batch_slices: the model returns {len(found)} single numbers that the script may differentiate, "
            "and memfit divides batches only of a model that returns one loss, or none. Return the outputs, "
            "and compute the losses in the training loop."
        )
    return found[0] if found else None
