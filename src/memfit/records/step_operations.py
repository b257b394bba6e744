"""One training step, operation by operation: what a planner needs to know about it."""

from dataclasses import dataclass
from typing import NamedTuple

LEAST_RECOMPUTED = 1 << 14
"""Bytes: where tensors are recomputed one by one, smaller results are kept."""
DRIVER = "cuda."
"""What the names of calls begin with that give the GPU no work: ``cuda.malloc``, ``cuda.synchronize``."""
ON_CPU = "cpu."
"""What the names of operations begin with that compute on the host's own tensors."""
NO_STREAM, EVERY_STREAM = -1, -2
"""In place of a stream's number: of what the host does alone, and of what it does when all have ended."""
_NOT_THE_SAME = ("empty", "new_empty")
"""Operations whose results others fill, perhaps past PyTorch's dispatcher."""
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")


@dataclass(frozen=True, slots=True)
class InputTensor:
    """A tensor that a script copied to the GPU, or passed to its model."""

    dtype: str
    shape: tuple[int, ...]
    rows: tuple[tuple[str, ...], ...]
    """For each of its first two dimensions: a digest of every row along it."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a script fed its model, in order."""

    copied: tuple[InputTensor, ...] = ()
    """Copied to the GPU since the script began, models apart."""
    passed: tuple[InputTensor, ...] = ()
    """Parts of such copies that the model was passed in the recorded step."""
    drawn: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """By pass over a loader that makes batches of samples: the indices of those in each batch."""
    computed: bool = False
    """Whether the model was passed, in the recorded step, what the GPU had computed."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of the first tensors that the model was passed in the recorded step."""
    random: bool = False
    """Whether the GPU drew random numbers in the recorded step outside of the model's calls."""


class Operand(NamedTuple):
    """A tensor that an operation is passed, or returns."""

    shape: tuple[int, ...]
    dtype: str
    """``float32``."""
    layout: str = ""
    """Empty if its elements are in order; ``transposed`` if they are with the last two dimensions swapped;
    ``expanded`` if some are repeated; ``permuted`` if they are dense in another order; ``host`` if they are
    on the host, and the operation copies them; else ``strided``."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of an operation, as PyTorch dispatched it. Storages are indices into ``storages``."""

    name: str
    """``aten.addmm.default``."""
    call: int
    """The innermost module call that it is part of: an index into ``calls``; -1 outside of them and in the
    backward."""
    source: int
    """In the backward, the operation in ``forward`` whose gradient it computes; -1 if that is not known, and
    in the forward."""
    reads: tuple[int, ...]
    """The storages of its arguments."""
    creates: tuple[int, ...]
    """The storages that it allocated; none for a view."""
    writes: tuple[int, ...]
    """The storages that it changed in place."""
    flops: int
    """Floating-point operations of a matrix product, a convolution or an attention; 0 for others."""
    moved: int
    """Bytes of its arguments and results."""
    dtype: str
    """``float32``: of the first result."""
    random: bool
    """Whether it draws random numbers."""
    seconds: float
    """Of processor time, where it ran on the CPU: other processes do not count. Meaningless elsewhere."""
    allocated: int
    """The most bytes allocated while it ran, counted from the beginning of the step."""
    sums: bool = False
    """Whether it is a loss that is summed over samples: ``reduction="sum"``."""
    factor: float = 1.0
    """Of a multiplication by a number, or a division by one."""
    mixed: tuple[int, ...] = ()
    """Sizes of the dimensions along which it combines elements, of operations that keep their sizes: the
    sequences of an attention, the classes of a softmax, the time of a recurrent network."""
    single: bool = False
    """Whether its result is one number. Its storage may be larger: that of a GPU's ``mse_loss`` has terms."""
    operands: tuple[Operand, ...] = ()
    """Its tensor arguments, those in lists included; unknown, and so empty, for a kernel of a compiled graph,
    as are the next fields."""
    results: tuple[Operand, ...] = ()
    """None for an operation that changes lists of tensors in place."""
    is_causal: bool = False
    """Whether it is an attention to earlier positions only."""
    launches: int = 0
    """Kernels and library calls that it issued, as the ghost counted them."""
    stream: int = 0
    """The stream that was current; or ``NO_STREAM``, ``EVERY_STREAM``."""
    waits: bool = False
    """Whether the host waited in it for its stream."""
    ranks: int = 1
    """That take part in it. A collective is ``nccl.all_reduce``: ``operands`` are what this rank sends,
    ``results`` what it receives."""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module in the forward."""

    module: str
    """Its path in the model; empty for the model itself."""
    kind: str
    """The name of its class."""
    parent: int
    """The call that made this call: an index into ``calls``; -1 for the model's."""
    first: int
    """Its first operation in ``forward``, and ``end``, the one after its last."""
    end: int
    reads: tuple[int, ...]
    """The storages of the tensors that it was passed."""
    saves: tuple[int, ...]
    """The storages that autograd saved in it for the backward, its submodules' apart; each once."""
    first_save: int
    """Its first in ``saved``, its submodules' included, and ``end_save``, the one after its last."""
    end_save: int
    last_saved: int
    """The first operation in ``forward`` that it need not run again to recompute what autograd saved in it,
    its submodules' included."""
    counts: tuple[int, ...] = ()
    """Of ``reads``, those of single integers, such as the number of tokens that transformers passes."""


