"""Whether a model computes each sample by itself: some samples of a batch, together and in two halves.

    first call                            the first two samples; 0.5 stands for random numbers
    calls 1 to 4, 10, and each 100th      as many other samples as a slice has, and other constants

Their outputs show along which dimension samples lie, and how the model's loss, if there is one, weighs them.
Nothing is kept for a backward, and the generators are restored: the step that follows is as it would be.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import chain
from math import inf, sqrt
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import TreeSpec, tree_flatten

from memfit.card.detect_card import is_ghost_loaded
from memfit.errors import MemfitError, UsageError
from memfit.random_state import DrawnRandomNumbers
from memfit.strategies.mechanisms.constant_draws import ConstantDraws, seed_shuffles
from memfit.strategies.mechanisms.forward_side_effects import ADVICE, SideEffects
from memfit.strategies.mechanisms.in_place_gradient_accumulation import autocast_dtype, autocast_to
from memfit.strategies.mechanisms.inspect_tensors import leaves_beside, tensors_in_object
from memfit.strategies.mechanisms.join_outputs import DIM_ADVICE, OutputLayouts, SamplesInOutput
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
_CHUNK = 1 << 22
"""Numbers that are compared at a time: what that takes is less than the outputs themselves."""
_FIRST, _EVERY = (1, 2, 3, 4, 10), 100


def is_checked_again(number: int) -> bool:
    """Return whether a call is one of those, counted from 1, that are looked at more closely.

    >>> [number for number in range(1, 250) if is_checked_again(number)]
    [1, 2, 3, 4, 10, 100, 200]
    """
    return number in _FIRST or number % _EVERY == 0


def expect_independent_layers(module: nn.Module) -> None:
    """Refuse layers whose results depend on the other samples of the batch."""
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and (part.training or not part.track_running_stats):
            raise UsageError(
                f"batch_slices: {name or 'the model'} is a {type(part).__name__} in training mode, and its "
                "statistics would be those of a slice, not of the batch. Use GroupNorm or LayerNorm, freeze "
                "the statistics (module.eval()), or leave out batch_slices."
            )


def learn_outputs(
    module: nn.Module,
    calls: Sequence[tuple[Callable[[], Any], int]],
    inputs: Sequence[torch.Tensor],
    passed: Sequence[Any],
    layouts: OutputLayouts,
    draws: ConstantDraws,
    known: LossRule | None,
) -> tuple[LossRule | None, list[float]]:
    """Learn what a model returns, and check that it does not combine samples.

    Args:
        module: the model.
        calls: its forward on some samples, on their first half and on their second; and how many these are.
        inputs: the arguments that require a gradient.
        passed: the arguments that every slice gets as they are.
        layouts: completed.
        draws: what stands for random numbers; nothing on the ghost, where numbers are unknown.
        known: how the loss is made, if other samples have shown that.

    Returns:
        How the loss of a batch is made of those of slices, None if the model returns no loss; and the numbers
        that must be the same for every slice: those that it returns, and those that multiply its loss.

    Raises:
        UsageError: the batches of this model cannot be divided.
    """
    aliases = leaf_aliases(module) if can_be_replaced(module) else {}
    kind = next((each.device.type for each in module.parameters()), "cpu")
    effects, half = SideEffects(module), calls[-1][1]
    generators = (torch.default_generator, *draws.own)
    with autocast_to(kind, lower := autocast_dtype(kind), cache=False), parameters_replaced(module, aliases):
        with effects, nullcontext() if is_ghost_loaded() else draws:
            outputs, numbers = [], []
            for call, _ in calls:
                with DrawnRandomNumbers.start(generators).replay(), numbers_of_forward() as computed:
                    seed_shuffles()
                    outputs.append(_flat_output(call, draws.own))
                effects.called()
                numbers += [computed.found] if computed else []
        effects.expect_none()
        leaves = [*aliases.values(), *inputs] if aliases else []
        rule = _rule(outputs, leaves, passed, numbers, known)
        _place(outputs, layouts, half)
        if not is_ghost_loaded():
            _expect_equal_values(outputs, layouts, rule, kind, lower, half, numbers[1:])
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
    leaves: list[torch.Tensor],
    passed: Sequence[Any],
    numbers_of_calls: Sequence[Any],
    known: LossRule | None,
) -> LossRule | None:
    """Return how losses are divided."""
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
        rule = known or LossRule(losses[0], losses[1:], passed, numbers_of_calls)
    return rule


def _place(outputs: Sequence[_Flat], layouts: OutputLayouts, half: int) -> None:
    """Add to the layouts where the samples of outputs are."""
    (pair, spec), *single = outputs
    place = place_of_loss(pair)
    found = tuple(
        layouts.place(one, two, half, 2 * half) if isinstance(one, torch.Tensor) and index != place else None
        for index, (one, two) in enumerate(zip(single[0][0], pair, strict=True))
    )
    before = layouts.get(spec, found)  # by values, which may not tell this time
    is_same = [each and each.dim for each in before] == [each and each.dim for each in found]
    layouts[spec] = before if is_same else found


class ModelFailsError(UsageError):
    """A model's forward fails for a part of a batch."""


