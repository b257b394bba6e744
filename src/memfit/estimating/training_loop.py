"""The script of ``memfit.estimate`` on the ghost: ``python -m memfit.estimating.training_loop FILE``.

It is a training loop as PyTorch's tutorials write it, with a new batch on the GPU each step:

    for inputs in data:
        inputs = inputs.to("cuda")
        optimizer.zero_grad()
        output = model(inputs)
        loss = criterion(output)
        loss.backward()
        optimizer.step()
"""

import functools
import operator
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.estimating.serialise_training_step import (
    OptimizerCopy,
    TrainingStep,
    deserialise_training_step,
    set_torch_backend_flags,
)
from memfit.recording.label_running_modules import tensors_in_containers

_ARGS_AND_KWARGS = 2


def main() -> None:
    """Run the training step in the file that the command line names."""
    torch.cuda.init()  # type: ignore[no-untyped-call]  # so that any failure from here on leaves a trace
    step, roots = deserialise_training_step(Path(sys.argv[1]).read_bytes())
    set_torch_backend_flags(step.flags)
    for module in roots:
        module.to("cuda")
    try:
        optimizer = _optimizer(step)
        if optimizer is None and step.loss is None:
            _infer(step)
        else:
            _train(step, optimizer)
    except SystemExit as stop:  # a script may exit; a model, loss or optimizer that does has failed
        raise RuntimeError(f"it called sys.exit({stop.code!r})").with_traceback(stop.__traceback__) from stop


def _infer(step: TrainingStep) -> None:
    with torch.no_grad():
        for _ in range(step.steps):
            inputs = _batch_on_gpu(step.inputs)
            with torch.autocast("cuda", enabled=step.autocast):
                output = _call_model(step.model, inputs)  # noqa: F841 - alive until the next, as in the user's loop


def _train(step: TrainingStep, optimizer: Optimizer | None) -> None:
    for _ in range(step.steps + 1):  # the recorder ends the loop after the requested steps
        inputs = _batch_on_gpu(step.inputs)
        (optimizer or step.model).zero_grad()
        with torch.autocast("cuda", enabled=step.autocast):
            if step.loss is not None and not isinstance(step.loss, torch.nn.Module):
                loss = step.loss(step.model, inputs)
            else:
                # The output stays alive during the backward, as in the user's loop.
                output = _call_model(step.model, inputs if step.loss is None else inputs[0])
                loss = _loss_of_output(output) if step.loss is None else step.loss(output, inputs[1])
        loss.backward()
        if optimizer is not None:
            optimizer.step()


def _optimizer(step: TrainingStep) -> Optimizer | None:
    if isinstance(step.optimizer, OptimizerCopy):
        return step.optimizer.make()
    created: Optimizer | None = step.optimizer and step.optimizer(step.model.parameters())
    return created


def _call_model(model: Any, inputs: Any) -> Any:
    """Call a model with inputs of ``estimate``: a tuple of arguments, a mapping of keywords, or both."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if not isinstance(inputs, tuple):
        return model(inputs)
    if len(inputs) == _ARGS_AND_KWARGS and isinstance(inputs[0], tuple) and isinstance(inputs[1], Mapping):
        return model(*inputs[0], **inputs[1])
    return model(*inputs)


def _loss_of_output(output: Any) -> torch.Tensor:
    """Return an output's ``.loss``, or else the sum of its tensors that require grad (a dict of losses)."""
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    found = [tensor for tensor in tensors_in_containers(output) if tensor.requires_grad]
    if not found:
        raise ValueError(
            "no tensor in the model's output requires grad, so memfit has no loss to use: "
            "pass estimate(..., loss=...)"
        )
    return functools.reduce(operator.add, (tensor.sum() if tensor.dim() else tensor for tensor in found))


def _batch_on_gpu(batch: Any) -> Any:
    """Return a batch with its tensors on the GPU."""
    if hasattr(batch, "to"):
        return batch.to("cuda")
    if isinstance(batch, Mapping):
        return {key: _batch_on_gpu(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_batch_on_gpu, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(_batch_on_gpu, batch))
    return batch


if __name__ == "__main__":
    main()
