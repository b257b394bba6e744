"""Find the statements of a training loop that compute the loss, in its source.

for images, labels in loader:
images = images.to(device)            before the model's call: makes a part of the batch
outputs = model(images)          ─┐
optimizer.zero_grad()             │   left out: the loss does not depend on it
loss = criterion(outputs, labels) ─┘
loss.backward()                       what is returned: loss
"""

import ast
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

Span = tuple[int, int, int, int]
"""Where a call is in the source: first and last line, first and last column, as ``code.co_positions()``."""


@dataclass(frozen=True, slots=True)
class LossStatements:
    """The statements that compute a loss, and the loss."""

    statements: tuple[ast.stmt, ...]
    loss: ast.expr
    scaled: bool = False
    """Whether the script multiplies it by the scale of a ``GradScaler``, which is left out here."""
    changes_gradients: bool = False
    """Whether what follows the backward changes gradients, other than to clip their norm."""

    def free_names(self) -> list[str]:
        """Return the names that they read before they set them, in order."""
        return free_names((*self.statements, self.loss))


def free_names(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the names that statements and expressions read before they set them, in order."""
    found: dict[str, None] = {}
    bound: set[str] = set()
    for each in nodes:
        own = _set_within(each)
        found |= dict.fromkeys(name for name in _read(each) if name not in bound | own)
        bound |= assigned_names(each)
    return list(found)


def loss_statements(source: str, forward: Span, backward: Span) -> LossStatements | None:
    r"""Return what computes the loss between two calls of one function; None if the source does not show it.

    Args:
        source: of the file.
        forward: the call in which the model was called.
        backward: the call in which the backward began, such as ``loss.backward()``.

    >>> found = loss_statements(
    ...     "y = model(x)\nprint(y)\nloss = y.sum()\nloss.backward()\n", (1, 1, 4, 12), (4, 4, 0, 15)
    ... )
    >>> [ast.unparse(each) for each in found.statements], found.free_names()
    (['y = model(x)'], ['model', 'x'])
    """
    tree = ast.parse(source)
    to_forward, to_backward = _path(tree, forward), _path(tree, backward)
    call = _call(tree, backward)
    if call is None or not to_forward or not to_backward:
        return None
    loss, scaled = _loss(call)
    if loss is None:
        return None
    depth = 0
    while to_forward[depth][1] == to_backward[depth][1]:
        depth += 1
        if depth == min(len(to_forward), len(to_backward)):
            block, number = to_backward[-1]
            return LossStatements((), loss, scaled, _changes_gradients(block[number + 1 :]))
    block, first = to_forward[depth]
    other, last = to_backward[depth]
    if block is not other or first > last:
        return None
    changes = _changes_gradients(block[last + 1 :])
    local = _Locals([*block[first:last], loss])
    loss = local.visit(loss)
    statements = needed_for(_read(loss), [local.visit(each) for each in block[first:last]])
    if statements and (value := _value_of(loss, statements[-1])) is not None:
        return LossStatements(tuple(statements[:-1]), value, scaled, changes)
    return LossStatements(tuple(statements), loss, scaled, changes)


def _loss(call: ast.Call) -> tuple[ast.expr | None, bool]:
    """Return the loss of ``loss.backward()`` or ``fabric.backward(loss)``, and whether it is scaled there."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "backward":
        return None, False
    loss = call.args[0] if call.args else call.func.value
    if isinstance(loss, ast.Call) and isinstance(loss.func, ast.Attribute) and loss.func.attr == "scale":
        return loss.args[0], True
    return loss, False


def _value_of(loss: ast.expr, statement: ast.stmt) -> ast.expr | None:
    """Return the value of ``loss = value``; None for another statement."""
    if isinstance(loss, ast.Name) and isinstance(statement, ast.Assign):
        targets = [each.id for each in statement.targets if isinstance(each, ast.Name)]
        return statement.value if targets == [loss.id] else None
    return None


def _changes_gradients(statements: Iterable[ast.stmt]) -> bool:
    """Return whether some statements read or set gradients, or clip their values."""
    return any(
        (isinstance(each, ast.Attribute) and each.attr in ("grad", "clip_grad_value_"))
        or (isinstance(each, ast.Name) and each.id == "clip_grad_value_")
        for statement in statements
        for each in ast.walk(statement)
    )


class _Locals(ast.NodeTransformer):
    """Names what statements set before they read it, such as ``self.loss``, like a variable: ``loss``."""

    def __init__(self, nodes: Iterable[ast.AST]) -> None:
        self._set: set[str] = set()
        read: set[str] = set()
        for each in nodes:
            attributes = [one for one in ast.walk(each) if isinstance(one, ast.Attribute)]
            read |= {ast.unparse(one) for one in attributes if isinstance(one.ctx, ast.Load)} - self._set
            self._set |= {ast.unparse(one) for one in attributes if isinstance(one.ctx, ast.Store)} - read

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if ast.unparse(node) in self._set:
            return ast.Name(node.attr, node.ctx)
        return self.generic_visit(node)


def needed_for(
    names: Iterable[str],
    statements: Sequence[ast.stmt],
    *,
    known: Callable[[str], bool] = lambda _: False,
    settings: Collection[str] = (),
    methods: bool = False,
) -> list[ast.stmt]:
    """Return those of some statements on which the values of names depend.

    Args:
        names: these.
        statements: in their order.
        known: whether the value of a name is known, if only one statement sets it: that one is left out then.
        settings: names of objects whose attributes are known, whatever statements set them.
        methods: whether a call such as ``layers.append(...)`` may change the value of ``layers``.
    """
    changes = [assigned_names(each) | (_method_roots(each) if methods else set()) for each in statements]
    changes = [some.difference(settings) for some in changes]
    often = Counter(name for some in changes for name in some)
    needed = set(names).difference(settings)
    kept: list[ast.stmt] = []
    for each, changed in zip(reversed(statements), reversed(changes), strict=True):
        if changed & needed:
            kept.append(each)
            needed |= {name for name in _read(each) if often[name] > 1 or not known(name)}.difference(
                settings
            )
    return kept[::-1]


def statements_before(source: str, span: Span) -> list[ast.stmt]:
    """Return the statements of a function, or of the file, that run before the one with a call."""
    found: list[ast.stmt] = []
    for block, number in _path(ast.parse(source), span):
        if isinstance(block[number], ast.FunctionDef):
            found = []
        else:
            found += block[:number]
    return found


def is_guarded(source: str, span: Span) -> bool:
    """Return whether a call is under ``if __name__ == "__main__"``."""
    return any(
        isinstance(block[number], ast.If) and "__name__" in ast.unparse(block[number].test)  # type: ignore[attr-defined]
        for block, number in _path(ast.parse(source), span)
    )


def _method_roots(node: ast.AST) -> set[str]:
    """Return the names whose methods a statement calls, and drops what they return."""
    return {
        each.value.func.value.id
        for each in ast.walk(node)
        if isinstance(each, ast.Expr)
        and isinstance(each.value, ast.Call)
        and isinstance(each.value.func, ast.Attribute)
        and isinstance(each.value.func.value, ast.Name)
    }


def _read(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load):
            yield each.id
        elif isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name):
            yield each.target.id


