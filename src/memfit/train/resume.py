"""What a run needs to go on: an engine's whole state, and going on from one.

Parameters are saved in float32 where the optimizer updates float32 copies of them, so that a run may go on in
another precision. What belongs to the loss scale is new where there was none.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memfit.errors import TornUpdateError, UsageError
from memfit.train import masters
from memfit.train.state import set_random_state
from memfit.train.update import INTERRUPTED
from memfit.train.window import Window

if TYPE_CHECKING:
    from memfit.train.engine import Engine


VERSION = 1
_KEYS = {
    *("version", "steps", "micro_step", "optimizer_step", "epoch", "finer", "position", "random", "window"),
    *("model", "optimizer", "optimizer_class", "scheduler", "scaler", "gradients", "callbacks"),
}


def state_of(engine: "Engine") -> dict[str, Any]:
    """Return an engine's state, as tensors and plain values."""
    accounts = engine._accounts
    if accounts.update.torn:
        raise TornUpdateError(INTERRUPTED)
    window = accounts.window or engine._resumed  # the latter waits for its data
    accounts.expect_whole()
    if window is not None and window.whole:
        raise UsageError("engine.step is at work: save before it or after it, in on_window_end for one.")
    model = _plain(engine.model)
    return {
        "version": VERSION,
        "steps": _steps(engine),
        "micro_step": engine.micro_step,
        "optimizer_step": engine.optimizer_step,
        "epoch": engine.epoch,
        "finer": engine._whole.finer,
        "model": model.state_dict() | _full(engine),
        "optimizer": engine.optimizer.state_dict(),
        "optimizer_class": _class_of(engine.optimizer),
        "scheduler": None if engine.scheduler is None else engine.scheduler.state_dict(),
        "scaler": accounts.update.scaler.state_dict(),
        "position": accounts.position.state_dict(0 if window is None else window.done),
        "random": accounts.position.random(),
        "window": None if window is None else window.state_dict(),
        "gradients": {} if window is None else _gradients(engine),
        "callbacks": [(type(one).__name__, one.state_dict()) for one in engine.callbacks],
    }


def go_on(engine: "Engine", saved: dict[str, Any]) -> None:
    """Put an engine where the state was saved."""
    _check(engine, saved)
    accounts = engine._accounts
    model = _plain(engine.model)
    model.load_state_dict(saved["model"])
    parameters = dict(model.named_parameters())
    values = {parameter: saved["model"][name] for name, parameter in parameters.items()}
    masters.load(accounts.update.masters, values)
    engine.optimizer.load_state_dict(saved["optimizer"])
    if engine.scheduler is not None and saved["scheduler"] is not None:
        engine.scheduler.load_state_dict(saved["scheduler"])
    accounts.update.scaler.load_state_dict(saved["scaler"])
    accounts.drop()
    if accounts.update.graphs is not None:
        accounts.update.graphs.reset()
    accounts.update.done()
    accounts.micro_step, accounts.optimizer_step = saved["micro_step"], saved["optimizer_step"]
    engine.epoch, engine._whole.finer = saved["epoch"], saved["finer"]
    accounts.position.load_state_dict(saved["position"], saved["random"])
    window = None if saved["window"] is None else Window(**saved["window"])
    inside = saved["position"]["began"] is not None
    engine._resumed, accounts.window = (window, None) if inside else (None, window)
    if accounts.window is not None:
        accounts.update.go_on()
    for name, gradient in saved["gradients"].items():
        _set_gradient(engine, parameters[name], gradient.to(parameters[name].device))
    waiting = list(saved["callbacks"])
    for callback in engine.callbacks:
        state = next((pair for pair in waiting if pair[0] == type(callback).__name__), None)
        if state is not None:
            waiting.remove(state)
            callback.load_state_dict(state[1])
    set_random_state(saved["random"])


def _check(engine: "Engine", saved: dict[str, Any]) -> None:
    """Refuse what cannot go on, before anything is changed."""
    if saved.get("version") != VERSION or saved.keys() != _KEYS:
        raise UsageError(
            f"Cannot resume: the state is of version {saved.get('version')}, and this memfit reads {VERSION}."
        )
    shapes = {name: getattr(value, "shape", None) for name, value in saved["model"].items()}
    for name, value in _plain(engine.model).state_dict().items():
        if name not in shapes:
            raise UsageError(f"Cannot resume: the model has {name!r}, and the saved one has not.")
        if shapes.pop(name) != getattr(value, "shape", None):
            raise UsageError(
                f"Cannot resume: {name!r} is of another shape in the model than in the saved one."
            )
    if shapes:
        raise UsageError(f"Cannot resume: the saved model has {next(iter(shapes))!r}, and the model has not.")
    if saved["optimizer_class"] != _class_of(engine.optimizer):
        raise UsageError(
            f"Cannot resume: the state is of {saved['optimizer_class']}, and the optimizer here is "
            f"{_class_of(engine.optimizer)}, which keeps another. Go on with that, or load the model alone."
        )
    if saved["window"] is None:
        return
    if saved["steps"] != _steps(engine):
        raise UsageError(
            f"Cannot resume: the state was saved inside a window of {saved['steps']} micro-batches, and here "
            f"they are {_steps(engine)}. Go on with {saved['steps']}, or from a state that was saved between "
            "windows."
        )
    if bool(saved["scaler"]) != bool(engine._accounts.update.scaler.state_dict()):
        raise UsageError(
            "Cannot resume: the state was saved inside a window whose loss was scaled otherwise. Go on with "
            "its precision, or from a state that was saved between windows."
        )


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _steps(engine: "Engine") -> int:
    return engine._accumulation.gradient_accumulation_steps or 1


def _plain(model: nn.Module) -> nn.Module:
    """Return the model that ``torch.compile`` wraps: names are the same with and without."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def _full(engine: "Engine") -> dict[str, torch.Tensor]:
    """Return the float32 copies by the names of their parameters."""
    full = engine._accounts.update.masters
    return {
        name: full[parameter].detach()
        for name, parameter in _plain(engine.model).named_parameters(remove_duplicate=False)
        if parameter in full
    }


def _gradients(engine: "Engine") -> dict[str, torch.Tensor]:
    found, sums = {}, engine._accounts.update.sums
    for name, parameter in _plain(engine.model).named_parameters():
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
