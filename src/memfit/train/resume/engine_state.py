"""What a run needs to go on: an engine's whole state, and going on from one.

Parameters are saved in float32 where the optimizer updates float32 copies of them, so that a run may go on in
another precision. What belongs to the loss scale is new where there was none.
"""

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memfit.errors import TornUpdateError, UsageError
from memfit.strategies.mechanisms.module_patterns import unwrapped
from memfit.strategies.mechanisms.optimizer_info import parameters_of
from memfit.train import master_weights
from memfit.train.oom_retry import copy_of, parts_of
from memfit.train.resume.compatibility import check_suits
from memfit.train.resume.saved_run import VERSION, checked
from memfit.train.resume.state_file import set_random_state
from memfit.train.resume.state_names import class_of, groups, named, others, precision_of, steps_of
from memfit.train.update import INTERRUPTED

if TYPE_CHECKING:
    from memfit.train.engine import Engine
    from memfit.train.resume.saved_run import Saved


def state_of(engine: "Engine") -> dict[str, Any]:
    """Return an engine's state, as tensors and plain values; tensors are the engine's own."""
    accounts = engine._accounts
    if accounts.update.torn:
        raise TornUpdateError(INTERRUPTED)
    window = accounts.window or engine._resumed  # the latter waits for its data
    accounts.expect_whole()
    if window is not None and window.whole:
        raise UsageError("engine.step is at work: save before it or after it, in on_window_end for one.")
    scheduler = engine.scheduler
    model = unwrapped(engine.model).state_dict()
    return {
        "version": VERSION,
        "steps": steps_of(engine),
        "micro_step": engine.micro_step,
        "optimizer_step": engine.optimizer_step,
        "epoch": engine.epoch,
        "finer": engine._whole.finer,
        "model": model | _full(engine),
        "others": {name: one.detach() for name, one in others(engine).items()},
        "groups": groups(engine),
        "optimizer": engine.optimizer.state_dict(),
        "optimizer_class": class_of(engine.optimizer),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scheduler_class": None if scheduler is None else class_of(scheduler),
        "precision": precision_of(engine),
        "scaler": accounts.update.scaler.state_dict(),
        "position": accounts.position.state_dict(0 if window is None else window.done),
        "random": accounts.position.random(),
        "window": None if window is None else window.state_dict(),
        "gradients": {} if window is None else _gradients(engine),
        "callbacks": [(type(one).__name__, one.state_dict()) for one in engine.callbacks],
    }


def go_on(engine: "Engine", saved: dict[str, Any]) -> None:
    """Put an engine where the state was saved; what it holds is copied.

    Callbacks, optimizer and scheduler read their states themselves, and may refuse: they come first, and are
    put back if one does.
    """
    state = checked(saved)
    check_suits(engine, state)
    accounts = engine._accounts
    with ExitStack() as undo:
        try:
            _load_callbacks(engine, state["callbacks"], undo)
            _load_optimizer(engine, state, undo)
            _load_scheduler(engine, state, undo)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise UsageError(f"Cannot resume: the state was refused ({error!r}).") from error
        undo.pop_all()
    model, parameters = unwrapped(engine.model), named(engine)
    model.load_state_dict(state["model"])
    with torch.no_grad():
        for name, one in others(engine).items():
            one.copy_(state["others"][name])
    values = {one: state["model"][name] for name, one in parameters.items() if name in state["model"]}
    master_weights.load(accounts.update.masters, values)
    accounts.drop()
    if accounts.update.graphs is not None:
        accounts.update.graphs.reset()
    accounts.update.done()
    accounts.micro_step, accounts.optimizer_step = state["micro_step"], state["optimizer_step"]
    engine.epoch, engine._whole.finer = state["epoch"], state["finer"]
    accounts.position.load_state_dict(saved["position"], saved["random"])
    _load_window(engine, state)
    set_random_state(saved["random"])


def _load_window(engine: "Engine", state: "Saved") -> None:
    accounts, window, parameters = engine._accounts, state["window"], named(engine)
    if window is not None and window.loss is not None:
        window.loss = window.loss.to(next(engine.model.parameters()).device, copy=True)
    inside = state["position"]["began"] is not None
    engine._resumed, accounts.window = (window, None) if inside else (None, window)
    if accounts.window is not None:
        accounts.update.go_on()
    for name, gradient in state["gradients"].items():
        _set_gradient(engine, parameters[name], gradient.to(parameters[name].device, copy=True))


def _load_callbacks(engine: "Engine", states: list[tuple[str, Any]], undo: ExitStack) -> None:
    waiting = list(states)
    for callback in engine.callbacks:
        state = next((pair for pair in waiting if pair[0] == type(callback).__name__), None)
        if state is not None:
            waiting.remove(state)
            undo.callback(callback.load_state_dict, copy.deepcopy(callback.state_dict()))
            callback.load_state_dict(state[1])


def _load_scheduler(engine: "Engine", state: "Saved", undo: ExitStack) -> None:
    scheduler, scaler = engine.scheduler, engine._accounts.update.scaler
    if scheduler is not None:
        undo.callback(scheduler.load_state_dict, copy.deepcopy(scheduler.state_dict()))
        scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
    scaler.load_state_dict(state["scaler"])


def _load_optimizer(engine: "Engine", whole: "Saved", undo: ExitStack) -> None:
    """Load a state, and share none of its tensors: ``Optimizer.load_state_dict`` takes those that fit.

    It casts the others to the parameters' dtype. Where parameters are of the dtype that they had, state is,
    too: an optimizer may keep float32 for them.
    """
    optimizer, saved = engine.optimizer, whole["optimizer"]
    theirs = {id(part) for state in saved["state"].values() for part in _tensors(state)}
    # What is loaded takes the place of these, and leaves them as they are.
    undo.callback(vars(optimizer).update, state=optimizer.state, param_groups=optimizer.param_groups)
    optimizer.load_state_dict(saved)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and any(id(part) in theirs for part in parts_of(value)):
                state[name] = copy_of(value)
    values = whole["model"] | whole["others"]
    names = [name for group in whole["groups"] for name in group]
    for place, (name, parameter) in enumerate(zip(names, parameters_of(optimizer), strict=True)):
        if values[name].dtype == parameter.dtype:
            _keep_dtypes(optimizer.state[parameter], saved["state"].get(place, {}))


def _keep_dtypes(state: dict[str, Any], saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        now = state.get(name)
        if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.dtype != value.dtype:
            state[name] = value.to(now.device, copy=True)


def _tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in state.values():
        if isinstance(value, torch.Tensor):
            yield from parts_of(value)


def _full(engine: "Engine") -> dict[str, torch.Tensor]:
    """Return the float32 copies by the names of their parameters."""
    full = engine._accounts.update.masters
    return {
        name: full[parameter].detach()
        for name, parameter in unwrapped(engine.model).named_parameters(remove_duplicate=False)
        if parameter in full
    }


def _gradients(engine: "Engine") -> dict[str, torch.Tensor]:
    found, sums = {}, engine._accounts.update.sums
    for name, parameter in named(engine).items():
        summed = sums.of(parameter) if sums is not None else None
        gradient = parameter.grad if summed is None else summed
        if gradient is not None:
            found[name] = gradient
    return found


def _set_gradient(engine: "Engine", parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    sums = engine._accounts.update.sums
    if sums is not None and sums.has(parameter):
        sums.set(parameter, gradient)
    else:
        parameter.grad = gradient.to(parameter.dtype)