@dataclass(frozen=True, slots=True)
class StepOperations:
    """The forward and the backward of one training step of a model."""

    storages: tuple[int, ...]
    """Bytes of each storage; 0 for parameters, buffers and the model's inputs, which exist anyway."""
    calls: tuple[ModuleCall, ...]
    """In the order in which they began: parents before children."""
    forward: tuple[Operation, ...]
    """The loss included."""
    backward: tuple[Operation, ...]
    saved: tuple[int, ...] = ()
    """The storages of the tensors that autograd saved in module calls, in this order."""
    saved_at: tuple[int, ...] = ()
    """For each of these, how many operations of ``forward`` had run."""
    saved_by: tuple[int, ...] = ()
    """For each of these, the operation in ``forward`` whose backward reads it."""
    carried: tuple[int, ...] | None = None
    """Storages that the step recorded before has made of its samples; None if none was recorded."""
    optimizer: int | None = None
    """Which optimizer of the script has the model's parameters, counted from 0 as they were created."""
    samples: StepInputs | None = None
    """What the script fed its models until the end of the step; None if that was not recorded."""
    compiled: bool = False
    """Whether torch.compile compiles the script's code. Then ``forward`` has what the GPU runs from one
    update to the next: Inductor's kernels, and operations outside of graphs. Modules and storages are not
    known."""


@dataclass(frozen=True, slots=True)
class OperationCounts:
    """How many operations a training step runs, up to its update."""

    forward: int
    """In the calls of the model."""
    recomputed: int
    """Of these again, for the backward."""
    backward: int | None = None
    """Besides, in the backward; None if they are not counted."""

    def __str__(self) -> str:
        """Return what is recomputed, for the user."""
        return f"{self.recomputed} of {self.forward} operations"

    def recomputes_as(self, other: "OperationCounts") -> bool:
        """Return whether another step runs and recomputes as many operations."""
        return (self.forward, self.recomputed) == (other.forward, other.recomputed)


def is_counted_operation(name: str) -> bool:
    """Return whether ``OperationCounts`` count an operation: PyTorch's checkpoints allocate empty tensors.

    >>> is_counted_operation("aten.mm.default"), is_counted_operation("aten.empty.memory_format")
    (True, False)
    """
    return not name.partition(".")[2].startswith(_NOT_THE_SAME)


def is_recomputable_operation(name: str) -> bool:
    """Return whether an operation makes the same from the same arguments, and no other process takes part.

    >>> is_recomputable_operation("aten.relu.default"), is_recomputable_operation("aten.empty_like.default")
    (True, False)
    """
    return name.partition(".")[0] not in _COLLECTIVES and is_counted_operation(name)
