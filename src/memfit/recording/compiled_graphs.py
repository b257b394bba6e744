"""What ``torch.compile`` runs: a label for each graph, and the steps of optimizers that are compiled.

    region     a compiled function runs, from entry to return: memfit's hooks are out of sight
    graph      one of the pieces it was cut into: labelled like a module, forward and backward

A region calls its graphs, and plain Python between them where a graph breaks. Dynamo finds the process
as it would without memfit: it is told where regions and graphs begin, and changes nothing in them.

Everything is put in place when the script itself first imports ``torch._dynamo``.
"""

import gc
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.ghost.patching.after_import import after_import
from memfit.recording.hooks import LiftedHooks
from memfit.recording.labels import LabelBook
from memfit.recording.module_hooks import ModuleHooks, requires_grad
from memfit.recording.steps import Steps
from memfit.records import Phase

_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>.+)_at_(?P<line>\d+)")
_CAPTURE = "fullgraph_capture", "get_traced_fn"  # of a PyTorch that has them
_STEP = "Optimizer.step#"  # what torch.optim calls the profiler range of every step
_STEPPING = "memfit_stepping"  # what a graph that is being traced keeps its optimizers under
_COMPILES = "_torchdynamo_orig_callable"  # where what torch.compile returned keeps what it was given
BEFORE_FORWARD = (Phase.SETUP, Phase.INPUT, Phase.BETWEEN)
_PACKAGE = __name__.partition(".")[0]


@dataclass
class Graph:
    """One graph that was compiled."""

    name: str
    """``compiled graph 0 (GPT.forward, train.py:12)``."""
    optimizers: "weakref.WeakSet[Optimizer]" = field(default_factory=weakref.WeakSet)
    """Those that step in it."""
    seen: bool = False
    """Whether it has run."""


