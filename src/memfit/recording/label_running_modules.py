"""Label each thread with the module that is running, in the forward and in the backward.

Forward: global module hooks keep a stack of active modules per thread and label the thread.

Backward: kernels of the backward run on autograd's own thread, without a Python frame. So when a
module returns, the autograd graph is walked from its outputs back to the nodes that existed before the
call. Nodes that no inner module has claimed belong to it, and each gets a pre-hook that labels the
thread it runs on. Nodes are marked as claimed in their own ``metadata``: keeping them anywhere else
would keep their saved tensors alive and change what is measured.
"""

import dataclasses
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.loss import _Loss
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from memfit.patching.installed_hooks import InstalledHooks
from memfit.recording.event_labels import LabelBook
from memfit.recording.module_names import ModuleNames
from memfit.recording.training_steps import TrainingStepTracker
from memfit.records import Phase
from memfit.trace.stack_table import StackTable

CLAIMED = "memfit"
"""In a node's metadata: whether autocast was on when it was claimed."""
ACCUMULATE = "AccumulateGrad"


class RunningModuleLabeller:
    """Labels the running module, forward and backward.

    Args:
        book: holds the labels.
        stacks: holds the source lines of forwards, for the backward.
        steps: knows whether a backward pass is running, which makes a forward a recomputation, and enters the
            phase that follows an outermost module.
        on_root: called when an outermost module is entered outside the backward, with its positional
            arguments, if they are known.
        backward: label the backward by module, too, which takes longer than everything else here.
    """

    def __init__(
        self,
        book: LabelBook,
        stacks: StackTable,
        steps: TrainingStepTracker,
        *,
        on_root: Callable[[torch.nn.Module, tuple[object, ...]], None],
        backward: bool,
    ) -> None:
        self._book = book
        self._stacks = stacks
        self._steps = steps
        self._on_root = on_root
        self._by_module = backward
        self.names = ModuleNames()
        self._names_of: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._active: dict[int, list[tuple[int, int, str]]] = {}  # thread -> (label before, sequence, name)

    def install(self, hooks: InstalledHooks) -> None:
        """Hook every module of the process."""
        self.names.follow(hooks)
        hooks.add(register_module_forward_pre_hook(self._enter_hook))
        hooks.add(register_module_forward_hook(self._leave_hook, always_call=True))

    def _enter_hook(self, module: torch.nn.Module, args: tuple[object, ...]) -> None:
        if not torch.compiler.is_compiling():
            self.enter(module, args)

    def _leave_hook(self, _module: torch.nn.Module, _args: object, output: object) -> None:
        active = self._active.get(threading.get_ident())
        if torch.compiler.is_compiling() or not active:
            return
        _, since, path = active[-1]
        if torch.is_grad_enabled() and output is not None:
            self.claim((output,), since, path, sys._getframe(1))
        self.leave(requires_grad=len(active) == 1 and any_output_requires_grad(output))

    def enter(self, module: torch.nn.Module, arguments: tuple[object, ...] = ()) -> None:
        """Label the calling thread with a module that is about to run."""
        active = self._active.setdefault(threading.get_ident(), [])
        recomputing = self._steps.in_backward
        name = self._name(module)
        if not active and not recomputing:
            self._on_root(module, arguments)
        self._steps.updates.note_branches()
        if recomputing:
            phase = Phase.RECOMPUTE
        elif isinstance(module, _Loss):
            phase = Phase.LOSS
        else:
            phase = Phase.FORWARD
        active.append((self._book.current(), torch.autograd._get_sequence_nr(), name))  # type: ignore[attr-defined]
        self._book.use(self._book.intern(phase, name))

    def leave(self, *, requires_grad: bool) -> None:
        """Label the calling thread with what follows the module entered last.

        Args:
            requires_grad: whether the outputs of an outermost module may have a backward.
        """
        active = self._active[threading.get_ident()]
        before, _, _ = active.pop()
        if active or self._steps.in_backward:
            self._book.use(before)
        elif requires_grad or self._book.labels[before].phase is Phase.LOSS:
            self._steps.enter(Phase.LOSS)  # or a teacher, or the first run of a checkpoint, before the loss
        else:
            self._steps.enter(Phase.INPUT)

    def _name(self, module: torch.nn.Module) -> str:
        entry = self._names_of.get(id(module))
        if entry is None or entry[0]() is not module:
            entry = (weakref.ref(module), self.names.full_name(module))
            self._names_of[id(module)] = entry
        return entry[1]

    def claim(
        self, outputs: Iterable[object], since: int, module: str, caller: FrameType, op: str = ""
    ) -> None:
        """Label the backward of some outputs, except for nodes that are claimed already.

        Args:
            outputs: outputs that were just computed: tensors, however nested.
            since: autograd's sequence number before they were computed.
            module: path of the module that computed them.
            caller: the frame that called the module.
            op: the op of the nodes; empty for their own names.
        """
        if not self._by_module or _backward_is_compiled():
            return  # hooks on nodes would be compiled with the backward
        nodes = [tensor.grad_fn for tensor in tensors_in_containers(outputs) if tensor.grad_fn is not None]
        seen = set(nodes)
        by_autocast = torch.is_autocast_enabled("cuda")
        stack: int | None = None
        while nodes:
            node = nodes.pop()
            metadata: dict[str, Any] = node.metadata  # type: ignore[assignment]  # the stub lacks @property
            if CLAIMED not in metadata:
                metadata[CLAIMED] = by_autocast
                if stack is None:  # without the frames' locals, which would keep tensors alive
                    frames = ((each.f_code, line) for each, line in walk_stack(caller))
                    stack = self._stacks.intern(
                        (code.co_filename, line, code.co_name) for code, line in frames
                    )
                node.register_prehook(self._labeller(module, op or node.name(), stack))
            for following, _ in node.next_functions:
                if (
                    following is not None
                    and following not in seen
                    and ACCUMULATE not in following.name()
                    and following._sequence_nr() >= since  # created during the call
                ):
                    seen.add(following)
                    nodes.append(following)

    def label_backward(self, roots: Iterable[object]) -> None:
        """Label the thread of a backward when it begins, unless modules label it anyway."""
        if self._by_module or _backward_is_compiled():
            return
        for tensor in tensors_in_containers(roots):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._labeller("", "", -1))

    def _labeller(self, module: str, op: str, stack: int) -> Callable[[object], None]:
        label = self._book.intern(Phase.BACKWARD, module, op, stack)
        use = self._book.use

        def label_thread(_gradients: object) -> None:
            use(label)

        return label_thread


def _backward_is_compiled() -> bool:
    """Return whether compiled autograd is on, without importing torch._dynamo."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))


def innermost_running_module(frame: FrameType) -> torch.nn.Module | None:
    """Return the innermost module whose call is among the frames from a given one outwards."""
    call = torch.nn.Module._call_impl.__code__
    return next((each.f_locals["self"] for each, _ in walk_stack(frame) if each.f_code is call), None)


def tensors_in_containers(value: object, depth: int = 6) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth == 0 or isinstance(value, str | bytes | int | float | torch.nn.Module):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in_containers(item, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in_containers(item, depth - 1)
    elif dataclasses.is_dataclass(value):
        fields = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        for item in vars(value).values() if hasattr(value, "__dict__") else fields:  # slots have no __dict__
            yield from tensors_in_containers(item, depth - 1)


def any_output_requires_grad(output: object) -> bool:
    """Return whether any tensor in an output, however nested, requires a gradient."""
    return any(tensor.requires_grad for tensor in tensors_in_containers((output,)))
