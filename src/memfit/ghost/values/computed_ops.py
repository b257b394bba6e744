"""The ATen ops that the CPU computes, too: chosen by PyTorch's schemas and tags (``computed_on_cpu.py``)."""

import re
from functools import cache
from typing import Any

import torch

_MOVING = re.compile(
    "_to_copy|_unsafe_view|clone|cat|stack|block_diag|constant_pad_nd|repeat|flip|roll|tril|triu|diff|cum.*"
    "|where|gather|take.*|put|index.*|_index_put_impl|scatter.*|masked_.*|nonzero|isin|bincount|histc"
    "|isclose|searchsorted|bucketize|repeat_interleave|sort|topk|unique_.*|_unique2|(full|ones|zeros)_like|_is_a.*_true"
)
"""Ops that PyTorch tags neither as pointwise nor as reductions: most of them move elements. Not ``copy_``,
``fill_`` and ``zero_``: PyTorch's C++ code calls them on tensors that it keeps, such as the views of DDP's
buckets, and an override makes Python objects of these. ``small_tensors.py`` wraps their methods."""

_UNSUITABLE = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view, torch.Tag.generated}
"""Tags of ops that are random, change a tensor's shape, or that no script calls."""
WITH_NUMBERS = ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide")
"""Ops that get a number as a tensor, which an override cannot pass on. ``small_tensors.py`` wraps what Python
calls."""


@cache
def ops_computed_on_cpu() -> tuple[str, ...]:
    """Return the ATen ops, with their overloads, whose results follow from the elements of their inputs."""
    names = (each.removeprefix("aten::") for each in torch._C._dispatch_get_all_op_names())
    return tuple(name for name in names if _is_computed(name))


def overload_of(op: str) -> Any:
    """Return the overload of an ATen op, named as ``max.dim``; None if this PyTorch lacks it."""
    name, _, overload = op.partition(".")
    return getattr(getattr(torch.ops.aten, name, None), overload or "default", None)


def _is_computed(op: str) -> bool:
    """Return whether the CPU computes an op, too, which returns tensors or writes to its first or ``out``."""
    overload = overload_of(op) if _is_of_known_kind(_family(op)) else None
    if overload is None or _UNSUITABLE & {*overload.tags}:
        return False
    arguments, results = overload._schema.arguments, overload._schema.returns
    written = [arg for arg in arguments if arg.alias_info is not None and arg.alias_info.is_write]
    views = [each for each in results if each.alias_info is not None and not each.alias_info.is_write]
    is_written = not written or written == arguments[:1] or [each.name for each in written] == ["out"]
    return (
        is_written
        and not views
        and bool(results)
        and all(str(each.type) in ("Tensor", "List[Tensor]") for each in results)
        and any("Tensor" in str(arg.type) for arg in arguments)
    )


def _family(op: str) -> str:
    """Return the name that an op shares with its form in place.

    >>> [_family(op) for op in ("exp", "exp_", "eq_.Scalar", "__or__.Tensor")]
    ['exp', 'exp', 'eq', '__or__']
    """
    name = op.partition(".")[0]
    return name if name.endswith("__") else name.removesuffix("_")


@cache
def _is_of_known_kind(family: str) -> bool:
    """Return whether a method of tensors is pointwise, a reduction or among ``_MOVING``."""
    if family in WITH_NUMBERS or family in ("fill", "copy", "zero") or family.endswith("backward"):
        return False
    if _MOVING.fullmatch(family):
        return True
    return _has_tag(family, torch.Tag.pointwise) or _has_tag(family, torch.Tag.reduction)


@cache
def _has_tag(family: str, tag: torch.Tag) -> bool:
    if not hasattr(torch.Tensor, family) and family not in ("rsub", "linalg_vector_norm"):
        return False
    packet = getattr(torch.ops.aten, family, None)
    functional = (name for name in packet.overloads() if "out" not in name) if packet is not None else ()
    return any(tag in getattr(packet, name).tags for name in functional)


def is_pointwise(op: str) -> bool:
    """Return whether an op computes each element from those at its place.

    >>> [is_pointwise(op) for op in ("eq.Scalar", "exp_", "where.self", "sum.dim_IntList", "cat")]
    [True, True, True, False, False]
    """
    name, _, overload = op.partition(".")
    both = (overload_of(each) for each in (op, f"{_family(name)}.{overload}"))
    return any(each is not None and torch.Tag.pointwise in each.tags for each in both)
