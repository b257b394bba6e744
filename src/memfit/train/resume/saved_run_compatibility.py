"""Check that a saved run suits an engine, before anything is changed."""

from typing import Any

import torch

from memfit.errors import UsageError
from memfit.recording.optimizer_accessors import local_optimizer
from memfit.train.resume.saved_engine_parts import (
    EngineParts,
    class_name_with_module,
    gradient_precision_of,
    model_without_wrappers,
    named_model_and_optimizer_parameters,
    parameter_names_by_group,
    tensors_outside_state_dict,
)
from memfit.train.resume.saved_run_format import SavedRun
from memfit.user_lines import warn_user


def check_run_suits_engine(parts: EngineParts, state: SavedRun) -> None:
    """Refuse a saved run that cannot resume in an engine."""
    model = model_without_wrappers(parts).state_dict()
    check_saved_shapes(model, state["model"])
    _expect_values(state["model"])
    for what, here, there in (
        ("optimizer", class_name_with_module(local_optimizer(parts.optimizer)), state["optimizer_class"]),
        ("scheduler", parts.scheduler and class_name_with_module(parts.scheduler), state["scheduler_class"]),
    ):
        if here != there:
            raise UsageError(
                f"Cannot resume: the saved run used {there or f'no {what}'}, but this engine uses "
                f"{here or f'no {what}'}. Use the same {what} as in the saved run, or load only the model's "
                "state."
            )
    check_parameter_groups(parameter_names_by_group(parts), state["groups"])
    check_saved_shapes(tensors_outside_state_dict(parts), state["others"])
    _expect_values(state["others"])
    _check_callbacks(parts, state)
    _check_scheduler(parts, state)
    if not 0 <= state["position"]["carried"] <= state["steps"]:
        raise UsageError(
            f"Cannot resume: the state is damaged. It holds {state['position']['carried']} "
            "micro-batches carried over from one epoch to the next, but an accumulation window consists "
            f"of only {state['steps']} micro-batches."
        )
    if state["window"] is not None:
        _check_inside(parts, state)


def check_no_open_window(saved: dict[str, Any], there: int, here: int) -> None:
    """Refuse to continue a window on another number of ranks, whose batches and gradients are others."""
    if saved["window"] is not None:
        raise UsageError(
            f"Cannot resume: the state was saved inside an accumulation window, on {there} "
            f"rank{'s' * (there != 1)}, but this job has {here}. Resume on {there}, or from a state saved "
            "between windows."
        )


def check_saved_shapes(here: dict[str, Any], there: dict[str, Any]) -> None:
    """Refuse saved tensors and values that are not those of a model, by name, kind and shape."""
    for name, value in here.items():
        if name not in there:
            raise UsageError(f"Cannot resume: this model has {name!r}, which the saved model lacks.")
        saved = there[name]
        if isinstance(value, torch.Tensor) != isinstance(saved, torch.Tensor) or (
            isinstance(value, torch.Tensor) and not _is_alike(value, saved)
        ):
            raise UsageError(
                f"Cannot resume: {name!r} is {_described(value)} in this model, but "
                f"{_described(saved)} in the saved model."
            )
    extra = next((name for name in there if name not in here), None)
    if extra is not None:
        raise UsageError(f"Cannot resume: the saved model has {extra!r}, which this model lacks.")


def _expect_values(saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise UsageError(f"Cannot resume: the saved {name!r} is {_described(value)} without values.")


def _is_alike(one: torch.Tensor, saved: torch.Tensor) -> bool:
    kinds = [(each.layout, each.is_complex(), each.is_floating_point()) for each in (one, saved)]
    return one.shape == saved.shape and kinds[0] == kinds[1]


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"of type {type(value).__name__}"
    kind = f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    layout = "" if value.layout is torch.strided else f" and layout {value.layout}"
    return f"{kind}{layout}"


def check_parameter_groups(here: list[list[str]], there: list[list[str]]) -> None:
    """Refuse other parameter groups.

    Their order counts too: an optimizer's state refers to parameters by index, not by name.
    """
    if [len(group) for group in here] != [len(group) for group in there]:
        raise UsageError(
            f"Cannot resume: this optimizer's parameter groups have {[len(group) for group in here]} "
            f"parameters, but those of the saved optimizer have {[len(group) for group in there]}."
        )
    for number, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        for left, right in zip(ours, theirs, strict=True):
            if left != right:
                raise UsageError(
                    f"Cannot resume: parameter group {number} of this optimizer has the parameter {left!r}, "
                    f"but the same group of the saved optimizer has {right!r} in its place."
                )


def _check_callbacks(parts: EngineParts, state: SavedRun) -> None:
    here = [type(callback).__name__ for callback in parts.callbacks]
    for name, kept in state["callbacks"]:
        if name in here:
            here.remove(name)
        elif kept:
            warn_user(
                f"The saved run had a callback {name} with a state of its own. This engine has no "
                f"callback {name}, so that state is ignored.",
            )


def _check_scheduler(parts: EngineParts, state: SavedRun) -> None:
    """Refuse entries that the scheduler does not have: its ``load_state_dict`` accepts anything."""
    own = {} if parts.scheduler is None else parts.scheduler.state_dict()
    extra = (state["scheduler"] or {}).keys() - own.keys()
    if extra:
        raise UsageError(
            "Cannot resume: the state of the saved scheduler has "
            f"{', '.join(map(repr, sorted(extra)))}, which this scheduler lacks."
        )
    here, there = str(parts.ledger.update.schedule), state.get("schedule")
    if there not in (None, here):
        raise UsageError(
            f"Cannot resume: the saved run's scheduler steps {there}, but this engine's steps {here}. Set "
            "the scheduler_interval or scheduler_metric of the saved run."
        )


def _check_inside(parts: EngineParts, state: SavedRun) -> None:
    steps = parts.steps
    if state["steps"] != steps:
        raise UsageError(
            f"Cannot resume: the state was saved inside an accumulation window of {state['steps']} "
            f"micro-batches, but this engine's windows have {steps} micro-batch{'es' * (steps != 1)}. Set "
            f"batches_per_update={state['steps']}, or resume from a state saved between windows."
        )
    here = gradient_precision_of(parts)
    other = [
        f"{name}={there!r}, here {here.get(name)!r}"
        for name, there in state["precision"].items()
        if here.get(name) != there
    ]
    if not parts.ledger.update.scaler.can_resume(state["scaler"]):
        other.append("the loss scale differs")
    if other:
        raise UsageError(
            "Cannot resume: the state was saved inside an accumulation window, and the precision has "
            f"changed since ({'; '.join(other)}). Use the precision of the saved run, or resume from a state "
            "saved between windows."
        )
    parameters = named_model_and_optimizer_parameters(parts)
    for name, gradient in state["gradients"].items():
        if name not in parameters or gradient.shape != parameters[name].shape:
            raise UsageError(
                "Cannot resume: no parameter of this engine has the name and the shape of the saved "
                f"gradient {name!r}."
            )
