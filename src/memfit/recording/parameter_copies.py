"""Find copies of a model's parameters: averages (EMA, SWA) and other weights that the script keeps beside it.

    a model that runs, and that an optimizer trains    its parameters' shapes
    all other tensors                                  copies, if there is one for every trained parameter

On the ghost no value is known, so a copy is identified by its shapes, whether it is in a module (an averaged
model) or in a list. A model that runs before the first optimizer has stepped is no copy: a teacher or a
reference model has parameters of its own. A copy that runs only later, as an average does in an evaluation,
is one.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.optim import Optimizer

from memfit.recording.label_running_modules import tensors_in_containers
from memfit.recording.memory_owners import MemoryOwners, find_live_objects, gpu_addresses_of_tensors
from memfit.recording.optimizer_accessors import parameters_of
from memfit.recording.tensor_names import local_piece_of_dtensor


class ParameterCopies:
    """Records the copies of the parameters that a script trains."""

    def __init__(self, owners: MemoryOwners) -> None:
        self._owners = owners
        self._running: weakref.WeakSet[torch.nn.Module] | None = None

    def after_first_step(self, roots: Iterable[torch.nn.Module]) -> None:
        """Remember which outermost modules have run when an optimizer has stepped for the first time."""
        if self._running is None:
            self._running = weakref.WeakSet(roots)

    def record(
        self, serial: int, optimizers: Iterable[Optimizer], outermost: Iterable[torch.nn.Module]
    ) -> None:
        """Record the copies that exist now, even if they were recorded as parameters of a model.

        Args:
            serial: of this moment.
            optimizers: those that have stepped.
            outermost: all models; the buffers of a copy remain buffers.
        """
        running = list(self._running or ())
        stepping = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
        if not running or not stepping:
            return
        with self._owners.skipping_failures():
            ids = {id(parameter) for parameter in stepping}
            trained = [[one for one in root.parameters() if id(one) in ids] for root in running]
            used = [*stepping, *(one for root in running for one in root.parameters())]
            gradients = (one.grad for one in used if one.is_leaf and one.grad is not None)
            buffers = (one for root in (*running, *outermost) for one in torch.nn.Module.buffers(root))
            states = tensors_in_containers([optimizer.state for optimizer in optimizers])
            owned = gpu_addresses_of_tensors([*used, *gradients, *buffers, *states])
            others = [
                one
                for one in find_live_objects().others
                if not owned.issuperset(gpu_addresses_of_tensors([one]))
            ]
            self._owners.record_copies(serial, tensors_copying_parameters(trained, others))


def tensors_copying_parameters(
    models: Iterable[Sequence[torch.Tensor]], others: Iterable[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield the tensors that copy the parameters of a model.

    A model is copied if there is another tensor for each of its parameters, in its shape. All tensors in
    these shapes then count as copies.

    Args:
        models: the trained parameters of each model, some of them shared: a layer that the script runs by
            itself is a model beside the one that contains it.
        others: tensors that may be copies.

    >>> weight, bias = torch.ones(2, 3), torch.ones(2)
    >>> [
    ...     tuple(one.shape)
    ...     for one in tensors_copying_parameters([[weight, bias]], [bias + 1, torch.ones(7), weight + 1])
    ... ]
    [(2,), (2, 3)]
    >>> list(tensors_copying_parameters([[weight, bias]], [weight + 1]))
    []
    """
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for other in others:
        if other.is_floating_point():
            by_shape.setdefault(local_piece_of_dtensor(other).shape, []).append(other)
    copied: set[torch.Size] = set()
    for parameters in models:
        shapes = Counter(local_piece_of_dtensor(parameter).shape for parameter in parameters)
        if all(len(by_shape.get(shape, ())) >= count for shape, count in shapes.items()):
            copied.update(shapes)
    for shape, tensors in by_shape.items():
        if shape in copied:
            yield from tensors
