"""Files of settings: TOML, JSON, a network in Caffe's text format, or a configuration of OpenMMLab's.

A Python file is read and never run: what is no literal in it stands as its text, and its place. Of such a
file, only the settings that memfit reads count; the rest is the trainer's.
"""

import ast
import json
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from memfit.errors import FileFormatError
from memfit.input_files import read_input_file
from memfit.planning.plan_file import read_plan

SUFFIXES = (".json", ".toml", ".py", ".prototxt")
_MAX_FILE = 1 << 20  # bytes
_MAX_VALUES = 20_000
"""Values in one of a Python file, where a name may stand for many."""


def is_plan(path: Path) -> bool:
    """Return whether a file is one of ``memfit plan -o``, or is to be refused like one.

    Raises:
        FileFormatError: it cannot be read.
    """
    if path.suffix != ".json":
        return path.suffix not in SUFFIXES
    try:
        found = json.loads(read_input_file(path, 16 * _MAX_FILE))
    except (ValueError, RecursionError):
        return True
    return not isinstance(found, dict) or not found or "plan" in found


def read_settings_file(path: Path, known: Collection[str]) -> Mapping[str, Any]:
    """Return the settings in a file, by their names.

    Args:
        path: of a file with one of ``SUFFIXES``; any other is TOML.
        known: the names that memfit reads; of a Python file, the others are left out.
    """
    if path.suffix == ".json" and is_plan(path):
        return read_plan(path).change.plan
    content = read_input_file(path, _MAX_FILE)
    kind = {".json": "JSON", ".py": "Python"}.get(path.suffix, "TOML")
    try:
        text = content.decode()
        if path.suffix == ".prototxt":
            return {"mem_param": text}
        if path.suffix == ".py":
            return _literals(ast.parse(text), path, known)
        found: dict[str, Any] = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileFormatError:
        raise
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:  # and endless digits
        what = "a text file" if isinstance(error, UnicodeDecodeError) else f"valid {kind}"
        why = str(error) or "nested too deeply"
        raise FileFormatError(f"Cannot read settings from {path}: it is not {what} ({why}).") from None
    return found


def _literals(module: ast.Module, path: Path, known: Collection[str]) -> dict[str, Any]:
    """Return the settings that a Python file assigns at its top level."""
    assigned: dict[str, _Sized] = {}
    for node in module.body:
        names: list[str] = []
        if isinstance(node, ast.Assign):
            names = [each.id for each in node.targets if isinstance(each, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        if (name := _bound_otherwise(node, {*known, *assigned})) is not None:
            raise FileFormatError(
                f"Cannot read settings from {path}: line {node.lineno} may change {name}, and memfit reads "
                "assignments of literals alone, without running the file. Assign the value that counts."
            )
        inherits = isinstance(node, ast.With) and "read_base" in ast.unparse(node.items[0])
        if inherits or "_base_" in names:
            raise FileFormatError(
                f"Cannot read settings from {path}: line {node.lineno} inherits from other files, which "
                "memfit does not read. Name the file that MMEngine's Config.fromfile(...).dump(...) writes."
            )
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            value = _literal(node.value, assigned, path)
            assigned |= dict.fromkeys(names, value)
    found = {name: value for name, (value, _) in assigned.items() if name in known}
    if not found:
        raise FileFormatError(
            f"Cannot read settings from {path}: it assigns none that memfit reads, such as fp16, model, "
            "optim_wrapper or checkpointing."
        )
    return found


def _bound_otherwise(node: ast.stmt, names: Collection[str]) -> str | None:
    """Return which of some names a statement may change, other than by assigning to it; None if none.

    >>> _bound_otherwise(ast.parse("if debug: fp16 = None").body[0], {"fp16"})
    'fp16'
    """
    parts: list[ast.AST] = []
    found: list[str] = []
    match node:
        case ast.Assign(targets):
            parts = [each for each in targets if not isinstance(each, ast.Name)]
        case ast.AnnAssign(target):
            parts = [target] if not isinstance(target, ast.Name) else []
        case ast.Import(aliases) | ast.ImportFrom(names=aliases):
            found = [each.asname or each.name for each in aliases]
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            found = [name]
        case _:
            parts = [node]
    found += [each.id for part in parts for each in ast.walk(part) if isinstance(each, ast.Name)]
    return next((each for each in found if each in names), None)


_Sized = tuple[Any, int]
"""A value, and how many values it has in it if each is counted wherever it occurs."""


def _literal(node: ast.expr, names: Mapping[str, _Sized], path: Path) -> _Sized:
    """Return the value of an expression; of what is no literal, its text and line."""
    fields: dict[Any, ast.expr] = {}
    items: list[ast.expr] = []
    match node:
        case ast.Constant(str() | int() | float() | None as value):
            return value, 1
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value, 1
        case ast.Name(name) if name in names:
            return names[name]
        case ast.List(items) | ast.Tuple(items) if not any(isinstance(each, ast.Starred) for each in items):
            pass
        case ast.Dict(keys, values) if all(isinstance(key, ast.Constant) for key in keys):
            names_of = [key.value for key in keys if isinstance(key, ast.Constant)]
            fields = dict(zip(names_of, values, strict=True))
        case ast.Call(ast.Name("dict"), [], keywords) if all(each.arg for each in keywords):
            fields = {each.arg: each.value for each in keywords}
        case _:
            return f"{ast.unparse(node):.60} (no literal: {path.name}:{node.lineno})", 1
    found = [_literal(each, names, path) for each in (items or fields.values())]
    size = 1 + sum(each for _, each in found)
    if size > _MAX_VALUES:
        raise FileFormatError(
            f"Cannot read settings from {path}: line {node.lineno} has more than {_MAX_VALUES:,} values."
        )
    values = [value for value, _ in found]
    is_dict = isinstance(node, ast.Dict | ast.Call)
    return (dict(zip(fields, values, strict=True)) if is_dict else values), size
