"""One run of a script as PyTorch's allocator saw it: events, and the tables that give them meaning.

Bytes are ints; times are microseconds if they are PyTorch's, otherwise seconds.
"""

from __future__ import annotations  # numpy is named here and not imported: a script may yet set its threads

from collections.abc import Mapping  # noqa: TC003 - msgspec asks for the types of fields
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

from memfit.devices import OBSERVED_SPREAD
from memfit.records.event_marks import Mark  # noqa: TC001 - msgspec asks for the types of fields
from memfit.records.loader_batches_and_peaks import LoaderScan  # noqa: TC001 - as below
from memfit.records.provenance import Figure, Note, worst_provenance
from memfit.records.script_end import ScriptEnd  # noqa: TC001 - as above
from memfit.records.script_options import LoaderBatchSize, ScriptOption  # noqa: TC001 - as above
from memfit.records.whole_step import WholeStep  # noqa: TC001 - as above

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


DEFAULT_POOL = (0, 0)
"""PyTorch's id of the default pool."""
ARENA = "memfit.arena"
"""``backend`` in the settings of a trace logged by ``memfit.arena``, which has no segments."""


class Phase(StrEnum):
    """What the script was doing when the allocator was called."""

    SETUP = "setup"  # before the first forward
    INPUT = "input"  # between two training steps: the next batch
    FORWARD = "forward"  # inside the outermost module call
    LOSS = "loss"  # after the forward, before the backward
    BACKWARD = "backward"
    RECOMPUTE = "recompute"  # a forward inside the backward: activation checkpointing
    OPTIMIZER = "optimizer"
    BETWEEN = "between"  # after the backward, before the optimizer: clipping, unscaling


class Category(IntEnum):
    """What an allocation is for: the first come from live objects, the last from lifetimes (``explain``)."""

    UNKNOWN = 0
    PARAMETER = 1
    GRADIENT = 2
    OPTIMIZER_STATE = 3
    BUFFER = 4
    WORKSPACE = 5
    """Scratch memory of a library (cuDNN), or what it keeps from a forward to its backward, sized by it."""
    ACTIVATION = 6
    """Saved for the backward by autograd's graph."""
    INPUT = 7
    """Allocated outside modules, before a forward: the batch."""
    OUTPUT = 8
    """Computed in a forward or a loss, saved by no graph: the script holds it."""
    TEMPORARY = 9
    """Freed before its phase ends: scratch memory of ops, gradients of activations."""
    COMMUNICATION = 10
    """Allocated by ``torch.distributed``: buckets, gathered parameters, gradients to be scattered."""
    RECOMPUTED = 11
    """An activation that a checkpoint discarded and recomputed for its backward."""
    COPY = 12
    """In the shapes of a trained model's parameters, beside the models that run: EMA and other averages."""
    HELD = 13
    """Allocated outside modules before the first training step was complete, passed to no model, and held
    until the second was, or until the end of a shorter run: a data set, a table."""


