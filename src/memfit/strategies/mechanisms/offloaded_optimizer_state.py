"""Optimizer state that waits on the host, and is on the device only while its parameters are updated.

    update       ── block 1 ──┬── block 2 ──┬── block 3 ──┬──
    to device    block 2 ─────┘   block 3 ──┘             │
    to host                       block 1 ──── block 2 ───┘

The order of the last update tells which block to fetch next. At most three blocks are on the device at once:
one arriving, one in use and one leaving. The optimizer's arithmetic is untouched: it runs on the device, for
one block after the other.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.errors import UsageError
from memfit.strategies.mechanisms.host_copies import HostCopier, SideStreamCopier
from memfit.strategies.mechanisms.inspect_tensors import inner_tensors
from memfit.strategies.mechanisms.optimizer_step import check_updates_are_independent, step_some_parameters
from memfit.user_lines import warn_user

BLOCK_BYTES = 16 * 2**20
"""Bytes of neighbouring parameters that share a block: copying their state takes longer than its launch."""


def host_copier_for_device(device: torch.device) -> HostCopier | None:
    """Return what copies between a device and the host; None for the host."""
    return SideStreamCopier(device) if device.type == "cuda" else None


Memory = dict[torch.dtype, torch.Tensor]
"""Bytes, by the dtype of the tensors in them: ``torch.save`` refuses memory that several dtypes share."""
_ALIGNMENT = 512  # bytes, as PyTorch's allocator aligns: kernels load vectors as they do without offload


class OptimizerStateBlock:
    """The state of some parameters: tensors whose memory moves together.

    The tensors stay the same objects. Their ``data`` is memory of the host or, while in use, of the device.
    Parameters among them (float32 copies of the model's) keep their device and shape for the sake of their
    gradients: while their values are on the host, each of their elements is the same NaN.
    """

    def __init__(self, device: torch.device, to_device: HostCopier, to_host: HostCopier) -> None:
        self.device = device
        self._to_device, self._to_host = to_device, to_host
        self._tensors: list[torch.Tensor] = []
        self._layouts: list[torch.Tensor] = []  # of the tensors, without memory
        self._on_host: Memory | None = None
        self._arriving: dict[torch.dtype, tuple[torch.Tensor, Any]] | None = None
        self._in_use: Memory | None = None
        self._target: Memory | None = None  # while the tensors' memory is being replaced
        self._nan: torch.Tensor | None = None

    def fetch(self) -> None:
        """Begin to copy the state to the device, unless it is there or on its way."""
        if self._on_host is not None and self._in_use is None and self._arriving is None:
            self._arriving = {
                dtype: self._to_device.to_device(memory) for dtype, memory in self._on_host.items()
            }

    def forget_fetched(self) -> None:
        """Free what was fetched and not used."""
        if self._arriving is not None:
            for _, copy in self._arriving.values():
                self._to_device.wait(copy)
            self._arriving = None

    def enter(self, state: list[torch.Tensor]) -> None:
        """Have the optimizer find its state, which consists of these tensors, on the device."""
        own = {id(tensor) for tensor in self._tensors}
        found = [tensor for tensor in state if id(tensor) in own]
        if len(found) < len(own):  # the state was replaced, as by load_state_dict
            self.forget_fetched()
            for tensor in found:
                tensor.data = self.value_of(tensor).to(self.device)
            self._tensors, self._layouts, self._on_host, self._in_use = [], [], None, None
            return
        self.fetch()
        if self._arriving is not None:
            for _, copy in self._arriving.values():
                self._to_device.wait(copy)
            memory = {dtype: fetched for dtype, (fetched, _) in self._arriving.items()}
            self._in_use, self._target, self._arriving = memory, memory, None
            self.complete()

    def leave(self, state: list[torch.Tensor]) -> Callable[[], None]:
        """Begin to copy the state to the host; return what waits for that and then frees device memory."""
        tensors = [tensor for tensor in state if tensor.device == self.device and _is_dense(tensor)]
        at_rest = self._in_use is None and self._on_host is not None
        if at_rest or not tensors:
            return lambda: None
        on_host, layouts = self._on_host, self._layouts
        same = list(map(id, tensors)) == list(map(id, self._tensors))
        if self._in_use is not None and on_host is not None and same:
            leaving = list(self._in_use.values())
            arriving = [on_host[dtype] for dtype in self._in_use]
        else:  # new tensors, as in the first update
            layouts = [torch.empty_like(tensor, device="meta") for tensor in tensors]
            on_host = {
                dtype: self._to_host.host_memory(sum(_padded(one) for one in layouts if one.dtype == dtype))
                for dtype in dict.fromkeys(tensor.dtype for tensor in tensors)
            }
            leaving = [_bytes_of(tensor) for tensor in tensors]
            arriving = [_bytes_of(view) for view in _views(on_host, layouts)]
        copies = [self._to_host.to_host(*pair)[1] for pair in zip(leaving, arriving, strict=True)]
        self._tensors, self._layouts = tensors, layouts
        self._on_host, self._target, self._in_use = on_host, on_host, None
        self.complete()

        def release() -> None:
            for copy in copies:
                self._to_host.wait(copy)
            leaving.clear()

        return release

    def complete(self) -> None:
        """Complete a replacement of the tensors' memory that an exception, such as Ctrl-C, interrupted."""
        if self._target is None:
            return
        for tensor, view in zip(self._tensors, _views(self._target, self._layouts), strict=True):
            is_stand_in = self._target is self._on_host and isinstance(tensor, nn.Parameter)
            tensor.data = self._stand_in(tensor) if is_stand_in else view
        self._target = None

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the memory of one of the tensors, wherever it is."""
        if self._in_use is None and self._on_host is not None:
            for own, view in zip(self._tensors, _views(self._on_host, self._layouts), strict=True):
                if own is tensor:
                    return view
        return tensor

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._nan is None:
            self._nan = torch.full((1,), math.nan, dtype=tensor.dtype, device=self.device)
        return self._nan.as_strided(tensor.size(), [0] * tensor.dim())


def _views(memory: Memory, layouts: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors in a block's memory."""
    starts = dict.fromkeys(memory, 0)
    for tensor in layouts:
        start = starts[tensor.dtype]
        own = memory[tensor.dtype][start : start + tensor.numel() * tensor.element_size()]
        yield own.view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
        starts[tensor.dtype] += _padded(tensor)


def _padded(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor in a block."""
    return -(tensor.numel() * tensor.element_size() // -_ALIGNMENT) * _ALIGNMENT


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as bytes."""
    size, start = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
    plain = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return plain.set_(tensor.untyped_storage(), start, (tensor.numel() * size,), (1,))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its memory, so that its bytes are its value."""
    return tensor.layout is torch.strided and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


class OffloadedOptimizerState:
    """Steps in an optimizer's place, and keeps the optimizer's state on the host between updates.

    Args:
        optimizer: one that updates each parameter independently of the others.
        updated: called with parameters that were updated, while they are on the device. If it is passed, the
            parameters wait on the host like their state: they are float32 copies, which no forward uses.
        block_bytes: neighbouring parameters share a block up to this size; 0: none do.

    Raises:
        UsageError: the optimizer does not, or is not known to.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        block_bytes: int = BLOCK_BYTES,
        updated: Callable[[list[nn.Parameter]], None] | None = None,
    ) -> None:
        check_updates_are_independent(optimizer, "optimizer_state.offload")
        self._reference = weakref.ref(optimizer)  # which may hold this object, as its step
        self._block_bytes, self._updated = block_bytes, updated
        self._blocks: dict[
            nn.Parameter, OptimizerStateBlock | None
        ] = {}  # None: the parameter is on the host
        self._copies: dict[torch.device, list[HostCopier]] = {}
        self._following: dict[OptimizerStateBlock, OptimizerStateBlock] = {}
        self._last: OptimizerStateBlock | None = None
        self._current: tuple[OptimizerStateBlock, list[nn.Parameter]] | None = None
        self._fetched: set[OptimizerStateBlock] = set()
        self._release: Callable[[], None] = lambda: None
        self._warned = False

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._reference()
        if optimizer is None:
            raise ReferenceError("the optimizer no longer exists")
        return optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters, as ``optimizer.step`` does, hooks included; return the closure's loss."""
        optimizer = self._optimizer
        if self._updated and (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks):
            raise UsageError(
                "optimizer_state.offload and master_weights: the optimizer has step hooks, which would find "
                "NaN in place of the float32 copies of parameters, because these are on the host. Remove the "
                "hooks, or leave out offload."
            )
        optimizer._opt_called = True  # type: ignore[attr-defined] # for schedulers
        return Optimizer.profile_hook_step(self._step_blocks)(optimizer, closure)

    def update(self, index: int, parameters: list[nn.Parameter]) -> None:
        """Update some parameters of one group, which share a block.

        The state is complete on the host after ``finish``.
        """
        if not any(parameter.grad is not None for parameter in parameters):
            return
        block = self._block_of(parameters)
        if block is None:
            self._step_only(index, parameters)
            return
        self._enter(block, parameters)
        following = self._following.get(block)
        if following is not None:
            following.fetch()
            self._fetched.add(following)
        if self._last is not None:
            self._following[self._last] = block
        self._last = block
        self._step_only(index, parameters)
        self._leave(block, parameters)

    def finish(self) -> None:
        """Have the host wait until the state is complete there, so that anything may read it."""
        self._release()
        self._release = lambda: None
        for block in self._fetched:
            block.forget_fetched()
        self._fetched.clear()
        self._last = None
        for copies in itertools.chain.from_iterable(self._copies.values()):
            copies.finish()
        if self._current is not None:  # its update was interrupted
            self._current[0].complete()

    def send_interrupted(self) -> None:
        """Move the state of an update that was interrupted to the host, as it is now."""
        if self._current is not None:
            self._leave(*self._current)
            self.finish()

    def send_all(self) -> None:
        """Move all of the state to the host, as after ``load_state_dict``, which puts it on the device."""
        for block, parameters in self._entered():
            self._leave(block, parameters)
        self.finish()

    def fetch_all(self) -> None:
        """Move all of the state back to the device, for steps without this object."""
        for _ in self._entered():
            pass
        self.finish()

    def value_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the memory of a parameter's value, wherever it is."""
        block = self._blocks.get(parameter)
        return parameter if block is None else block.value_of(parameter)

    def _step_only(self, index: int, parameters: list[nn.Parameter]) -> None:
        step_some_parameters(self._optimizer, index, parameters)
        if self._updated is not None:
            self._updated(parameters)

    def _step_blocks(self, _: Optimizer, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            for index, parameters in self._parts():
                self.update(index, parameters)
        finally:
            self.finish()
        if not self._warned and not any(self._blocks.values()):
            warn_user("optimizer_state.offload does nothing here: the parameters are on the CPU.")
        self._warned = True
        return loss

    def _entered(self) -> Iterator[tuple[OptimizerStateBlock, list[nn.Parameter]]]:
        """Move one block after the other to the device, and yield it with its parameters."""
        for _, parameters in self._parts():
            block = self._block_of(parameters)
            if block is not None:
                self._enter(block, parameters)
                yield block, parameters

    def _enter(self, block: OptimizerStateBlock, parameters: list[nn.Parameter]) -> None:
        self._current = block, parameters
        block.enter(self._state_of(parameters))
        self._fetched.discard(block)

    def _leave(self, block: OptimizerStateBlock, parameters: Iterable[nn.Parameter]) -> None:
        self._release()  # the block before, whose copy ran beside this block's update
        self._release = block.leave(self._state_of(parameters))
        self._current = None

    def _parts(self) -> Iterator[tuple[int, list[nn.Parameter]]]:
        """Yield all parameters in the optimizer's order, those of a block at a time, with their group."""
        for index, group in enumerate(self._optimizer.param_groups):
            self._assign(group["params"])
            for _, parameters in itertools.groupby(group["params"], self._blocks.get):
                yield index, list(parameters)

    def _block_of(self, parameters: list[nn.Parameter]) -> OptimizerStateBlock | None:
        if self._blocks.get(parameters[0]) is None:
            self._assign(parameters)
        return self._blocks[parameters[0]]

    def _assign(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give neighbours on the same device a block, if they have none yet."""
        block, room = None, 0
        for parameter in parameters:
            if self._blocks.get(parameter) is not None:
                block = None
                continue
            size = parameter.numel() * parameter.element_size()
            copies = self._copies_for(parameter.device)
            if not copies:
                block = None
            elif block is None or block.device != parameter.device or size > room:
                block, room = OptimizerStateBlock(parameter.device, *copies), self._block_bytes
            self._blocks[parameter] = block
            room -= size

    def _copies_for(self, device: torch.device) -> list[HostCopier]:
        """Return the copies to and from a device, each with a stream of its own; none for the host."""
        if device not in self._copies:
            both = (host_copier_for_device(device), host_copier_for_device(device))
            self._copies[device] = [copies for copies in both if copies is not None]
        return self._copies[device]

    def _state_of(self, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        """Return the tensors that move with some parameters: those of a quantised state one by one."""
        state = self._optimizer.state
        return [
            tensor
            for parameter in parameters
            for value in (*state.get(parameter, {}).values(), *([parameter] if self._updated else []))
            if isinstance(value, torch.Tensor)
            for tensor in inner_tensors(value)
        ]