class CompiledCode:
    """Watches what is compiled in this process.

    Args:
        book: where labels are kept.
        hooks: what must be out of sight of compiled code.
        steps: counts the steps of optimizers.
        modules: labels modules; None for steps alone.
        hold_parameters: called with the arguments of a graph that are parameters, once.
    """

    def __init__(
        self,
        book: LabelBook,
        hooks: LiftedHooks,
        steps: Steps,
        modules: ModuleHooks | None,
        hold_parameters: Callable[[Iterable[torch.Tensor]], None],
    ) -> None:
        self._book = book
        self._hooks = hooks
        self._steps = steps
        self._modules = modules
        self._hold_parameters = hold_parameters
        self._graphs: list[Graph] = []
        self._codes: Counter[CodeType] = Counter()
        self._differentiable: dict[int, bool] = {}  # thread -> whether a graph of its region had a backward

    def install(self) -> None:
        """Wait for the script to compile something."""
        self._hooks.on_removal(after_import("torch._dynamo", self._watch))

    def summary(self) -> str:
        """Say what was compiled, in one sentence; empty if nothing was."""
        if not self._graphs:
            return ""
        again = self._codes.total() - len(self._codes)
        made = f"torch.compile made {_count(len(self._graphs), 'graph')}"
        if again:
            made += f", {again} of them for code that it had compiled before"
        return f"{made}; what they allocate is labelled by graph."

    def _watch(self) -> None:
        from torch._dynamo import convert_frame, trace_rules
        from torch._dynamo.eval_frame import OptimizeContext
        from torch._dynamo.output_graph import OutputGraph
        from torch._dynamo.variables.optimizer import OptimizerVariable
        from torch.autograd.profiler import record_function
        from torch.nn.modules import module

        trace_rules.add(_PACKAGE)  # in plain Python inside a region, memfit's own frames are not compiled
        self._hooks.wrap(OptimizeContext, "__call__", self._make_region)
        for user in (convert_frame, sys.modules.get("torch._dynamo.functional_export")):
            for name in _CAPTURE:
                if hasattr(user, name):
                    self._hooks.wrap(user, name, self._capture)
        self._hooks.wrap(OutputGraph, "call_user_compiler", self._compile)
        self._hooks.wrap(OptimizerVariable, "call_method", self._trace_optimizer)
        self._hooks.wrap(record_function, "__enter__", self._enter_range)
        self._hooks.wrap(record_function, "__exit__", self._leave_range)
        # Asked on every call of a compiled module, to warn of hooks that its author knows nothing of.
        any_hook = module._has_any_global_hook

        def any_other_hook() -> object:
            with self._hooks.out_of_sight():
                return any_hook()  # type: ignore[no-untyped-call]

        self._hooks.replace(module, "_has_any_global_hook", any_other_hook)
        for context, function in _made_before(OptimizeContext):
            context.enter_exit_hooks.append(_Entry(self._enter_region, function))

    # -- regions ------------------------------------------------------------------------------

    def _make_region(self, original: Callable[..., Any], context: Any, function: Any) -> Any:
        """Have a context of ``torch.compile`` tell when what it compiles is entered and left."""
        entries = context.enter_exit_hooks
        entries[:] = [entry for entry in entries if not isinstance(entry, _Entry)]
        entries.append(_Entry(self._enter_region, function))
        return original(context, function)

    def _capture(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Have what is traced without being run (``torch.export``, ``aot_compile``) meet no hooks of ours."""
        with self._hooks.out_of_sight():
            return original(*args, **options)

    def _enter_region(self, function: Any) -> Callable[[], None]:
        if self._hooks.removed:
            return _nothing
        module: Any = getattr(function, "__self__", None)
        thread = threading.get_ident()
        outer = self._differentiable.get(thread, False)
        self._differentiable[thread] = False
        modules = self._modules if isinstance(module, torch.nn.Module) else None
        if _in_compiled_autograd():
            modules = None  # the module is what autograd made of a backward, and no part of the model
        if modules is not None:
            modules.enter(module)
        self._hooks.lift()

        def leave() -> None:
            self._hooks.lay()
            differentiable = self._differentiable[thread]
            self._differentiable[thread] = outer or differentiable
            if modules is not None:
                modules.leave(requires_grad=differentiable)

        return leave

    def _enter_range(self, original: Callable[..., Any], profiled: Any) -> Any:
        optimizer = self._unseen_optimizer(profiled, sys._getframe(2))
        if optimizer is not None:
            self._steps.enter_optimizer(optimizer)
        return original(profiled)

    def _leave_range(self, original: Callable[..., Any], profiled: Any, kind: Any, *error: Any) -> Any:
        result = original(profiled, kind, *error)
        optimizer = self._unseen_optimizer(profiled, sys._getframe(2))
        if optimizer is not None and kind is None:
            self._steps.leave_optimizer(optimizer)
        return result

    def _unseen_optimizer(self, profiled: Any, step: FrameType) -> Optimizer | None:
        """Return the optimizer of a step that Python makes inside a region, where its hooks are lifted."""
        if not self._hooks.lifted or not profiled.name.startswith(_STEP):
            return None
        optimizer = step.f_locals.get("self")
        return optimizer if isinstance(optimizer, Optimizer) else None

    # -- graphs -------------------------------------------------------------------------------

    def _trace_optimizer(
        self, original: Callable[..., Any], variable: Any, tx: Any, name: str, *args: Any
    ) -> Any:
        result = original(variable, tx, name, *args)
        if name == "_init_group":  # every step begins with it, for each of its groups
            vars(tx.output).setdefault(_STEPPING, []).append(variable.value)
        return result

    def _compile(self, original: Callable[..., Any], output: Any, *args: Any) -> Any:
        code = output.root_tx.f_code
        place = "compiled autograd" if _in_compiled_autograd() else _place(code)
        graph = Graph(f"compiled graph {len(self._graphs)} ({place})")
        graph.optimizers.update(vars(output).pop(_STEPPING, ()))
        self._graphs.append(graph)
        self._codes[code] += 1
        with self._steps.tracing():
            compiled = original(output, *args)

        def run(*inputs: Any, **keywords: Any) -> Any:
            return self._run(graph, compiled, inputs, keywords)

        return run

    def _run(
        self, graph: Graph, compiled: Callable[..., Any], inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        if self._hooks.removed:
            return compiled(*inputs, **keywords)
        if not graph.seen:
            graph.seen = True
            self._hold_parameters([value for value in inputs if isinstance(value, torch.nn.Parameter)])
        for optimizer in graph.optimizers:
            self._steps.enter_optimizer(optimizer)
        before = self._book.current()
        label = self._book.labels[before]
        differentiable = torch.is_grad_enabled() and requires_grad(inputs)
        phase = label.phase
        opens = differentiable and phase in BEFORE_FORWARD and not self._steps.in_backward
        if opens:
            phase = Phase.FORWARD
            self._steps.enter_forward()
        since = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._book.use(self._book.intern(phase, label.module, graph.name))
        try:
            result = compiled(*inputs, **keywords)
        finally:
            self._book.use(before)
        if differentiable and requires_grad(result):
            self._differentiable[threading.get_ident()] = True
            if self._modules is not None:
                self._modules.claim((result,), since, label.module, sys._getframe(2), graph.name)
            if opens:
                self._steps.enter(Phase.LOSS)
        for optimizer in list(graph.optimizers):
            self._steps.leave_optimizer(optimizer)
        return result


class _Entry:
    """What a context of ``torch.compile`` calls on entry; what it returns is called on the way out."""

    def __init__(self, enter: Callable[[Any], Callable[[], None]], function: Any) -> None:
        self._enter = enter
        self._function = function

    def __call__(self) -> Callable[[], None]:
        return self._enter(self._function)


def _made_before(kind: type) -> Iterator[tuple[Any, Any]]:
    """Yield the contexts of what was given to ``torch.compile`` already, each with that function."""
    for candidate in gc.get_objects():
        if type(candidate) is FunctionType and _COMPILES in vars(candidate):
            for cell in candidate.__closure__ or ():
                if isinstance(cell.cell_contents, kind):
                    yield cell.cell_contents, vars(candidate)[_COMPILES]


def _nothing() -> None:
    """Do nothing, on the way out of a region that nobody watches any more."""


def _in_compiled_autograd() -> bool:
    """Say whether what is being called or compiled is a backward that compiled autograd wrote down."""
    from torch._dynamo import compiled_autograd

    return compiled_autograd.in_compiled_autograd_region


def _place(code: CodeType) -> str:
    """Name the code that a graph was made of: ``GPT.forward, train.py:12``.

    >>> _place(compile("0", "/home/me/train.py", "exec"))
    '<module>, train.py:1'
    """
    name, line = code.co_qualname, code.co_firstlineno
    if resumed := _RESUMED.search(name):
        name, line = name.replace(resumed[0], resumed["name"]), int(resumed["line"])
    return f"{name.rpartition('<locals>.')[2]}, {Path(code.co_filename).name}:{line}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