def assigned_names(node: ast.AST) -> set[str]:
    """Return the names that a statement sets, or whose attributes or items it sets."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name | ast.Attribute | ast.Subscript) and isinstance(each.ctx, ast.Store):
            root: ast.expr = each
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if isinstance(root, ast.Name):
                found.add(root.id)
    return found


def _set_within(node: ast.AST) -> set[str]:
    """Return the names that a statement sets for itself before it reads them: in a ``with`` or a ``for``."""
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.comprehension):
            found |= assigned_names(each.target)
        elif isinstance(each, ast.Lambda):
            found |= {argument.arg for argument in each.args.args}
    if isinstance(node, ast.With):
        bound = set().union(*map(assigned_names, node.items))
        free: set[str] = set()
        for statement in node.body:
            free |= {name for name in _read(statement) if name not in bound}
            bound |= assigned_names(statement)
        found |= bound - free
    elif isinstance(node, ast.For):
        found |= assigned_names(node.target)
    return found


def _path(tree: ast.Module, span: Span) -> list[tuple[list[ast.stmt], int]]:
    """Return the statements around a call, outermost first: each as its block and its number there."""
    found: list[tuple[list[ast.stmt], int]] = []
    blocks: list[list[ast.stmt]] = [tree.body]
    while blocks:
        block = blocks.pop()
        for number, statement in enumerate(block):
            if _contains(statement, span):
                found.append((block, number))
                blocks = _blocks(statement)
                break
    return found


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    blocks += [handler.body for handler in getattr(statement, "handlers", [])]
    return [block for block in blocks if block and isinstance(block, list)]


def call_at(source: str, span: Span) -> ast.Call | None:
    """Return a call in a source; None if there is none."""
    return _call(ast.parse(source), span)


def _call(tree: ast.Module, span: Span) -> ast.Call | None:
    first, last, column, end = span
    for each in ast.walk(tree):
        if isinstance(each, ast.Call) and (
            (each.lineno, each.end_lineno, each.col_offset, each.end_col_offset) == (first, last, column, end)
        ):
            return each
    return None


def _contains(node: ast.stmt, span: Span) -> bool:
    first, last, column, end = span
    return (node.lineno, node.col_offset) <= (first, column) and (last, end) <= (
        node.end_lineno or 0,
        node.end_col_offset or 0,
    )