class Action(IntEnum):
    """One entry of the allocator's history, in PyTorch's words."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    SNAPSHOT = 7
    OOM = 8
    ANNOTATE = 9
    EARLIER = 10
    """memfit's own: an allocation older than the history, and alive when it begins. It moves no memory; these
    events come first in a trace, and the allocated bytes add up to those at the beginning."""


@dataclass(frozen=True, slots=True)
class Events:
    """The allocator's history in order, as columns of equal length ``n``."""

    action: npt.NDArray[np.uint8]
    """``Action``."""
    address: npt.NDArray[np.uint64]
    """Device address; for ``OOM`` the bytes the device still had free."""
    size: npt.NDArray[np.int64]
    """Bytes: as requested for ``ALLOC``, ``EARLIER``, ``FREE_*`` and ``OOM``; of the segment for
    ``SEGMENT_*``."""
    stream: npt.NDArray[np.int32]
    """Streams in the order they were first seen; 0 is the default stream's first user."""
    time: npt.NDArray[np.int64]
    """Microseconds since the Unix epoch."""
    label: npt.NDArray[np.int32]
    """Index into ``Trace.labels``; -1 if unknown."""
    stack: npt.NDArray[np.int32]
    """Index into ``Trace.stacks``; -1 if Python had no frame."""
    category: npt.NDArray[np.uint8]
    """``Category`` of the block, on ``ALLOC`` and ``EARLIER`` events."""
    pool: npt.NDArray[np.int32] | None = None
    """Index into ``Trace.pools``: the pool of the memory, or of the request. None if the history does not
    record pools."""
    tensor: npt.NDArray[np.int32] | None = None
    """Index into ``Trace.tensors``, on ``ALLOC`` and ``EARLIER`` events: what held the block; -1 if unknown.
    None if owners were not recorded."""

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True, slots=True)
class EventLabel:
    """What the script was doing; shared by many events."""

    phase: Phase
    module: str
    """Path of the module, as ``named_modules`` spells it (``layers.0.mlp``); empty outside modules."""
    op: str
    """In the backward, the autograd node (``MmBackward0``); elsewhere the op in its graph (``Addmm``),
    or the PyTorch function called (``AdamW.step (foreach)``, ``clip_grad_norm_/_get_total_norm``), or ""."""
    stack: int
    """In the backward, the forward's stack that created the node: index into ``Trace.stacks``, or -1."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of Python."""

    file: str
    line: int
    function: str
    user: bool
    """Whether the file is the user's own: not the standard library, not an installed package."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The tensor that held an allocation when its owners were recorded."""

    module: str
    """The module that owns it, as in ``EventLabel``; empty if none does."""
    name: str
    """``weight``, ``weight.grad``, ``weight.exp_avg``; of a saved tensor, ``mat1 of AddmmBackward0``."""
    dtype: str
    """``float32``, as ``torch`` spells it."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SnapshotBlock:
    """A block of a segment at the end of the trace."""

    address: int
    size: int
    requested: int
    state: str
    """``active_allocated``, ``active_awaiting_free`` or ``inactive``."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory from one cudaMalloc (or one expandable reservation) at the end of the trace."""

    address: int
    size: int
    stream: int
    kind: str
    """``small`` or ``large``: the pool it serves."""
    pool: tuple[int, int]
    expandable: bool
    blocks: tuple[SnapshotBlock, ...]


class MachineKind(StrEnum):
    """The kind of machine a trace was made on."""

    GHOST = "ghost"  # a stand-in CUDA runtime: nothing was computed
    CARD = "card"  # a real GPU
    REHEARSAL = "rehearsal"  # a recording with the ghost in place of the card: nothing was measured
    UNKNOWN = "unknown"  # a snapshot, which does not record it


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The device a trace was made on, and its memory outside PyTorch's allocator."""

    name: str
    total: Figure
    """As cudaMemGetInfo reports it."""
    context: Figure
    """CUDA context and libraries of this process, outside PyTorch's allocator."""
    in_use: int
    """Bytes held by other processes (a desktop, another job)."""
    machine: MachineKind = MachineKind.GHOST
    nccl: Figure | None = None
    """NCCL's communicators; None if the script made none, or if they are part of ``context``."""
    driver: Figure | None = None
    """What the driver reserves: no process holds it, and ``total`` does not contain it, but NVML's first
    version of ``nvmlDeviceGetMemoryInfo`` counts it as used. None if it is unknown."""
    context_spread: float = OBSERVED_SPREAD
    """How much larger an assumed context may be, as a share of it."""
    race: bool = False
    """Whether the script dropped a tensor that a collective held, so that the GPU's speed decides until when
    its memory is in use."""

    @property
    def outside(self) -> Figure:
        """This process's memory outside PyTorch's allocator: the context, and NCCL's."""
        if self.nccl is None:
            return self.context
        sure = worst_provenance(self.context.provenance, self.nccl.provenance)
        return Figure(self.context.bytes + self.nccl.bytes, sure, "CUDA context + NCCL")


@dataclass(frozen=True, slots=True)
class Shortened:
    """Something of a script that memfit made shorter."""

    where: str
    """``file:line`` that created it, or the name of an option."""
    to: int
    """Batches of each pass over a loader, or the value of the option."""
    of: int | None
    """What the script has; None for a loader that does not know its length, or an option that is no limit."""

    @property
    def is_option(self) -> bool:
        """Whether it is the option of a trainer, not a loader."""
        return bool(self.where) and ":" not in self.where


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """A process that the script started, and that used a ghost of its own or ran PyTorch without one."""

    name: str
    """The name that ``multiprocessing`` gave it, or its command."""
    peak: Figure | None
    """The most bytes that it was seen to hold, CUDA context included; None if memfit could not follow it."""
    exception: str = ""
    """What ended it, what it ran out of, or that it still ran, if memfit saw it."""


