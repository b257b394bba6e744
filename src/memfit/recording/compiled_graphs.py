"""Label the graphs that ``torch.compile`` runs, and count the steps of compiled optimizers.

    region     one call of a compiled function, from entry to return: memfit's hooks are suspended
    graph      one of the graphs that the function was split into: labelled like a module

A region calls its graphs, with plain Python between them where the graph breaks. memfit wraps the entries of
regions and graphs, and changes nothing inside them: Dynamo compiles the same code as without memfit.

Everything is installed when the script itself first imports ``torch._dynamo``.
"""

import gc
import re
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.patching.after_import import call_after_import
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.event_labels import LabelBook
from memfit.recording.label_running_modules import RunningModuleLabeller, any_output_requires_grad
from memfit.recording.memory_owners import MemoryOwners
from memfit.recording.training_steps import TrainingStepTracker
from memfit.records import Phase

_RESUMED = re.compile(r"torch_dynamo_resume_in_(?P<name>.+)_at_(?P<line>\d+)")
_REGION = Patch("torch._dynamo.eval_frame:OptimizeContext", "__call__", why="learn when compiled code runs")
_CAPTURE = Patch(
    "torch._dynamo.convert_frame",
    *("fullgraph_capture", "get_traced_fn"),
    why="suspend its hooks while code is only traced",
)
_EXPORT = Patch(
    "torch._dynamo.functional_export",
    *("fullgraph_capture", "get_traced_fn"),
    why="suspend its hooks while code is only traced",
)
_GRAPH = Patch("torch._dynamo.output_graph:OutputGraph", "call_user_compiler", why="label compiled graphs")
_OPTIMIZER = Patch(
    "torch._dynamo.variables.optimizer:OptimizerVariable", "call_method", why="count steps in compiled code"
)
_RANGE = Patch("torch.autograd.profiler:record_function", "__enter__", "__exit__", why="count compiled steps")
_ANY_HOOK = Patch(
    "torch.nn.modules.module",
    "_has_any_global_hook",
    why="hide its hooks when PyTorch warns the author of global hooks, on each call of a compiled module",
)
_STEP = "Optimizer.step#"  # prefix of the profiler range that torch.optim opens for every step
_STEPPING = "memfit_stepping"  # attribute with the optimizers of a graph that is being traced
_COMPILES = "_torchdynamo_orig_callable"  # attribute of a compiled function with the original one
BEFORE_FORWARD = (Phase.SETUP, Phase.INPUT, Phase.BETWEEN)
NEVER_COMPILED = "memfit.ghost", "memfit.patching", "memfit.recording", "memfit.run"
"""What runs in a region only with memfit, in plain Python. Strategies are compiled, as on a card."""


@dataclass
class _CompiledGraph:
    """A compiled graph."""

    name: str
    """``compiled graph 0 (GPT.forward, train.py:12)``."""
    optimizers: "weakref.WeakSet[Optimizer]" = field(default_factory=weakref.WeakSet)
    """Optimizers that step in the graph."""
    has_run: bool = False


