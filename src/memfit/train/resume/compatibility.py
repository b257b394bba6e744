"""Check that a saved run suits an engine, before anything is changed."""

import warnings
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.strategies.mechanisms.module_patterns import unwrapped
from memfit.train.resume.engine_parts import (
    EngineParts,
    class_path,
    named_parameters,
    parameter_groups,
    precision_of,
    tensors_outside_state_dict,
)
from memfit.train.resume.saved_run import SavedRun


def check_compatible(parts: EngineParts, state: SavedRun) -> None:
    """Refuse a saved run that cannot resume in an engine.

    Raises:
        UsageError: model, optimizer or scheduler differ from those saved; or the state was saved inside a
            window, which another precision or accumulation cannot complete.
    """
    model = unwrapped(parts.model).state_dict()
    _check_shapes(model, state["model"])
    for what, here, there in (
        ("optimizer", class_path(parts.optimizer), state["optimizer_class"]),
        ("scheduler", parts.scheduler and class_path(parts.scheduler), state["scheduler_class"]),
    ):
        if here != there:
            raise UsageError(
                f"Cannot resume: the {what} was {there or 'none'} when the state was saved, and is "
                f"{here or 'none'} here. Use the former one, or load only the model's state."
            )
    _check_groups(parameter_groups(parts), state["groups"])
    _check_shapes(tensors_outside_state_dict(parts), state["others"])
    _check_callbacks(parts, state)
    _check_scheduler(parts, state)
    if not 0 <= state["position"]["carried"] <= state["steps"]:
        raise UsageError(
            f"Cannot resume: the state carries over {state['position']['carried']} micro-batches, more than "
            f"the {state['steps']} of its window."
        )
    if state["window"] is not None:
        _check_inside(parts, state)


def _check_shapes(here: dict[str, Any], there: dict[str, Any]) -> None:
    for name, value in here.items():
        if name not in there:
            raise UsageError(f"Cannot resume: the model has {name!r}, which the saved model lacks.")
        saved = there[name]
        if isinstance(value, torch.Tensor) != isinstance(saved, torch.Tensor) or (
            isinstance(value, torch.Tensor) and not _is_alike(value, saved)
        ):
            raise UsageError(
                f"Cannot resume: {name!r} has another shape or type in the model than in the saved one."
            )
    extra = next((name for name in there if name not in here), None)
    if extra is not None:
        raise UsageError(f"Cannot resume: the saved model has {extra!r}, which this model lacks.")


def _is_alike(one: torch.Tensor, saved: torch.Tensor) -> bool:
    kinds = [(each.layout, each.is_complex(), each.is_floating_point()) for each in (one, saved)]
    return one.shape == saved.shape and kinds[0] == kinds[1] and not saved.is_meta


def _check_groups(here: list[list[str]], there: list[list[str]]) -> None:
    """Check the order too: an optimizer's state refers to parameters by index, not by name."""
    if [len(group) for group in here] != [len(group) for group in there]:
        raise UsageError(
            f"Cannot resume: the optimizer's parameter groups have {[len(group) for group in here]} "
            f"parameters, and those of the saved one {[len(group) for group in there]}."
        )
    for number, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        for left, right in zip(ours, theirs, strict=True):
            if left != right:
                raise UsageError(
                    f"Cannot resume: parameter group {number} has {left!r} where the saved one has {right!r}."
                )


def _check_callbacks(parts: EngineParts, state: SavedRun) -> None:
    here = [type(callback).__name__ for callback in parts.callbacks]
    for name, kept in state["callbacks"]:
        if name in here:
            here.remove(name)
        elif kept:
            warnings.warn(
                f"The saved state has that of a callback {name}, which this engine lacks: it is ignored.",
                stacklevel=6,
            )


def _check_scheduler(parts: EngineParts, state: SavedRun) -> None:
    """Refuse entries that the scheduler does not have: its ``load_state_dict`` accepts anything."""
    own = {} if parts.scheduler is None else parts.scheduler.state_dict()
    extra = (state["scheduler"] or {}).keys() - own.keys()
    if extra:
        raise UsageError(f"Cannot resume: the saved scheduler has {sorted(extra)}, which this one lacks.")


def _check_inside(parts: EngineParts, state: SavedRun) -> None:
    steps = parts.steps
    if state["steps"] != steps:
        raise UsageError(
            f"Cannot resume: the state was saved inside a window of {state['steps']} micro-batches, and "
            f"windows have {steps} here. Use {state['steps']}, or resume from a state saved between windows."
        )
    here = precision_of(parts)
    other = [f"{name} {there!r}" for name, there in state["precision"].items() if here.get(name) != there]
    if not parts.ledger.update.scaler.can_resume(state["scaler"]):
        other.append("another loss scale")
    if other:
        raise UsageError(
            f"Cannot resume: the state was saved inside a window with {', '.join(other)}. Use the same "
            "precision, or resume from a state saved between windows."
        )
    parameters = named_parameters(parts)
    for name, gradient in state["gradients"].items():
        if name not in parameters or gradient.shape != parameters[name].shape:
            raise UsageError(
                f"Cannot resume: the saved gradient of {name!r} matches no parameter of this engine."
            )
