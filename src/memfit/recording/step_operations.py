"""Record the operations of a model's training step: what each allocates, costs, and saves for the backward.

model(inputs) ── loss ── backward()         from ``start`` to ``stop``
  │ hooks of modules       ModuleCall: which operations belong to which module
  │ saved-tensor hooks     what autograd keeps, and for which module
  └ a dispatch mode        Operation: storages, FLOPs, bytes moved, processor time
"""

import functools
import sys
import time
import weakref
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from memfit.random_state import torch_generator_positions
from memfit.recording.operation_interception import OperationInterceptionMode
from memfit.recording.operation_of_call import operation_of_call, plain_tensors, tensors_among
from memfit.recording.tensor_storage import storage_of
from memfit.records.step_operations import ModuleCall, Operation, StepOperations

_RANDOM = torch.Tag.nondeterministic_seeded
LeftStorages = Mapping[int, weakref.ref[torch.UntypedStorage]]
"""By address: storages that a step has made of its samples, and that outlive it."""


class StepOperationRecorder:
    """Records a model's operations from ``start`` to ``stop``.

    Args:
        model: is about to be called.
        path: its own path, if it is part of a larger model.
        left: by the recorder of the step before; None if there was none.

    >>> model, inputs = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    >>> recorder = StepOperationRecorder(model)
    >>> recorder.start()
    >>> model(inputs).sum().backward()
    >>> [operation.name for operation in recorder.stop().forward[:3]]
    ['aten.t.default', 'aten.addmm.default', 'aten.relu.default']
    """

    def __init__(self, model: nn.Module, path: str = "", left: "LeftStorages | None" = None) -> None:
        self._model = model
        self._path = path
        self._storages = _Storages(model, left or {})
        self._is_first = left is None
        self._memory = _AllocatedBytes(model, self._storages)
        self._calls: list[ModuleCall] = []
        self._open: list[int] = []
        self._forward: list[Operation] = []
        self._backward: list[Operation] = []
        self._saved_storages: list[int] = []
        self._saved_at: list[int] = []
        self._saved_by: list[int] = []
        self._saved_in: list[int] = []  # the innermost call
        self._last_saved = 0  # operations of the forward before it
        self._sequence: list[int] = []  # autograd's number after each operation of the forward
        self._hooks = ExitStack()
        self.left: LeftStorages = {}
        """What the step leaves, once recording has stopped."""

    def start(self) -> None:
        """Begin to record."""
        for path, module in self._model.named_modules():
            whole = ".".join(filter(None, (self._path, path)))
            enter = functools.partial(self._enter, whole, type(module).__name__)
            for handle in (
                module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            ):
                self._hooks.callback(handle.remove)
        self._hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._saved, lambda kept: kept))
        self._hooks.enter_context(OperationInterceptionMode(self.run, watches=True))
        self._memory.start()

    def stop(self) -> StepOperations:
        """Stop recording, and return what was recorded."""
        self._hooks.close()
        step = StepOperations(
            tuple(self._storages.bytes),
            tuple(self._calls),
            tuple(self._forward),
            tuple(self._backward),
            tuple(self._saved_storages),
            tuple(self._saved_at),
            tuple(self._saved_by),
            None if self._is_first else tuple(self._storages.carried),
        )
        self.left = self._storages.alive(_made_of_samples(step))
        return step

    @property
    def has_backward(self) -> bool:
        """Whether a backward has begun."""
        return bool(self._backward)

    def _enter(self, path: str, kind: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if _in_backward():
            return
        passed = tree_leaves((args, kwargs))
        if not self._open:
            # What a later call is passed may be a result of the first, which the step allocates.
            self._storages.add_lasting(passed, but_seen=bool(self._calls))
        parent = self._open[-1] if self._open else -1
        self._open.append(len(self._calls))
        reads, now, saved = self._storages.of(passed), len(self._forward), len(self._saved_storages)
        counts = self._storages.of([each for each in passed if _is_count(each)])
        self._calls.append(ModuleCall(path, kind, parent, now, now, reads, (), saved, saved, now, counts))

    def _leave(self, *_: Any) -> None:
        if _in_backward() or not self._open:
            return
        number = self._open.pop()
        call, end_save = self._calls[number], len(self._saved_storages)
        inside = range(call.first_save, end_save)
        self._calls[number] = replace(
            call,
            end=len(self._forward),
            saves=tuple(
                dict.fromkeys(self._saved_storages[at] for at in inside if self._saved_in[at] == number)
            ),
            end_save=end_save,
            last_saved=max(call.first, self._last_saved),
        )

    def _saved(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._open and not _in_backward():
            storages = self._storages.of([tensor])
            self._saved_storages += storages
            self._saved_at += [len(self._forward)] * len(storages)
            # Autograd makes a node and saves arguments before an operation runs, and results after it.
            is_result = self._sequence and self._sequence[-1] == torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
            self._saved_by += [len(self._forward) - bool(is_result)] * len(storages)
            self._saved_in += [self._open[-1]] * len(storages)
            self._last_saved = len(self._forward)
        # A result refers to the node that is to keep it: without a backward, neither would ever be freed.
        return tensor if tensor.is_leaf else tensor.detach()

    def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and record it."""
        random = _RANDOM in operation.tags
        drawn = torch_generator_positions() if random else None
        self._memory.before()
        began = time.process_time()
        result = operation(*args, **kwargs)
        seconds = time.process_time() - began
        reads = self._storages.of(tensors_among((args, kwargs)))
        known = set(reads)
        results = self._storages.of(tensors_among(result))
        in_backward = _in_backward()
        (self._backward if in_backward else self._forward).append(
            operation_of_call(
                operation,
                args,
                kwargs,
                result,
                call=self._open[-1] if self._open and not in_backward else -1,
                source=self._source() if in_backward else -1,
                reads=reads,
                creates=tuple(each for each in results if each not in known),
                writes=tuple(known.intersection(results)) if operation._schema.is_mutable else (),
                random=random and drawn != torch_generator_positions(),
                seconds=seconds,
                allocated=self._memory.highest(),
            )
        )
        if not in_backward:
            self._sequence.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        return result

    def _source(self) -> int:
        """Return the operation whose autograd node is running."""
        node = torch._C._current_autograd_node()
        number = node._sequence_nr() if node is not None else sys.maxsize
        source = bisect_right(self._sequence, number)
        return source if source < len(self._sequence) else -1


def _made_of_samples(step: StepOperations) -> set[int]:
    """Return the storages that a step's forward creates or changes by what its model is passed."""
    samples = {storage for call in step.calls if call.parent < 0 for storage in call.reads}
    made: set[int] = set()
    for operation in step.forward:
        if not samples.isdisjoint(operation.reads) or not made.isdisjoint(operation.reads):
            made.update(operation.creates, operation.writes)
    return made


class _Storages:
    """Numbers for storages: an address that is used again gets another number."""

    def __init__(self, model: nn.Module, left: "LeftStorages") -> None:
        self._left = left
        self.carried: list[int] = []
        """Those that the step before left."""
        self.bytes: list[int] = []
        self.alive_bytes = 0
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # by address
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        self.add_lasting([*model.parameters(), *model.buffers(), *gradients])

    def add_lasting(self, leaves: list[Any], *, but_seen: bool = False) -> None:
        """Count storages as ones that exist anyway; with ``but_seen``, those that were not seen before."""
        seen = len(self.bytes) if but_seen else 0
        for number in self.of(leaves):
            if number >= seen:
                self.alive_bytes -= self.bytes[number]
                self.bytes[number] = 0

    def alive(self, numbers: set[int]) -> "LeftStorages":
        """Return those of some storages that are alive, by address."""
        return {address: end for address, (end, number) in self._alive.items() if number in numbers}

    def of(self, leaves: list[Any]) -> tuple[int, ...]:
        """Return the numbers of the tensors among some objects, each once."""
        return tuple(
            dict.fromkeys(
                self._number(storage_of(each))
                for leaf in leaves
                if isinstance(leaf, torch.Tensor)
                for each in plain_tensors(leaf)
            )
        )

    def _number(self, storage: torch.UntypedStorage) -> int:
        address = storage._cdata
        if address not in self._alive:
            # PyTorch keeps a storage's Python object for as long as the storage itself.
            end = weakref.ref(storage, functools.partial(self._freed, address))
            left = self._left.get(address)
            if left is not None and left() is storage:
                self.carried.append(len(self.bytes))
            self._alive[address] = end, len(self.bytes)
            self.bytes.append(storage.nbytes())
            self.alive_bytes += storage.nbytes()
        return self._alive[address][1]

    def _freed(self, address: int, _: object) -> None:
        self.alive_bytes -= self.bytes[self._alive.pop(address)[1]]


class _AllocatedBytes:
    """What is allocated since ``start``: of PyTorch's caching allocator if the model is on the GPU.

    Elsewhere, of the storages that are alive: an operation's own scratch memory is not known.
    """

    def __init__(self, model: nn.Module, storages: _Storages) -> None:
        self._storages = storages
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self._device: int | None = None
        if device.type == "cuda":
            self._device = device.index if device.index is not None else torch.cuda.current_device()
        self._base = 0

    def start(self) -> None:
        self._base = self._counted("current")

    def before(self) -> None:
        if self._device is not None:
            torch._C._cuda_resetPeakMemoryStats(self._device)

    def highest(self) -> int:
        return self._storages.alive_bytes if self._device is None else self._counted("peak") - self._base

    def _counted(self, moment: str) -> int:
        if self._device is None:
            return 0
        stats = torch._C._cuda_memoryStats(self._device)
        return int(stats["allocated_bytes"]["all"][moment])


def _is_count(passed: object) -> bool:
    """Return whether something that a module is passed is one integer."""
    return isinstance(passed, torch.Tensor) and passed.numel() == 1 and not passed.is_floating_point()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
