"""Find what a script does with a GPU value that it has just read: report it, or decide by it how to go on.

    print(loss.item())                              REPORTED
    n = mask.sum().item(); ...; if n < 2: continue  STEERS: a loop, or a function, goes on otherwise
    self.last = loss.item()                         UNKNOWN: who reads it next is not seen

The value is followed by name through the source of the function that reads it, and of the callers that it is
returned to. Python's positions of instructions tell which expression reads it.

    if mask.any(): loss += loss_of(model(u), y)     decides about a branch that runs a model
    if loss.item() < best: save(model)              does not
"""

import ast
import builtins
import functools
import sys
from collections.abc import Collection, Iterator
from enum import IntEnum
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType
from typing import NamedTuple

from memfit.user_lines import is_memfit_file, is_user_file

_PRINTING = ("_tensor.py", "_tensor_str.py", "_contextlib.py", "_device.py")
"""Of PyTorch: methods in Python that only return what they read, and what may be around a call."""
_FINITE = {"isnan", "isinf", "isfinite"}
"""Stand-ins are finite, as values are in a training that goes well: such a check decides nothing else."""
_JUMPS = (ast.Break, ast.Continue, ast.Return)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LONGEST = 1 << 20  # bytes of a source file


class ReadUse(IntEnum):
    """What a value that was read decides; more certain to decide something, the larger."""

    REPORTED = 0  # nothing that is run
    UNKNOWN = 1
    STEERS = 2  # which turns of a loop, or what of a function, is run


class Branch(NamedTuple):
    """A part of a file that runs a model or a backward pass: line and column of its begin and end."""

    file: str
    begin: tuple[int, int]
    end: tuple[int, int]