class CompiledCodeWatcher:
    """Watches compiled code in this process.

    Args:
        book: holds the labels.
        hooks: the hooks to suspend while compiled code runs.
        steps: counts the steps of optimizers.
        modules: labels modules; None to count steps only.
        owners: to which the arguments of each graph that are parameters are added.
    """

    def __init__(
        self,
        book: LabelBook,
        hooks: InstalledHooks,
        steps: TrainingStepTracker,
        modules: RunningModuleLabeller | None,
        owners: MemoryOwners,
    ) -> None:
        self._book = book
        self._hooks = hooks
        self._steps = steps
        self._modules = modules
        self._owners = owners
        self._graphs: list[_CompiledGraph] = []
        self._codes: Counter[CodeType] = Counter()
        self._differentiable: dict[int, bool] = {}  # thread -> whether a graph of its region has a backward

    def install(self) -> None:
        """Start watching when the script first imports ``torch._dynamo``."""
        self._hooks.on_removal(call_after_import("torch._dynamo", self._watch))

    def summary(self) -> str:
        """Return one sentence about the compiled graphs; empty if there are none."""
        if not self._graphs:
            return ""
        recompiled = self._codes.total() - len(self._codes)
        text = f"torch.compile made {len(self._graphs)} graph{'s' * (len(self._graphs) != 1)}"
        if recompiled:
            text += f", {recompiled} of them by recompiling code"
        return f"{text}. Allocations in compiled code are labelled with the graph that made them."

    def _watch(self) -> None:
        from torch._dynamo import trace_rules
        from torch._dynamo.eval_frame import OptimizeContext

        for package in NEVER_COMPILED:
            trace_rules.add(package)
        self._hooks.wrap(_REGION, "__call__", self._make_region)
        for capture in (_CAPTURE, _EXPORT):
            for name in capture.names if capture.owner in sys.modules else ():
                self._hooks.wrap(capture, name, self._suspended)
        self._hooks.wrap(_GRAPH, "call_user_compiler", self._compile)
        self._hooks.wrap(_OPTIMIZER, "call_method", self._trace_optimizer)
        self._hooks.wrap(_RANGE, "__enter__", self._enter_range)
        self._hooks.wrap(_RANGE, "__exit__", self._leave_range)
        self._hooks.wrap(_ANY_HOOK, "_has_any_global_hook", self._suspended)
        for context, function in _existing_contexts(OptimizeContext):
            context.enter_exit_hooks.append(_RegionHook(self._enter_region, function))

    # -- regions ------------------------------------------------------------------------------

    def _make_region(self, original: Callable[..., Any], context: Any, function: Any) -> Any:
        """Have a context of ``torch.compile`` report when its function is entered and left."""
        entries = context.enter_exit_hooks
        entries[:] = [entry for entry in entries if not isinstance(entry, _RegionHook)]
        entries.append(_RegionHook(self._enter_region, function))
        return original(context, function)

    def _suspended(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Suspend memfit's hooks while a function runs."""
        with self._hooks.suspended():
            return original(*args, **options)

    def _enter_region(self, function: Any) -> Callable[[], None]:
        if self._hooks.removed:
            return lambda: None
        module: Any = getattr(function, "__self__", None)
        thread = threading.get_ident()
        outer = self._differentiable.get(thread, False)
        self._differentiable[thread] = False
        modules = self._modules if isinstance(module, torch.nn.Module) else None
        if _in_compiled_autograd():
            modules = None  # the module is a backward traced by compiled autograd, not part of the model
        if modules is not None:
            modules.enter(module)
        self._hooks.suspend()

        def leave() -> None:
            self._hooks.resume()
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
        """Return the optimizer of a step in plain Python inside a region, where its hooks are suspended."""
        if not self._hooks.are_suspended or not profiled.name.startswith(_STEP):
            return None
        optimizer = step.f_locals.get("self")
        return optimizer if isinstance(optimizer, Optimizer) else None

    # -- graphs -------------------------------------------------------------------------------

    def _trace_optimizer(
        self, original: Callable[..., Any], variable: Any, tx: Any, name: str, *args: Any
    ) -> Any:
        result = original(variable, tx, name, *args)
        if name == "_init_group":  # every step begins by calling it, for each parameter group
            vars(tx.output).setdefault(_STEPPING, []).append(variable.value)
        return result

    def _compile(self, original: Callable[..., Any], output: Any, *args: Any) -> Any:
        code = output.root_tx.f_code
        source = "compiled autograd" if _in_compiled_autograd() else _describe_code(code)
        graph = _CompiledGraph(f"compiled graph {len(self._graphs)} ({source})")
        graph.optimizers.update(vars(output).pop(_STEPPING, ()))
        self._graphs.append(graph)
        self._codes[code] += 1
        with self._steps.tracing():
            compiled = original(output, *args)

        def run(*inputs: Any, **keywords: Any) -> Any:
            return self._run(graph, compiled, inputs, keywords)

        return run

    def _run(
        self,
        graph: _CompiledGraph,
        compiled: Callable[..., Any],
        inputs: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        if self._hooks.removed:
            return compiled(*inputs, **keywords)
        if not graph.has_run:
            graph.has_run = True
            parameters = [value for value in inputs if isinstance(value, torch.nn.Parameter)]
            self._owners.record_parameters(self._book.moment(), parameters)
        for optimizer in graph.optimizers:
            self._steps.enter_optimizer(optimizer)
        before = self._book.current()
        label = self._book.labels[before]
        differentiable = torch.is_grad_enabled() and any_output_requires_grad(inputs)
        phase = label.phase
        begins_forward = differentiable and phase in BEFORE_FORWARD and not self._steps.in_backward
        if begins_forward:
            phase = Phase.FORWARD
            self._steps.enter_forward()
        since = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._book.use(self._book.intern(phase, label.module, graph.name))
        try:
            result = compiled(*inputs, **keywords)
        finally:
            self._book.use(before)
        if differentiable and any_output_requires_grad(result):
            self._differentiable[threading.get_ident()] = True
            if self._modules is not None:
                self._modules.claim((result,), since, label.module, sys._getframe(2), graph.name)
            if begins_forward:
                self._steps.enter(Phase.LOSS)
        for optimizer in list(graph.optimizers):
            self._steps.leave_optimizer(optimizer)
        return result


class _RegionHook(partial[Callable[[], None]]):
    """Called by a context of ``torch.compile`` on entry; the returned function is called on exit."""


def _existing_contexts(kind: type) -> Iterator[tuple[Any, Any]]:
    """Yield the contexts of functions compiled before, each with its function."""
    for candidate in gc.get_objects():
        if type(candidate) is FunctionType and _COMPILES in vars(candidate):
            for cell in candidate.__closure__ or ():
                if isinstance(cell.cell_contents, kind):
                    yield cell.cell_contents, vars(candidate)[_COMPILES]


def _in_compiled_autograd() -> bool:
    """Return whether the code being called or compiled is a backward traced by compiled autograd."""
    from torch._dynamo import compiled_autograd

    return compiled_autograd.in_compiled_autograd_region


def _describe_code(code: CodeType) -> str:
    """Return the function and line that a graph was compiled from: ``GPT.forward, train.py:12``.

    >>> _describe_code(compile("0", "/home/me/train.py", "exec"))
    '<module>, train.py:1'
    """
    name, line = code.co_qualname, code.co_firstlineno
    if resumed := _RESUMED.search(name):
        name, line = name.replace(resumed[0], resumed["name"]), int(resumed["line"])
    return f"{name.rpartition('<locals>.')[2]}, {Path(code.co_filename).name}:{line}"