def _flat_output(call: Callable[[], Any], own: Iterable[Any]) -> _Flat:
    try:
        leaves, spec = tree_flatten(without_saving(call, own))
    except (MemfitError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelFailsError(
            f"batch_slices: the model fails for a part of the batch ({type(error).__name__}: {error}). "
            f"{ADVICE}"
        ) from error
    for each in leaves:
        if not isinstance(each, torch.Tensor) and tensors_in_object(each):
            raise UsageError(
                f"batch_slices: the model returns an object of type {type(each).__name__}, and memfit cannot "
                "join the tensors that it holds. Return tensors in tuples or dicts, or register a dataclass "
                "with torch.utils._pytree.register_dataclass. In transformers, pass "
                "use_cache=False to the model."
            )
    return leaves, spec


def without_saving(call: Callable[[], Any], own: Iterable[Any]) -> Any:
    """Return what a forward returns whose operations save no tensors for a backward, which will not come.

    A forward that needs them, as it differentiates, runs again, draws the same, and saves what it needs.
    """
    drawn, steps = DrawnRandomNumbers.start((torch.default_generator, *own)), ["runs"]

    def unpacked(saved: torch.Tensor) -> torch.Tensor:
        if steps == ["runs"]:
            steps.append("differentiates")
            raise AssertionError("only the shape of what an operation saves is kept")
        return saved  # to one who reads the graph of a loss

    try:
        with torch.autograd.graph.saved_tensors_hooks(_shape_alone, unpacked):
            output = call()
    except AssertionError:
        if steps == ["runs"]:
            raise
    finally:
        steps.append("ended")
    if "differentiates" in steps:
        drawn.rewind()
        output = call()
    return output


def _shape_alone(saved: torch.Tensor) -> torch.Tensor:
    """Return something of a tensor's shape, and of no size; the number if it is one.

    Not the tensor itself: an operation would hold its own result then, for good.
    """
    return saved.detach() if saved.numel() <= 1 else saved.new_empty(()).expand(saved.shape)


def _expect_equal_values(
    outputs: Sequence[_Flat],
    layouts: OutputLayouts,
    rule: LossRule | None,
    kind: str,
    lower: Any,
    half: int,
    numbers: Sequence[Any],
) -> None:
    tolerance = _LOW_TOLERANCE if lower is not None else _TOLERANCE if kind == "cpu" else _GPU_TOLERANCE
    (pair, spec), *single = outputs
    known = [*layouts[spec]]
    for index, place in enumerate(known):
        whole, parts = pair[index], [leaves[index] for leaves, _ in single]
        if not isinstance(whole, torch.Tensor):
            continue
        is_low = whole.is_floating_point() and whole.dtype not in (torch.float32, torch.float64)
        low = _LOW_TOLERANCE if is_low else tolerance
        if place is not None:
            off = _difference(place.pairs(whole, parts, half))
            other = SamplesInOutput(place.dim, not place.alternate)
            if off > low and _difference(other.pairs(whole, parts, half)) <= low:
                known[index], off = other, 0.0
        elif rule is not None and whole.requires_grad and not whole.dim():
            off = _difference([(rule.joined(parts, numbers), whole)])
        else:
            continue
        if off > low:
            extent = "in which numbers are infinite or NaN" if off == inf else f"by {100 * off:.3g} %"
            many, one = (f"{2 * half} samples", "half of them") if half > 1 else ("two samples", "alone")
            raise UsageError(
                f"batch_slices: the model combines samples with each other: what it returns for {many} "
                f"of the batch differs from what it returns for each {one}, {extent}. "
                f"If samples do not lie along dimension 0 of its inputs, {DIM_ADVICE}; if the forward draws "
                "from NumPy's or Python's generator, draw from PyTorch's; otherwise, leave out batch_slices."
            )
    layouts[spec] = tuple(known)


def _difference(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return by how much outputs differ, relative to the norm of the second; of integers, how many."""
    apart = size = 0.0
    exact = False
    with torch.no_grad():
        for one, whole in chain.from_iterable(map(_chunks, pairs)):
            if exact := not (whole.is_floating_point() or whole.is_complex()):
                apart, size = apart + float((one != whole).sum()), size + whole.numel()
                continue
            finite = whole.isfinite()
            if not torch.equal(one.isfinite(), finite):
                return inf
            off, of = ((one - whole)[finite].abs(), whole[finite].abs())
            apart += float(off.double().square().sum())
            size += float(of.double().square().sum())
    if not apart:
        return 0.0
    ratio = apart / size if size else inf
    return ratio if exact else sqrt(ratio)


def _chunks(pair: tuple[torch.Tensor, torch.Tensor]) -> Iterable[Any]:
    return zip(*(each.flatten().split(_CHUNK) for each in pair), strict=True)  # type: ignore[no-untyped-call]


def place_of_loss(leaves: Sequence[Any]) -> int | None:
    """Return which of a model's outputs is its loss; None if none is."""
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
