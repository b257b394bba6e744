"""Whether a model computes each sample by itself: two samples of the first batch, together and each alone.

Their outputs show along which dimension samples lie, and how the model's loss, if there is one, weighs them.
Nothing is kept for a backward. Constants stand for random numbers, and the generators are restored: the step
that follows is as it would be.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import TreeSpec, tree_flatten

from memfit.card.detect_card import is_ghost_loaded
from memfit.errors import MemfitError, UsageError
from memfit.random_state import DrawnRandomNumbers
from memfit.strategies.mechanisms.buffer_snapshots import own_generators
from memfit.strategies.mechanisms.constant_draws import ConstantDraws, seed_shuffles
from memfit.strategies.mechanisms.forward_side_effects import ADVICE, SideEffects
from memfit.strategies.mechanisms.in_place_gradient_accumulation import autocast_dtype, autocast_to
from memfit.strategies.mechanisms.inspect_tensors import leaves_beside, tensors_in_object
from memfit.strategies.mechanisms.join_outputs import OutputLayouts, SamplesInOutput
from memfit.strategies.mechanisms.loss_divisor import LossRule
from memfit.strategies.mechanisms.numbers_of_forward import numbers_of_forward
from memfit.strategies.mechanisms.slice_parameters import (
    can_be_replaced,
    leaf_aliases,
    parameters_replaced,
)

_TOLERANCE, _GPU_TOLERANCE, _LOW_TOLERANCE = 1e-4, 1e-2, 1e-1
"""Of the norm: kernels for another number of samples round differently; a GPU's may compute in TF32, and half
precision rounds even more."""


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


def learn_outputs(
    module: nn.Module,
    calls: Sequence[Callable[[], Any]],
    inputs: Sequence[torch.Tensor],
    passed: Sequence[Any],
    layouts: OutputLayouts,
) -> tuple[LossRule | None, list[float]]:
    """Learn what a model returns, and check that it does not combine samples.

    Args:
        module: the model.
        calls: its forward on two samples, on the first and on the second.
        inputs: the arguments that require a gradient.
        passed: the arguments that every slice gets as they are.
        layouts: completed.

    Returns:
        How the loss of a batch is made of those of slices, None if the model returns no loss; and the numbers
        that must be the same for every slice: those that it returns, and those that multiply its loss.

    Raises:
        UsageError: the batches of this model cannot be divided.
    """
    aliases = leaf_aliases(module) if can_be_replaced(module) else {}
    kind = next((each.device.type for each in module.parameters()), "cpu")
    effects, own = SideEffects(module), own_generators(module)
    generators = (torch.default_generator, *own)
    with autocast_to(kind, lower := autocast_dtype(kind), cache=False), parameters_replaced(module, aliases):
        with effects, nullcontext() if is_ghost_loaded() else ConstantDraws(own):
            outputs, numbers = [], []
            for call in calls:
                with DrawnRandomNumbers.start(generators).replay(), numbers_of_forward() as computed:
                    seed_shuffles()
                    outputs.append(_flat_output(call))
                effects.called()
                numbers += [computed.found] if computed else []
        effects.expect_none()
        rule = _rule(outputs, layouts, [*aliases.values(), *inputs] if aliases else [], passed, numbers)
        if not is_ghost_loaded():
            _expect_equal_values(outputs, layouts, rule, kind, lower)
        leaves = outputs[0][0]
        same = numbers_among(leaves)
        if rule is not None and (place := place_of_loss(leaves)) is not None:
            same += rule.python_numbers(leaves[place])
        del outputs, leaves, numbers, computed
    effects.expect_nothing_kept()
    return rule, same


def numbers_among(leaves: Sequence[Any]) -> list[float]:
    """Return the numbers that a model returns beside tensors."""
    return [each for each in leaves if isinstance(each, int | float)]


_Flat = tuple[list[Any], TreeSpec]
"""What a model returns: its leaves, and the containers that hold them."""


def _rule(
    outputs: Sequence[_Flat],
    layouts: OutputLayouts,
    leaves: list[torch.Tensor],
    passed: Sequence[Any],
    numbers_of_calls: Sequence[Any],
) -> LossRule | None:
    """Return how losses are divided, and add to the layouts where the samples of outputs are."""
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
    for one, two in zip(single[0][0], pair, strict=True):
        if isinstance(one, torch.Tensor) and one is two and one.requires_grad:
            raise UsageError(
                f"batch_slices: the model returns one of its parameters ({' x '.join(map(str, one.shape))}), "
                f"which has no row for each sample. Read it from the model in the training loop. {ADVICE}"
            )
    for one, other in zip(single[0][0], single[1][0], strict=True):
        if isinstance(one, torch.Tensor) and one.shape != other.shape:
            shapes = " and ".join(f"({' x '.join(map(str, each.shape))})" for each in (one, other))
            raise UsageError(
                f"batch_slices: the model returns tensors of other sizes for two samples: {shapes}. Return "
                f"as much for each: pad_packed_sequence has total_length for that. {ADVICE}"
            )
    rule = None
    if (place := place_of_loss(pair)) is not None:
        losses = [each[place] for each, _ in outputs]
        made_before = {id(each) for each in leaves_beside(losses[1], leaves)}  # not in each call anew
        for leaf in leaves_beside(losses[0], leaves) if leaves else ():
            if id(leaf) not in made_before:
                continue
            raise UsageError(
                "batch_slices: the model returns its loss, which depends on a tensor that requires a "
                f"gradient ({tuple(leaf.shape)}) and is neither a parameter nor an argument of the "
                f"model. Register it as a parameter. {ADVICE}"
            )
        rule = LossRule(losses[0], losses[1:], passed, numbers_of_calls)
    layouts[spec] = tuple(
        layouts.place(one, two, 1, 2) if isinstance(one, torch.Tensor) and index != place else None
        for index, (one, two) in enumerate(zip(single[0][0], pair, strict=True))
    )
    return rule


def _flat_output(call: Callable[[], Any]) -> _Flat:
    try:
        with keeping_shapes_alone():
            leaves, spec = tree_flatten(call())
    except (MemfitError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UsageError(
            "batch_slices: the model fails for one or two samples of the batch "
            f"({type(error).__name__}: {error}). {ADVICE}"
        ) from error
    for each in leaves:
        if not isinstance(each, torch.Tensor) and tensors_in_object(each):
            raise UsageError(
                f"batch_slices: the model returns an object of type {type(each).__name__}, and memfit cannot "
                "join the tensors that it holds. Return tensors in tuples or dicts, or register a dataclass "
                "with torch.utils._pytree.register_dataclass. In transformers, set "
                "model.config.use_cache = False."
            )
    return leaves, spec


def keeping_shapes_alone() -> AbstractContextManager[Any]:
    """Return a context whose operations save no tensors for a backward, which will not come."""
    return torch.autograd.graph.saved_tensors_hooks(_shape_alone, lambda each: each)


def _shape_alone(saved: torch.Tensor) -> torch.Tensor:
    """Return something of a tensor's shape, and of no size; the number if it is one.

    Not the tensor itself: an operation would hold its own result then, for good.
    """
    return saved.detach() if saved.numel() <= 1 else saved.new_empty(()).expand(saved.shape)


def _expect_equal_values(
    outputs: Sequence[_Flat], layouts: OutputLayouts, rule: LossRule | None, kind: str, lower: Any
) -> None:
    tolerance = _LOW_TOLERANCE if lower is not None else _TOLERANCE if kind == "cpu" else _GPU_TOLERANCE
    (pair, spec), *single = outputs
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
            extent = "in where it is finite" if off == inf else f"by {off:.0%}"
            raise UsageError(
                "batch_slices: the model combines samples with each other: what it returns for two samples "
                f"of the batch differs from what it returns for each alone, {extent}. "
                "If samples do not lie along dimension 0 of its inputs, pass dim=...; otherwise, leave out "
                "batch_slices."
            )
    layouts[spec] = tuple(known)


def _difference(joined: torch.Tensor, whole: torch.Tensor) -> float:
    """Return by how much two outputs differ, relative to the norm of the second; without what is infinite."""
    with torch.no_grad():
        finite = whole.isfinite()
        if not torch.equal(joined.isfinite(), finite):
            return inf
        off, size = (each.double().norm() for each in ((joined - whole)[finite], whole[finite]))
    return float(off / size) if off else 0.0


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
