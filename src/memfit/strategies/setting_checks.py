"""Check settings against the types of their fields, and suggest the names that there are."""

import difflib
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from memfit.errors import UsageError

_WORDS = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    tuple: "a tuple of strings",
    type(None): "None",
}


def check_setting_types(settings: Any, strategy: str) -> None:
    """Check every field of a strategy's settings: numbers do not pass as booleans, nor strings as numbers.

    As in JSON, integers are converted to floats where the field is a float, and lists to tuples.

    >>> from memfit.strategies.precision import LossScale
    >>> check_setting_types(LossScale(), "loss_scale")
    """
    kinds = get_type_hints(type(settings))
    for name, kind in ((field.name, kinds[field.name]) for field in fields(settings)):
        value = _converted(getattr(settings, name), kind, f"{strategy}: {name}")
        try:
            object.__setattr__(settings, name, msgspec.convert(value, kind))
        except (msgspec.ValidationError, OverflowError):
            raise UsageError(f"{strategy}: '{name}' {_requirement(kind)}, not {value!r}.") from None


def _converted(value: Any, kind: Any, what: str) -> Any:
    """Return a tuple of settings whose parts were given as dictionaries, as in JSON."""
    parts = get_args(kind)
    if not (parts and is_dataclass(parts[0]) and isinstance(value, list | tuple)):
        return value
    known = [field.name for field in fields(parts[0])]
    for each in value:
        if isinstance(each, dict) and (unknown := sorted(each.keys() - set(known))):
            raise UsageError(f"{what}: there is no setting {unknown[0]!r}. There are {', '.join(known)}.")
        if isinstance(each, dict) and (
            missing := [one for one in _required_settings(parts[0]) if one not in each]
        ):
            raise UsageError(f"{what}: {missing[0]!r} is missing in {each!r}.")
    made: Any = parts[0]
    return tuple(made(**each) if isinstance(each, dict) else each for each in value)


def _required_settings(kind: Any) -> list[str]:
    """Return the names of the settings that have no default."""
    return [
        field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING
    ]


def check_dtype_name(name: str | None, setting: str) -> None:
    """Check that a setting is None or the name of a floating-point dtype of PyTorch's.

    >>> check_dtype_name("float32", "gradient_dtype")
    """
    import torch  # not above: commands that run no script read names of settings, too

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


def unknown_name_error(what: str, name: object, known: Iterable[str]) -> UsageError:
    """Return the error to raise for an unknown name.

    >>> print(unknown_name_error("a setting", "precison", ["precision", "loss_scale"]))
    'precison' is not a setting. Nearest: precision.
    """
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=3)
    suggestion = f"Nearest: {', '.join(near)}." if near else f"Known: {', '.join(names)}."
    return UsageError(f"{name!r} is not {what}. {suggestion}")
