"""Optimizer state that waits on the host, and is on the device only while its parameters are updated.

    update       ── block 1 ──┬── block 2 ──┬── block 3 ──┬──
    to device    block 2 ─────┘   block 3 ──┘             │
    to host                       block 1 ──── block 2 ───┘

The order of the last update tells which block to fetch next. At most three blocks are on the device at once:
one arriving, one in use and one leaving. The optimizer's arithmetic is untouched: it runs on the device, for
one block after the other.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.errors import UsageError
from memfit.strategies.mechanisms.host_copies import HostCopies, SideStreamCopies
from memfit.strategies.mechanisms.partial_step import expect_independent, step_only
from memfit.strategies.mechanisms.state_block import StateBlock
from memfit.strategies.mechanisms.tensors import inner_tensors
from memfit.user_frame import warn_user

BLOCK_BYTES = 16 * 2**20
"""Bytes of neighbouring parameters that share a block: copying their state takes longer than its launch."""


def side_stream_copies(device: torch.device) -> HostCopies | None:
    """Return what copies between a device and the host; None for the host."""
    return SideStreamCopies(device) if device.type == "cuda" else None


class OffloadedState:
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
        expect_independent(optimizer, "optimizer_state.offload")
        self._reference = weakref.ref(optimizer)  # which may hold this object, as its step
        self._block_bytes, self._updated = block_bytes, updated
        self._blocks: dict[nn.Parameter, StateBlock | None] = {}  # None: the parameter is on the host
        self._copies: dict[torch.device, list[HostCopies]] = {}
        self._following: dict[StateBlock, StateBlock] = {}
        self._last: StateBlock | None = None
        self._current: tuple[StateBlock, list[nn.Parameter]] | None = None
        self._fetched: set[StateBlock] = set()
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
        step_only(self._optimizer, index, parameters)
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

    def _entered(self) -> Iterator[tuple[StateBlock, list[nn.Parameter]]]:
        """Move one block after the other to the device, and yield it with its parameters."""
        for _, parameters in self._parts():
            block = self._block_of(parameters)
            if block is not None:
                self._enter(block, parameters)
                yield block, parameters

    def _enter(self, block: StateBlock, parameters: list[nn.Parameter]) -> None:
        self._current = block, parameters
        block.enter(self._state_of(parameters))
        self._fetched.discard(block)

    def _leave(self, block: StateBlock, parameters: Iterable[nn.Parameter]) -> None:
        self._release()  # the block before, whose copy ran beside this block's update
        self._release = block.leave(self._state_of(parameters))
        self._current = None

    def _parts(self) -> Iterator[tuple[int, list[nn.Parameter]]]:
        """Yield all parameters in the optimizer's order, those of a block at a time, with their group."""
        for index, group in enumerate(self._optimizer.param_groups):
            self._assign(group["params"])
            for _, parameters in itertools.groupby(group["params"], self._blocks.get):
                yield index, list(parameters)

    def _block_of(self, parameters: list[nn.Parameter]) -> StateBlock | None:
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
                block, room = StateBlock(parameter.device, *copies), self._block_bytes
            self._blocks[parameter] = block
            room -= size

    def _copies_for(self, device: torch.device) -> list[HostCopies]:
        """Return the copies to and from a device, each with a stream of its own; none for the host."""
        if device not in self._copies:
            both = (side_stream_copies(device), side_stream_copies(device))
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
