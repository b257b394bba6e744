"""Rewrite source so that it runs elsewhere: names of the script's become values, imports, or parts of a job.

GPT(context=args.context)     becomes     GPT(context=1024)     with     from train import GPT
"""

import ast
import builtins
import types
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.scaffold.code import Code, code_of, name_of
from memfit.scaffold.loss_statements import assigned_names

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Source that was rewritten."""

    lines: tuple[str, ...]
    imports: frozenset[str]
    unknown: tuple["UnknownName", ...]
    """Names whose values memfit cannot write as code."""


@dataclass(frozen=True, slots=True)
class UnknownName:
    """A name whose value memfit cannot write as code."""

    name: str
    kind: str
    """What the value is: ``a Tokenizer``."""


def rewrite(
    nodes: Sequence[ast.AST],
    free: Iterable[str],
    values: Mapping[str, Any],
    part_of_job: Callable[[str, Any], str | None],
    script: str,
) -> Rewritten:
    """Rewrite statements and expressions.

    Args:
        nodes: these.
        free: the names in them that are to be rewritten.
        values: by name, what the script's frame had in it.
        part_of_job: given a name and its value, returns the name in the job, or None for something else.
        script: the name under which the script can be imported.

    >>> found = rewrite(
    ...     [ast.parse("f(x, settings.width)", mode="eval").body],
    ...     ["f", "x", "settings"],
    ...     {"f": len, "x": 1.5, "settings": types.SimpleNamespace(width=3)},
    ...     lambda name, value: "batch" if value == 1.5 else None,
    ...     "train",
    ... )
    >>> found.lines
    ('len(batch, 3)',)
    """
    rewriter = _Rewriter(set(free), values, part_of_job, script)
    lines = []
    changed = set().union(*map(assigned_names, nodes))
    for name in sorted(changed.intersection(free)):
        first = ast.unparse(rewriter.visit(ast.Name(name, ast.Load())))
        lines += [f"{name} = {first}"] if first != name else []
        rewriter.leave(name)
    for node in nodes:
        visited = rewriter.visit(node)
        for each in visited if isinstance(visited, list) else [visited]:
            lines += [] if isinstance(each, ast.Pass) else ast.unparse(each).split("\n")
    return Rewritten(tuple(lines), frozenset(rewriter.imports), tuple(rewriter.unknown))


class _Rewriter(ast.NodeTransformer):
    def __init__(
        self,
        free: set[str],
        values: Mapping[str, Any],
        part_of_job: Callable[[str, Any], str | None],
        script: str,
    ) -> None:
        self._free, self._values, self._part_of_job, self._script = free, values, part_of_job, script
        self.imports: set[str] = set()
        self.unknown: dict[UnknownName, None] = {}

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if not isinstance(node.test, ast.Constant):
            return node
        return (node.body if node.test.value else node.orelse) or ast.Pass()

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.test, ast.Constant):
            return node
        return node.body if node.test.value else node.orelse

    def leave(self, name: str) -> None:
        """Rewrite a name no more: statements set it."""
        self._free.discard(name)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._chain(node, node, [])

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        names, root = [node.attr], node.value
        while isinstance(root, ast.Attribute):
            names.append(root.attr)
            root = root.value
        if not isinstance(root, ast.Name):
            return self.generic_visit(node)
        return self._chain(node, root, names[::-1])

    def _chain(self, node: ast.expr, root: ast.Name, attributes: list[str]) -> ast.AST:
        """Rewrite ``root.a.b``."""
        if root.id not in self._free or not isinstance(root.ctx, ast.Load):
            return node
        value = self._values.get(root.id, getattr(builtins, root.id, _ABSENT))
        values = [value]
        for name in attributes:
            value = _attribute(value, name)
            values.append(value)
        names = [root.id, *attributes]
        for count, each in enumerate(values):
            part = None if each is _ABSENT else self._part_of_job(names[count], each)
            if part is not None:
                return _with_attributes(ast.Name(part, ast.Load()), attributes[count:])
        if (code := self._importable(root.id, values[0])) is not None:
            self.imports |= code.imports
            return _with_attributes(ast.parse(code.text, mode="eval").body, attributes)
        for count in range(len(values) - 1, -1, -1):
            code = None if values[count] is _ABSENT else code_of(values[count], self._script)
            if code is not None:
                self.imports |= code.imports
                return _with_attributes(ast.parse(code.text, mode="eval").body, attributes[count:])
        kind = "not defined" if values[0] is _ABSENT else f"a {type(values[0]).__name__}"
        self.unknown[UnknownName(root.id, kind)] = None
        return node

    def _importable(self, name: str, value: Any) -> Code | None:
        """Return code for a module, type or function under the name that the script uses."""
        if isinstance(value, types.ModuleType) and value.__name__ != "__main__":
            plain = value.__name__ == name
            return Code(name, frozenset({f"import {value.__name__}{'' if plain else f' as {name}'}"}))
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            return name_of(value, self._script)
        return None


def is_known(value: Any, script: str) -> bool:
    """Return whether code can say what a value is: as a literal, or by an import."""
    return isinstance(value, types.ModuleType | Namespace) or code_of(value, script) is not None


def _attribute(value: Any, name: str) -> Any:
    try:
        return _ABSENT if value is _ABSENT else getattr(value, name)
    except Exception:  # noqa: BLE001 - a property of the script's may raise anything
        return _ABSENT


def _with_attributes(node: ast.expr, attributes: Sequence[str]) -> ast.expr:
    for name in attributes:
        node = ast.Attribute(node, name, ast.Load())
    return node
