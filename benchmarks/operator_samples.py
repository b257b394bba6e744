"""Read PyTorch's own database of operators, and call an operator on one of its sample inputs, with backward.

Needs expecttest, which the database imports (pip install expecttest). Import this module before CUDA is
initialised: only ``database`` imports torch, and it does not initialise CUDA.
"""

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput


def database(compute_capability: tuple[int, int]) -> "list[OpInfo]":
    """Import the database without initialising CUDA, which forked children could not do afterwards.

    The import queries the device's capabilities; patched functions return what the device will report.
    """
    import torch
    import torch.utils._triton as triton

    patches: dict[tuple[Any, str], Any] = {
        (triton, "has_triton"): lambda: False,
        (torch.cuda, "is_available"): lambda: True,
        (torch.cuda, "get_device_capability"): lambda *_: compute_capability,
    }
    kept = {place: getattr(*place) for place in patches}
    try:
        for place, answer in patches.items():
            setattr(*place, answer)
        from torch.testing._internal.common_methods_invocations import op_db
    finally:
        for place, function in kept.items():
            setattr(*place, function)
    return op_db  # type: ignore[no-any-return]


def samples(op: "OpInfo", device: str, dtype: "torch.dtype", grad: bool) -> "Iterator[SampleInput]":
    """Create the operator's sample inputs, one at a time, from fixed seeds."""
    import torch

    torch.manual_seed(0)
    random.seed(0)
    return iter(op.sample_inputs(device, dtype, requires_grad=grad))


def has_backward(op: "OpInfo", dtype: "torch.dtype") -> bool:
    """Return whether the operator has a backward for the dtype on CUDA."""
    return dtype in op.supported_backward_dtypes("cuda") and op.supports_autograd


def signature(sample: "SampleInput") -> str:
    """Describe a sample's arguments: shapes, dtypes, plain values."""
    from torch.utils._pytree import tree_leaves

    arguments = sample.input, sample.args, sample.kwargs
    return str([(describe(leaf), wants_grad(leaf)) for leaf in tree_leaves(arguments)])


def call(op: "OpInfo", sample: "SampleInput", *, backward: bool) -> list[object]:
    """Call the operator, run a backward from its outputs, and return the leaves of outputs and gradients."""
    import torch
    from torch.utils._pytree import tree_leaves

    out = op(sample.input, *sample.args, **sample.kwargs)
    leaves = tree_leaves(out)
    inputs = [leaf for leaf in tree_leaves((sample.input, sample.args, sample.kwargs)) if wants_grad(leaf)]
    if backward and inputs:
        processed = tree_leaves(sample.output_process_fn_grad(out))
        differentiable = [leaf for leaf in processed if wants_grad(leaf)]
        if differentiable:
            sums = [leaf.abs().sum() if leaf.is_complex() else leaf.sum() for leaf in differentiable]
            leaves += torch.autograd.grad(sum(sums), inputs, allow_unused=True)
    return leaves


def wants_grad(leaf: object) -> bool:
    """Return whether it is a tensor that requires a gradient."""
    import torch

    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def describe(leaf: object) -> object:
    """Describe a tensor by dtype, shape and layout, a plain value by itself, anything else by its type."""
    import torch

    if not isinstance(leaf, torch.Tensor):
        plain = isinstance(leaf, bool | int | str | torch.dtype | torch.layout | torch.memory_format | None)
        return leaf if plain else type(leaf).__name__
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" + (
        "" if leaf.layout is torch.strided else f" {leaf.layout}"
    )


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, shortened."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""
