"""The whole state of an engine, and resuming an engine from one.

Parameters are saved in float32 if the optimizer updates float32 copies of them, so that a run can resume in
another precision. A loss scale starts from its initial value if the saved run had none.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from memfit.errors import TornUpdateError, UsageError
from memfit.random_state import set_random_state
from memfit.recording.optimizer_accessors import local_optimizer, parameters_of
from memfit.strategies.mechanisms.inspect_tensors import independent_tensor_copy, inner_tensors
from memfit.strategies.mechanisms.master_weights import load_float32_copies
from memfit.train.callbacks import Callback
from memfit.train.optimizer_update import INTERRUPTED
from memfit.train.resume.saved_engine_parts import (
    EngineParts,
    class_name_with_module,
    copy_hyperparameters_to_zero1_groups,
    get_optimizer_state,
    gradient_precision_of,
    indices_of_own_parameters,
    model_without_wrappers,
    named_model_and_optimizer_parameters,
    optimizer_state_of_own_parameters,
    parameter_names_by_group,
    tensors_outside_state_dict,
)
from memfit.train.resume.saved_run_compatibility import check_run_suits_engine
from memfit.train.resume.saved_run_format import VERSION, SavedRun, check_saved_run


def get_engine_state(parts: EngineParts) -> dict[str, Any]:
    """Return an engine's state as plain values and tensors; the tensors are the engine's own."""
    ledger = parts.ledger
    if ledger.update.torn:
        raise TornUpdateError(INTERRUPTED)
    window = ledger.window or ledger.resumed_window
    ledger.expect_uninterrupted()
    if window is not None and window.holds_parts:
        raise UsageError(
            "Cannot save the run inside engine.step: save it before or after engine.step, or in "
            "a callback's on_window_end."
        )
    scheduler = parts.scheduler
    model = model_without_wrappers(parts).state_dict()
    return {
        "version": VERSION,
        "steps": parts.steps,
        "micro_step": ledger.micro_step,
        "optimizer_step": ledger.optimizer_step,
        "epoch": parts.epoch,
        "finer": parts.full_batch.finer,
        "model": model | _master_weights(parts),
        "others": {name: tensor.detach() for name, tensor in tensors_outside_state_dict(parts).items()},
        "groups": parameter_names_by_group(parts),
        "optimizer": get_optimizer_state(parts.optimizer),
        "optimizer_class": class_name_with_module(local_optimizer(parts.optimizer)),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scheduler_class": None if scheduler is None else class_name_with_module(scheduler),
        "schedule": str(ledger.update.schedule),
        "precision": gradient_precision_of(parts),
        "scaler": ledger.update.scaler.state_dict(),
        "position": ledger.position.state_dict(),
        "random": ledger.position.random_state(),
        "window": None if window is None else window.state_dict(),
        "gradients": {} if window is None else _gradients(parts),
        "callbacks": [(type(callback).__name__, callback.state_dict()) for callback in parts.callbacks],
    }


def load_engine_state(
    parts: EngineParts,
    saved: dict[str, Any],
    together: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Resume an engine from a saved state, whose tensors are copied.

    Callbacks, optimizer and scheduler load their states themselves and may refuse: they are loaded first, and
    restored if one does.
    """
    ledger = parts.ledger
    with ExitStack() as undo:
        with together():
            state = check_saved_run(saved)
            check_run_suits_engine(parts, state)
            part = "a callback"
            try:
                _load_callbacks(parts.callbacks, state["callbacks"], undo)
                part = "the optimizer"
                _load_optimizer(parts, state, undo)
                part = "the scheduler"
                _load_scheduler(parts, state, undo)
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise UsageError(
                    f"Cannot resume: {part} did not accept its saved state ({error!r})."
                ) from error
        undo.pop_all()
    model, parameters = model_without_wrappers(parts), named_model_and_optimizer_parameters(parts)
    model.load_state_dict(state["model"])
    with torch.no_grad():
        for name, tensor in tensors_outside_state_dict(parts).items():
            tensor.copy_(state["others"][name])
    values = {each: state["model"][name] for name, each in parameters.items() if name in state["model"]}
    load_float32_copies(ledger.update.values_of_masters(), values)
    ledger.drop()
    ledger.update.finish_loading()
    ledger.micro_step, ledger.optimizer_step = state["micro_step"], state["optimizer_step"]
    parts.epoch, parts.full_batch.finer = state["epoch"], state["finer"]
    ledger.position.load_state_dict(saved["position"], saved["random"])
    _load_window(parts, state)
    set_random_state(saved["random"])


