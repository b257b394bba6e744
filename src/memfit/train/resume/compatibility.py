"""Whether a saved run can go on in an engine: asked before anything is changed."""

import warnings
from typing import TYPE_CHECKING, Any

import torch

from memfit.errors import UsageError
from memfit.strategies.mechanisms.module_patterns import unwrapped
from memfit.train.resume.state_names import class_of, groups, named, others, precision_of, steps_of

if TYPE_CHECKING:
    from memfit.train.engine import Engine
    from memfit.train.resume.saved_run import Saved


def check_suits(engine: "Engine", state: "Saved") -> None:
    """Refuse what cannot go on.

    Raises:
        UsageError: model, optimizer, scheduler are not those that were saved; or the state is of the inside
            of a window, which another precision or accumulation cannot end.
    """
    model = unwrapped(engine.model).state_dict()
    _check_shapes(model, state["model"])
    for what, here, there in (
        ("optimizer", class_of(engine.optimizer), state["optimizer_class"]),
        ("scheduler", engine.scheduler and class_of(engine.scheduler), state["scheduler_class"]),
    ):
        if here != there:
            raise UsageError(
                f"Cannot resume: the state is of {there or f'no {what}'}, and the {what} here is "
                f"{here or 'none'}, which keeps another. Go on with that, or load the model alone."
            )
    _check_groups(groups(engine), state["groups"])
    _check_shapes(others(engine), state["others"])
    _check_callbacks(engine, state)
    _check_scheduler(engine, state)
    if not 0 <= state["position"]["carried"] <= state["steps"]:
        raise UsageError("Cannot resume: more micro-batches are carried over than a window has.")
    if state["window"] is not None:
        _check_inside(engine, state)


def _check_shapes(here: dict[str, Any], there: dict[str, Any]) -> None:
    for name, value in here.items():
        if name not in there:
            raise UsageError(f"Cannot resume: the model has {name!r}, and the saved one has not.")
        saved = there[name]
        if isinstance(value, torch.Tensor) != isinstance(saved, torch.Tensor) or (
            isinstance(value, torch.Tensor) and not _is_alike(value, saved)
        ):
            raise UsageError(
                f"Cannot resume: {name!r} is of another shape or kind in the model than in the saved one."
            )
    extra = next((name for name in there if name not in here), None)
    if extra is not None:
        raise UsageError(f"Cannot resume: the saved model has {extra!r}, and the model has not.")


def _is_alike(one: torch.Tensor, saved: torch.Tensor) -> bool:
    kinds = [(each.layout, each.is_complex(), each.is_floating_point()) for each in (one, saved)]
    return one.shape == saved.shape and kinds[0] == kinds[1] and not saved.is_meta


def _check_groups(here: list[list[str]], there: list[list[str]]) -> None:
    """Check order too: an optimizer knows its state by the places of parameters, and not by their names."""
    if [len(group) for group in here] != [len(group) for group in there]:
        raise UsageError(
            f"Cannot resume: the optimizer has parameter groups of {[len(group) for group in here]} "
            f"parameters, and the saved one of {[len(group) for group in there]}."
        )
    for number, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        for left, right in zip(ours, theirs, strict=True):
            if left != right:
                raise UsageError(
                    f"Cannot resume: parameter group {number} has {left!r} where the saved one has {right!r}."
                )


def _check_callbacks(engine: "Engine", state: "Saved") -> None:
    here = [type(callback).__name__ for callback in engine.callbacks]
    for name, kept in state["callbacks"]:
        if name in here:
            here.remove(name)
        elif kept:
            warnings.warn(
                f"The state has that of a callback {name}, which this engine has not: it is left out.",
                stacklevel=6,
            )


def _check_scheduler(engine: "Engine", state: "Saved") -> None:
    """Refuse what is none of a scheduler's own: ``load_state_dict`` takes all that it is given."""
    own = {} if engine.scheduler is None else engine.scheduler.state_dict()
    extra = (state["scheduler"] or {}).keys() - own.keys()
    if extra:
        raise UsageError(f"Cannot resume: the saved scheduler has {sorted(extra)}, and this one has not.")


def _check_inside(engine: "Engine", state: "Saved") -> None:
    steps = steps_of(engine)
    if state["steps"] != steps:
        raise UsageError(
            f"Cannot resume: the state was saved inside a window of {state['steps']} micro-batches, and here "
            f"they are {steps}. Go on with {state['steps']}, or from a state that was saved between windows."
        )
    here = precision_of(engine)
    other = [f"{name} {there!r}" for name, there in state["precision"].items() if here.get(name) != there]
    if not engine._accounts.update.scaler.would_go_on(state["scaler"]):
        other.append("a loss that was scaled otherwise")
    if other:
        raise UsageError(
            f"Cannot resume: the state was saved inside a window with {', '.join(other)}. Go on with its "
            "precision, or from a state that was saved between windows."
        )
    parameters = named(engine)
    for name, gradient in state["gradients"].items():
        if name not in parameters or gradient.shape != parameters[name].shape:
            raise UsageError(f"Cannot resume: the gradient of {name!r} belongs to no parameter here.")