@dataclass(frozen=True, slots=True)
class JobRank:
    """One of several processes that run a script."""

    rank: int
    world_size: int
    """Number of ranks."""
    nproc: int | None = None
    """Number of ranks on each machine; None if it is not known."""

    def __str__(self) -> str:
        """Name the rank.

        >>> print(JobRank(3, 8))
        rank 3 of 8
        """
        return f"rank {self.rank} of {self.world_size:,}"


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of a script, as PyTorch's caching allocator saw it."""

    events: Events
    labels: tuple[EventLabel, ...]
    stacks: tuple[tuple[int, ...], ...]
    """Each stack is indices into ``frames``, innermost first, PyTorch's own frames left out."""
    frames: tuple[Frame, ...]
    marks: tuple[Mark, ...]
    segments: tuple[Segment, ...]
    device: DeviceUse
    end: ScriptEnd
    settings: Mapping[str, str]
    """The allocator settings in force, by their names in ``PYTORCH_ALLOC_CONF``; the whole string under
    ``conf``."""
    statistics: Mapping[str, int]
    """``torch.cuda.memory_stats()`` at the end, flat: the referee of every figure derived from the events."""
    versions: Mapping[str, str]
    command: tuple[str, ...]
    notes: tuple[Note, ...] = ()
    pools: tuple[tuple[int, int], ...] = ()
    """As PyTorch numbers them: the default pool, then the private ones (of CUDA graphs and
    ``torch.cuda.MemPool``) in order of first use. Empty if the history does not record pools."""
    tensors: tuple[TensorInfo, ...] = ()
    """The tensors that held allocations."""
    children: tuple[ChildProcess, ...] = ()
    """Processes that the script started and that used the GPU, or may have: the events are not theirs."""
    options: tuple[ScriptOption, ...] = ()
    """The script's own options that memory depends on; of one purpose, the most specific first."""
    loader: LoaderBatchSize | None = None
    """The batch size of the script's loader; None if it used none."""
    rank: JobRank | None = None
    """None for a script that ran as one process."""
    cudnn_workspaces: tuple[int, ...] = ()
    """The sizes that execution plans of cuDNN reported for their workspaces, in ascending order. Bytes."""
    pinned: int = 0
    """Most bytes of host memory that PyTorch's allocator pinned."""
    unpinned: int = 0
    """Most bytes of other host memory that optimizers' parameters, gradients and state took."""
    shortened: tuple[Shortened, ...] = ()
    """What memfit made shorter than the script has it, in the order in which the script met it."""
    scans: tuple[LoaderScan, ...] = ()
    """The loaders whose batches memfit looked through, in the order in which the script first read them."""
    step: WholeStep | None = None
    """The second training step; None if the script made only one, or this was not recorded."""
    step_fault: str = ""
    """Why the second training step could not be recorded, as a clause; empty if nothing went wrong."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes after each event of a trace, derived from the events alone."""

    allocated: npt.NDArray[np.int64]
    """``torch.cuda.memory_allocated()`` after each event."""
    reserved: npt.NDArray[np.int64]
    """``torch.cuda.memory_reserved()`` after each event."""
    block_size: npt.NDArray[np.int64]
    """Bytes of the block of an ``ALLOC`` or ``EARLIER`` (rounded, with an unsplit remainder); 0 on other
    events."""
    freed_by: npt.NDArray[np.int64]
    """On ``ALLOC`` and ``EARLIER`` events, the index of the ``FREE_REQUESTED``, or ``n``; -1 elsewhere."""


@dataclass(frozen=True, slots=True)
class ScriptLocation:
    """A moment of the run, in the user's terms."""

    step: int
    """Training step, from 1; 0 before the first."""
    phase: Phase
    module: str
    op: str
    line: str
    """``file:line``, or empty."""
    function: str = ""
    """The function that contains the line; empty for the script's top level."""
    stage: str = ""
    """The stage of a whole run; empty if it is not known."""
