"""Host memory that is not pinned, of what an optimizer updates: its parameters, gradients and state."""

from collections.abc import Hashable, Iterable

import torch
from torch.optim import Optimizer

from memfit.recording.label_running_modules import tensors_in_containers
from memfit.recording.optimizer_accessors import parameters_of
from memfit.recording.tensor_names import local_piece_of_dtensor


class HostTensors:
    """The largest sum of such memory so far; memory that PyTorch's allocator pins is counted there."""

    def __init__(self) -> None:
        self.peak = 0
        """Bytes."""
        self._held: dict[Hashable, dict[int, int]] = {}

    def after_step(self, optimizer: Optimizer) -> None:
        """Count what an optimizer holds, in the place of what it held before."""
        parameters = {*parameters_of(optimizer), *optimizer.state}
        held = [parameters, [each.grad for each in parameters], list(optimizer.state.values())]
        self.hold(id(optimizer), tensors_in_containers(held))

    def hold(self, holder: Hashable, tensors: Iterable[torch.Tensor]) -> None:
        """Count the tensors of a holder, in the place of those that it had before."""
        storages = (
            tensor.untyped_storage()
            for tensor in map(local_piece_of_dtensor, tensors)  # a DTensor has no storage of its own
            if tensor.is_cpu and tensor.dim() and not tensor.is_pinned()
        )
        self._held[holder] = {each.data_ptr(): each.nbytes() for each in storages}
        every: dict[int, int] = {}
        for held in self._held.values():
            every |= held
        self.peak = max(self.peak, sum(every.values()))
