"""The script that ``memfit.estimate`` runs on the ghost: ``python -m memfit.estimating.training_script JOB``.

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

from memfit.estimating.backend_flags import set_flags
from memfit.estimating.serialise import unpack
from memfit.estimating.training_step import OptimizerCopy, TrainingStep
from memfit.recording.module_hooks import tensors_in

_ARGS_AND_KWARGS = 2


def main() -> None:
    """Run the job in the file that the command line names."""
    torch.cuda.init()  # type: ignore[no-untyped-call]  # so that whatever fails from here on leaves a trace
    job, roots = unpack(Path(sys.argv[1]).read_bytes())
    set_flags(job.flags)
    for module in roots:
        module.to("cuda")
    try:
        optimizer = _optimizer(job)
        if optimizer is None and job.loss is None:
            _infer(job)
        else:
            _train(job, optimizer)
    except SystemExit as stop:  # a script may end so; what is called in this loop has failed
        raise RuntimeError(f"it called sys.exit({stop.code!r})").with_traceback(stop.__traceback__) from stop


def _infer(job: TrainingStep) -> None:
    with torch.no_grad():
        for _ in range(job.steps):
            inputs = on_gpu(job.inputs)
            with torch.autocast("cuda", enabled=job.autocast):
                output = call(job.model, inputs)  # noqa: F841 - alive until the next, as in the user's loop


def _train(job: TrainingStep, optimizer: Optimizer | None) -> None:
    for _ in range(job.steps + 1):  # the recorder ends it after the steps asked for
        inputs = on_gpu(job.inputs)
        (optimizer or job.model).zero_grad()
        with torch.autocast("cuda", enabled=job.autocast):
            if job.loss is not None and not isinstance(job.loss, torch.nn.Module):
                loss = job.loss(job.model, inputs)
            else:
                # The output is alive through the backward, as in the user's loop.
                output = call(job.model, inputs if job.loss is None else inputs[0])
                loss = loss_in(output) if job.loss is None else job.loss(output, inputs[1])
        loss.backward()
        if optimizer is not None:
            optimizer.step()


def _optimizer(job: TrainingStep) -> Optimizer | None:
    if isinstance(job.optimizer, OptimizerCopy):
        return job.optimizer.make()
    made: Optimizer | None = job.optimizer and job.optimizer(job.model.parameters())
    return made


def call(model: Any, inputs: Any) -> Any:
    """Call a model as ``estimate`` says: a tuple is its arguments, a mapping its keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if not isinstance(inputs, tuple):
        return model(inputs)
    if len(inputs) == _ARGS_AND_KWARGS and isinstance(inputs[0], tuple) and isinstance(inputs[1], Mapping):
        return model(*inputs[0], **inputs[1])
    return model(*inputs)


def loss_in(output: Any) -> torch.Tensor:
    """Return the loss that an output carries (``.loss``, a dict of losses), or else the sum of its elements.

    Raises:
        ValueError: nothing in the output has a gradient.
    """
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    found = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not found:
        raise ValueError("nothing that the model returned has a gradient: give estimate(..., loss=...)")
    return functools.reduce(operator.add, (tensor.sum() if tensor.dim() else tensor for tensor in found))


def on_gpu(batch: Any) -> Any:
    """Return a batch with its tensors on the GPU."""
    if hasattr(batch, "to"):
        return batch.to("cuda")
    if isinstance(batch, Mapping):
        return {key: on_gpu(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(on_gpu, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(on_gpu, batch))
    return batch


if __name__ == "__main__":
    main()