def use_of_read() -> tuple[ReadUse, tuple[Branch, ...]]:
    """Return what the user's innermost code does with the value that it is reading, and with which branches.

    A read by an installed package, or inside PyTorch, is unknown.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_memfit_file(frame.f_code.co_filename):
        frame = frame.f_back
    found, branches = ReadUse.REPORTED, list[Branch]()
    while (frame := _user_frame(frame)) is not None:
        flow = _flow_in(frame.f_code.co_filename, frame.f_code, frame.f_lasti)
        if flow is None:
            break
        found = max(found, flow.use)
        branches += flow.branches
        if not flow.returned or found is ReadUse.STEERS:
            return found, tuple(branches)
        frame = frame.f_back
    return ReadUse.UNKNOWN, tuple(branches)


def running_branches(among: Collection[Branch]) -> list[Branch]:
    """Return which branches are among the frames of the calling thread."""
    return [
        branch
        for frame, line in (walk_stack(sys._getframe(1)) if among else ())
        for branch in among
        if branch.file == frame.f_code.co_filename
        and branch.begin[0] <= line <= branch.end[0]
        and (span := _span(frame.f_code, frame.f_lasti)) is not None
        and branch.begin <= span[0] <= span[1] <= branch.end
    ]


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's code, if at most methods of tensors are inside it."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if Path(frame.f_code.co_filename).name not in _PRINTING:
            return None
        frame = frame.f_back
    return frame


@functools.lru_cache(4096)
def _flow_in(file: str, code: CodeType, instruction: int) -> "_Flow | None":
    """Return what a function does with the value of an instruction; None without its source.

    Code of two files may be equal: Python does not compare their names.
    """
    source, span = _Source.read(file), _span(code, instruction)
    read = source.expression(*span) if source is not None and span is not None else None
    return None if source is None or read is None else _Flow(source, read)


def _span(code: CodeType, instruction: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the line and column where the text of an instruction begins and ends, if Python knows them."""
    line, end_line, column, end_column = next(islice(code.co_positions(), instruction // 2, None))
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return (line, column), (end_line, end_column)


class _Source:
    """The syntax tree of a file.

    ``parents`` has the node around each; ``shared`` the names that hold no value of a run's.
    """

    def __init__(self, file: str, tree: ast.Module) -> None:
        self.file = file
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        imports = [node for node in self.parents if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {(each.asname or each.name).partition(".")[0] for node in imports for each in node.names}
        self.shared = names | set(dir(builtins))
        self._functions = {node.name: node for node in self.parents if isinstance(node, ast.FunctionDef)}
        stored = {_name(node) for node in self.parents if isinstance(getattr(node, "ctx", None), ast.Store)}
        given = {node.arg for node in self.parents if isinstance(node, ast.arg)}
        self._variables = (stored | given) - self.shared - self._functions.keys()
        statements = (node for node in self.parents if isinstance(node, ast.Expr))
        self._unused = {node for statement in statements for node in ast.walk(statement)}

    @staticmethod
    @functools.cache
    def read(file: str) -> "_Source | None":
        """Parse a file; None if that is not possible."""
        try:
            text = Path(file).read_bytes()
            return None if len(text) > _LONGEST else _Source(file, ast.parse(text))
        except (OSError, SyntaxError, ValueError, RecursionError):
            return None

    def expression(self, start: tuple[int, int], end: tuple[int, int]) -> ast.expr | None:
        """Return the smallest expression around a part of the text."""
        around = [
            node
            for node in self.parents
            if isinstance(node, ast.expr | ast.stmt)
            and (node.lineno, node.col_offset) <= start
            and (node.end_lineno or 0, node.end_col_offset or 0) >= end
        ]
        node = max(around, key=lambda node: len(list(self.around(node))), default=None)
        node = getattr(node, "test", node)  # Python 3.11 reads a flag in all of ``if flag: ...``
        return node if isinstance(node, ast.expr) else None

    def runs_model(self, part: ast.AST, *within: ast.AST) -> bool:
        """Return whether code, ``within`` functions of the file, runs a backward pass or calls a model.

        A model is a variable that is called, and whose result is used.
        """
        for call in (node for node in ast.walk(part) if isinstance(node, ast.Call)):
            # self.experts[3](x) calls one of self.experts
            name = _name(call.func.value if isinstance(call.func, ast.Subscript) else call.func) or ""
            function = self._functions.get(name.removeprefix("self."), part)
            if name.endswith(".backward") or (name in self._variables and call not in self._unused):
                return True
            if function not in (part, *within) and self.runs_model(function, part, *within):
                return True
        return False

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around one, innermost first."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent


class _Flow:
    """Where a value goes in the function, or the file, around the expression that reads it."""

    def __init__(self, source: _Source, read: ast.expr) -> None:
        self.use = ReadUse.REPORTED
        self.returned = False
        self.branches: list[Branch] = []
        self._source = source
        scope = next(node for node in source.around(read) if isinstance(node, (*_FUNCTIONS, ast.Module)))
        given = ast.walk(scope.args) if isinstance(scope, _FUNCTIONS) else ()
        self._given = {node.arg for node in given if isinstance(node, ast.arg)}
        self._names: list[str] = []  # that hold it, or something that depends on it
        self._follow(read)
        loads = [(name, node) for node in ast.walk(scope) if (name := _name(node)) and _is_read(node)]
        for held in self._names:  # grows
            for name, node in loads:
                if name == held:
                    self._follow(node)

    def _follow(self, node: ast.AST) -> None:
        """Follow a value from an expression outwards, to what its statement does with it."""
        while True:
            inner, node = node, self._source.parents[node]
            self._note_branches(node, inner)
            if isinstance(node, ast.If | ast.While | ast.Match):
                self._decide(node)
            elif isinstance(node, ast.Return):
                self.returned = True
            elif isinstance(node, ast.Yield | ast.YieldFrom | ast.Lambda):
                self._lose()
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._hold(target)
            elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr | ast.For):
                self._hold(node.target)
            elif isinstance(node, ast.Expr) and isinstance(inner, ast.Call):
                self._hand_over(inner.func)
            finite = isinstance(node, ast.Call) and (_name(node.func) or "").rpartition(".")[2] in _FINITE
            if isinstance(node, ast.stmt | ast.Lambda) or finite:
                return

    def _note_branches(self, decided: ast.AST, by: ast.AST) -> None:
        """Note the branches that run a model, if an expression decides between them."""
        if isinstance(decided, ast.If | ast.IfExp) and decided.test is by:
            for branch in (decided.body, decided.orelse):
                nodes = branch if isinstance(branch, list) else [branch]
                if any(map(self._source.runs_model, nodes)):
                    begin = nodes[0].lineno, nodes[0].col_offset
                    end = nodes[-1].end_lineno or 0, nodes[-1].end_col_offset or 0
                    self.branches.append(Branch(self._source.file, begin, end))

    def _decide(self, branch: ast.If | ast.While | ast.Match) -> None:
        """Note that the value decides whether statements run."""
        inside = [*ast.walk(branch)]
        if isinstance(branch, ast.While) or any(isinstance(each, _JUMPS) for each in inside):
            self.use = ReadUse.STEERS
        self._lose()  # a step may be among them
        for each in inside:
            if isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Store):
                self._hold(each)

    def _hold(self, target: ast.AST) -> None:
        """Note that a target depends on the value."""
        if isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                self._hold(each)
            return
        while isinstance(target, ast.Subscript | ast.Starred):
            target = target.value
        name = _name(target)
        if name is None or (not isinstance(target, ast.Name) and name.partition(".")[0] in self._given):
            self._lose()
        if name is not None and name not in self._names:
            self._names.append(name)

    def _hand_over(self, called: ast.expr) -> None:
        """Note that a call got the value and returned nothing: the object may keep it for later."""
        owner = called.value if isinstance(called, ast.Attribute) else called
        root = (_name(owner) or "").partition(".")[0]
        if root in self._given:
            self._lose()
        elif root and root not in self._source.shared:
            self._hold(owner)

    def _lose(self) -> None:
        self.use = max(self.use, ReadUse.UNKNOWN)


def _name(node: ast.AST) -> str | None:
    """Return a name with its attributes (``self.best``), or None for another node."""
    if isinstance(node, ast.Attribute):
        owner = _name(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def _is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