def _load_window(parts: EngineParts, state: SavedRun) -> None:
    ledger, window, parameters = parts.ledger, state["window"], named_model_and_optimizer_parameters(parts)
    if window is not None and window.loss is not None:
        window.loss = window.loss.to(next(parts.model.parameters()).device, copy=True)
    inside_epoch = state["position"]["began"] is not None
    ledger.resumed_window, ledger.window = (window, None) if inside_epoch else (None, window)
    if ledger.window is not None:
        ledger.update.take_gradients()
    for name, gradient in state["gradients"].items():
        ledger.update.gradients.set(parameters[name], gradient)


def _load_callbacks(callbacks: Iterable[Callback], states: list[tuple[str, Any]], undo: ExitStack) -> None:
    waiting = list(states)
    for callback in callbacks:
        state = next((pair for pair in waiting if pair[0] == type(callback).__name__), None)
        if state is not None:
            waiting.remove(state)
            undo.callback(callback.load_state_dict, copy.deepcopy(callback.state_dict()))
            callback.load_state_dict(state[1])


def _load_scheduler(parts: EngineParts, state: SavedRun, undo: ExitStack) -> None:
    scheduler = parts.scheduler
    if scheduler is not None:
        undo.callback(scheduler.load_state_dict, copy.deepcopy(scheduler.state_dict()))
        scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
    parts.ledger.update.scaler.load_state_dict(state["scaler"])


def _load_optimizer(parts: EngineParts, run: SavedRun, undo: ExitStack) -> None:
    """Load a saved state without sharing its tensors: ``Optimizer.load_state_dict`` keeps those that fit.

    It casts the others to the parameters' dtype. If a parameter has its former dtype, its state keeps the
    saved dtype too: an optimizer may keep float32 for it.
    """
    optimizer, saved = (
        local_optimizer(parts.optimizer),
        optimizer_state_of_own_parameters(parts.optimizer, run["optimizer"]),
    )
    saved_tensors = {
        id(part)
        for state in saved["state"].values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
        for part in inner_tensors(value)
    }
    for each in (optimizer, parts.optimizer):  # load_state_dict replaces these, and does not change them
        undo.callback(vars(each).update, state=each.state, param_groups=each.param_groups)
    optimizer.load_state_dict(saved)
    copy_hyperparameters_to_zero1_groups(parts.optimizer)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and any(
                id(part) in saved_tensors for part in inner_tensors(value)
            ):
                state[name] = independent_tensor_copy(value)
    values = run["model"] | run["others"]
    names = [name for group in run["groups"] for name in group]
    own = [names[index] for index in indices_of_own_parameters(parts.optimizer)]
    for index, (name, parameter) in enumerate(zip(own, parameters_of(optimizer), strict=True)):
        if values[name].dtype == parameter.dtype:
            _keep_dtypes(optimizer.state[parameter], saved["state"].get(index, {}))


def _keep_dtypes(state: dict[str, Any], saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        now = state.get(name)
        if isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor) and now.dtype != value.dtype:
            state[name] = value.to(now.device, copy=True)


def _master_weights(parts: EngineParts) -> dict[str, torch.Tensor]:
    """Return the float32 copies by the names of their parameters."""
    masters = parts.ledger.update.values_of_masters()
    return {
        name: masters[parameter].detach()
        for name, parameter in model_without_wrappers(parts).named_parameters(remove_duplicate=False)
        if parameter in masters
    }


def _gradients(parts: EngineParts) -> dict[str, torch.Tensor]:
    sums = parts.ledger.update.gradients.sums
    summed = {} if sums is None else dict(sums.items())
    found = {
        name: summed.get(each, each.grad)
        for name, each in named_model_and_optimizer_parameters(parts).items()
    }
    return {name: gradient for name, gradient in found.items() if gradient is not None}
