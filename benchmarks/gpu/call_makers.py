"""Functions that make calls on the GPU for operators.py: inputs, the call, and its backward."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

Run = Callable[[], object]
Make = Callable[[], Run]
"""Creates the inputs of a call and returns the call, which returns its results."""

CUDA = "cuda:0"


def named(*parts: object) -> str:
    """Join the parts of a call's name."""
    return " ".join(str(part).removeprefix("torch.") for part in parts)


def random(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    """Return normally distributed numbers on the GPU."""
    return torch.randn(*shape, device=CUDA, dtype=dtype).requires_grad_(grad)


def integers(most: int, *shape: int) -> torch.Tensor:
    """Return random integers below ``most`` on the GPU."""
    return torch.randint(0, most, shape, device=CUDA)


def with_backward(function: Run, inputs: Sequence[torch.Tensor]) -> Run:
    """Return a call that also computes the gradients of the inputs; all results stay alive."""

    def run() -> object:
        out = function()
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        total = sum((leaf.abs() if leaf.is_complex() else leaf).float().sum() for leaf in leaves)
        return out, torch.autograd.grad(total, inputs, allow_unused=True)

    return run


def module_call(build: Callable[[], nn.Module], *inputs: Callable[[], torch.Tensor]) -> Make:
    """Return the forward and backward of a module, with gradients of its parameters and inputs."""

    def make() -> Run:
        module = build()
        given = [create() for create in inputs]
        wanted = [*module.parameters(), *(tensor for tensor in given if tensor.requires_grad)]
        return with_backward(lambda: module(*given), wanted)

    return make


def call(function: Callable[..., Any], *inputs: Callable[[], torch.Tensor]) -> Make:
    """Return the forward of a function, and the backward if an input requires a gradient."""

    def make() -> Run:
        given = [create() for create in inputs]
        wanted = [tensor for tensor in given if tensor.requires_grad]
        forward = partial(function, *given)
        return with_backward(forward, wanted) if wanted else forward

    return make
