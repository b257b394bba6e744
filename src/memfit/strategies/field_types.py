"""Check settings against the types of their fields."""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import torch

from memfit.errors import UsageError

_WORDS = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    tuple: "a tuple of strings",
    type(None): "None",
}


def check_types(settings: Any, strategy: str) -> None:
    """Check every field of a strategy's settings: numbers do not pass as booleans, nor strings as numbers.

    As in JSON, integers are converted to floats where the field is a float, and lists to tuples.

    Raises:
        UsageError: a value has another type, or is not one of the field's values.

    >>> from memfit.strategies.precision import LossScale
    >>> check_types(LossScale(), "loss_scale")
    """
    kinds = get_type_hints(type(settings))
    for name, kind in ((field.name, kinds[field.name]) for field in fields(settings)):
        value = getattr(settings, name)
        try:
            object.__setattr__(settings, name, msgspec.convert(value, kind))
        except (msgspec.ValidationError, OverflowError):
            raise UsageError(f"{strategy}: '{name}' {_requirement(kind)}, not {value!r}.") from None


def check_dtype(name: str | None, setting: str) -> None:
    """Check that a setting is None or the name of a floating-point dtype of PyTorch's.

    Raises:
        UsageError: it is not.

    >>> check_dtype("float32", "gradient_dtype")
    """
    dtype = getattr(torch, str(name), None)
    if name is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(f"{setting}={name!r} is not a PyTorch floating-point dtype (for example 'float32').")


def _requirement(kind: Any) -> str:
    """Return what a value of a type must be, as text."""
    parts = [part for part in get_args(kind) if part is not type(None)]
    if get_origin(kind) is Literal:
        return f"must be one of {', '.join(map(str, parts))}"
    if len(parts) == 1 and get_origin(parts[0]) is Literal:
        return _requirement(parts[0])
    kinds = get_args(kind) if parts and get_origin(kind) is not tuple else [kind]
    return "must be " + " or ".join(
        _WORDS.get(get_origin(each) or each, f"{each.__name__}(...)") for each in kinds
    )
