"""Python code that makes a value again, with the imports that it needs."""

import dataclasses
import inspect
import math
import sys
import types
from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

_LONGEST = 200
"""Characters of a value that is written out."""


@dataclass(frozen=True, slots=True)
class Code:
    """An expression."""

    text: str
    imports: frozenset[str] = frozenset()

    @classmethod
    def join(cls, pattern: str, parts: "Iterable[Code]") -> "Code":
        """Return an expression with others in the place of ``{}``, separated by commas."""
        listed = list(parts)
        text = pattern.format(", ".join(each.text for each in listed))
        return cls(text, frozenset().union(*(each.imports for each in listed)))


def code_of(value: Any, script: str = "") -> Code | None:
    """Return code that makes a value again; None if memfit knows none.

    Args:
        value: a literal, a type or function, a setting of PyTorch's, one of its losses, a configuration.
        script: the name under which the script can be imported.

    >>> code_of({"lr": (0.1, None)}).text
    "{'lr': (0.1, None)}"
    >>> import torch
    >>> code_of(torch.nn.CrossEntropyLoss(label_smoothing=0.1)).text
    'torch.nn.CrossEntropyLoss(label_smoothing=0.1)'
    """
    found = _plain(value, script) or _torch(value, script) or _configuration(value, script)
    return found if found is not None and len(found.text) <= _LONGEST else None


def name_of(value: Any, script: str) -> Code | None:
    """Return code that names a module, or what a module defines; None if nothing else can import it."""
    if isinstance(value, types.ModuleType):
        return None if value.__name__ == "__main__" else Code(value.__name__, _import(value.__name__))
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<" in name:
        return None
    root = name.partition(".")[0]
    if module == "__main__":
        return Code(name, frozenset({f"from {script} import {root}"})) if script else None
    if module == "builtins":
        return Code(name)
    return Code(name, frozenset({f"from {_shortest(module, root)} import {root}"}))


def _shortest(module: str, name: str) -> str:
    """Return the outermost package that has what a module defines: ``transformers``."""
    defined = getattr(sys.modules.get(module), name, None)
    parts = module.split(".")
    packages = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next(
        (each for each in packages if defined and getattr(sys.modules.get(each), name, None) is defined),
        module,
    )


def _plain(value: Any, script: str) -> Code | None:
    if value is None or type(value) in (bool, int, str, bytes):
        return Code(repr(value))
    if type(value) is float:
        return Code(repr(value) if math.isfinite(value) else f"float('{value}')")
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return name_of(value, script)
    return _container(value, script)


def _container(value: Any, script: str) -> Code | None:
    if type(value) is dict:
        pairs = [(code_of(name, script), code_of(each, script)) for name, each in value.items()]
        items = [
            Code(f"{name.text}: {each.text}", name.imports | each.imports)
            for name, each in pairs
            if name and each
        ]
        return Code.join("{{{}}}", items) if len(items) == len(pairs) else None
    if type(value) not in (list, tuple, set):
        return None
    parts = [code for each in value if (code := code_of(each, script)) is not None]
    if len(parts) < len(value):
        return None
    if type(value) is tuple:
        return Code.join("({},)" if len(parts) == 1 else "({})", parts)
    return Code.join("[{}]" if type(value) is list else "set([{}])", parts)


def _torch(value: Any, script: str) -> Code | None:
    import torch
    from torch.nn.modules import loss

    if isinstance(value, torch.dtype | torch.memory_format):
        return Code(str(value), _import("torch"))
    if isinstance(value, torch.device):
        return Code(f"torch.device({str(value)!r})", _import("torch"))
    if type(value).__module__ == loss.__name__:
        return _called(f"torch.nn.{type(value).__name__}", value, script)
    return None


def _configuration(value: Any, script: str) -> Code | None:
    """Return the call that makes a dataclass, a namespace, or a configuration of transformers."""
    if isinstance(value, Namespace | types.SimpleNamespace):
        return _call(type(value), vars(value), script)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.init and getattr(value, field.name) != field.default
        }
        return _call(type(value), given, script)
    if hasattr(value, "to_diff_dict") and type(value).__module__.startswith("transformers."):
        given = {
            name: each
            for name, each in value.to_diff_dict().items()
            if name not in ("model_type", "transformers_version")
        }
        return _call(type(value), given, script)
    return None


def _call(kind: type, given: dict[str, Any], script: str) -> Code | None:
    name = name_of(kind, script)
    return None if name is None else _with_arguments(name, given, script)


def _with_arguments(called: Code, given: dict[str, Any], script: str) -> Code | None:
    values = {name: code_of(value, script) for name, value in given.items()}
    if not all(name.isidentifier() for name in given) or None in values.values():
        return None
    arguments = [
        Code(f"{name}={value.text}", value.imports) for name, value in values.items() if value is not None
    ]
    made = Code.join("({})", arguments)
    return Code(called.text + made.text, called.imports | made.imports)


def _called(name: str, value: Any, script: str) -> Code | None:
    """Return the call that makes an object whose attributes have the names of its parameters."""
    given = {
        parameter.name: getattr(value, parameter.name)
        for parameter in inspect.signature(type(value)).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and hasattr(value, parameter.name)
        and getattr(value, parameter.name) is not parameter.default
        and getattr(value, parameter.name) != parameter.default
    }
    return _with_arguments(Code(name, _import(name.partition(".")[0])), given, script)


def _import(module: str) -> frozenset[str]:
    return frozenset({f"import {module}"})
