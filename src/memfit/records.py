"""The records that stages hand to each other; nothing here computes anything.

                  Device ─┐
    ghost, capture ───────┴─> Trace ──> Timeline ──> DryRun ──> report
                              events     bytes        the answer
                              + tables   per event

Bytes are ints, times are microseconds where PyTorch's history gives them and seconds elsewhere.
"""

from __future__ import annotations  # numpy is named here and not imported: a script may yet set its threads

from collections.abc import Mapping  # noqa: TC003 - msgspec asks for the types of fields
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


DEFAULT_POOL = (0, 0)
"""How PyTorch numbers the pool that is no private one."""
ARENA = "memfit.arena"
"""``backend`` in the settings of a trace that ``memfit.arena`` has logged: all but segments."""


class Provenance(StrEnum):
    """Where a figure comes from. Ordered from the surest; a total shows the worst of its terms."""

    EXACT = "exact"  # from the allocator's own history
    MEASURED = "measured"  # from a real device
    SIMULATED = "simulated"  # an exact replay under other settings
    ASSUMED = "assumed"  # a rule or a table, named where it is used


def worst(*provenances: Provenance) -> Provenance:
    """Return the provenance of a total: that of its least sure term.

    >>> worst(Provenance.EXACT, Provenance.MEASURED).value
    'measured'
    """
    return max(provenances, key=list(Provenance).index)


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
    """What an allocation is for. Live objects told the first; ``explain`` tells the last from lifetimes."""

    UNKNOWN = 0
    PARAMETER = 1
    GRADIENT = 2
    OPTIMIZER_STATE = 3
    BUFFER = 4
    WORKSPACE = 5
    """What a library works in (cuDNN), or keeps from a forward to its backward, in a size that it names."""
    ACTIVATION = 6
    """Saved for the backward by autograd's graph."""
    INPUT = 7
    """Made outside modules, before a forward: the batch, data."""
    OUTPUT = 8
    """Computed in a forward or a loss, saved by no graph: the script holds it."""
    TEMPORARY = 9
    """Gone before its phase is: what ops work in, gradients of activations."""
    COMMUNICATION = 10
    """What ``torch.distributed`` makes: buckets, gathered parameters, gradients to be scattered."""
    RECOMPUTED = 11
    """An activation that a checkpoint did not keep, computed again for its backward."""


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
    """Not PyTorch's: an allocation that is older than the history and outlives it. It moves nothing; those of
    a trace come first, and what is allocated counts up to what was there then."""


@dataclass(frozen=True, slots=True)
class Events:
    """The allocator's history in the order it happened, as columns of equal length ``n``."""

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
    """Index into ``Trace.labels``; -1 where nothing is known."""
    stack: npt.NDArray[np.int32]
    """Index into ``Trace.stacks``; -1 where Python had no frame."""
    category: npt.NDArray[np.uint8]
    """``Category`` of the block, on ``ALLOC`` and ``EARLIER`` events."""
    pool: npt.NDArray[np.int32] | None = None
    """Index into ``Trace.pools``: the pool that the memory is of, or was asked from. None where the history
    does not tell."""
    tensor: npt.NDArray[np.int32] | None = None
    """Index into ``Trace.tensors``, on those events: what held it; -1 where nothing is known. None where
    nobody asked."""

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True, slots=True)
class Label:
    """What the script was doing: shared by every event under it."""

    phase: Phase
    module: str
    """Path of the module, as ``named_modules`` spells it (``layers.0.mlp``); empty outside modules."""
    op: str
    """In the backward, the autograd node (``MmBackward0``); elsewhere what a graph shows (``Addmm``), or what
    of PyTorch was called (``AdamW.step (foreach)``, ``clip_grad_norm_/_get_total_norm``); or empty."""
    stack: int
    """In the backward, the forward's stack that made the node: index into ``Trace.stacks``, or -1."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of Python."""

    file: str
    line: int
    function: str
    user: bool
    """Whether the file is the user's own: not the standard library, not an installed package."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """What held an allocation, when it was asked."""

    module: str
    """Whose it is, as in ``Label``; empty for what no module owns."""
    name: str
    """``weight``, ``weight.grad``, ``weight.exp_avg``; for what a graph saved, ``mat1 of AddmmBackward0``."""
    dtype: str
    """``float32``, as ``torch`` spells it."""
    shape: tuple[int, ...]


class MarkKind(StrEnum):
    """What a mark in the trace stands for."""

    FORWARD = "forward"  # an outermost module was called
    BACKWARD = "backward"  # a backward pass began
    OPTIMIZER_STEP = "optimizer step"  # an optimizer has stepped (or its scaler skipped it)
    TRAINING_STEP = "training step"  # every optimizer in use has stepped once more
    CAPTURE_BEGIN = "capture begin"  # a CUDA graph: until it ends, no cached memory is given back
    CAPTURE_END = "capture end"
    MEM_POOL_GONE = "mem pool gone"  # a torch.cuda.MemPool was deleted: its cached memory is given back
    RESET_PEAK = "reset peak"  # the script called torch.cuda.reset_peak_memory_stats
    EMPTY_CACHE = "empty cache"  # the script called torch.cuda.empty_cache


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment between two events: just before ``events[position]``."""

    position: int
    kind: MarkKind
    index: int
    """Which optimizer, for ``OPTIMIZER_STEP``; which pool, for ``MEM_POOL_GONE``, as PyTorch numbers it:
    (0, index); otherwise how many of this kind came before."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment at the end of the trace."""

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
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """Something the reader of a figure must know."""

    provenance: Provenance
    text: str
    where: str = ""
    """``file:line``, or empty."""
    sizes: bool = False
    """Whether bytes depend on it: figures that it touches are no surer than it is."""
    workspaces: bool = False
    """Of those, whether it touches ``Category.WORKSPACE`` and totals alone."""
    objects: bool = False
    """Of those, whether it touches what live objects hold, too: parameters and all that follows them."""
    activations: bool = False
    """Of ``workspaces``, whether graphs saved some: it touches ``Category.ACTIVATION``, too."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of bytes and where it comes from."""

    bytes: int
    provenance: Provenance
    source: str = ""


class Machine(StrEnum):
    """What a trace was made on."""

    GHOST = "ghost"  # a stand-in CUDA runtime: nothing was computed
    CARD = "card"  # a real GPU
    REHEARSAL = "rehearsal"  # a recording with the ghost in the card's place: it measures nothing
    UNKNOWN = "unknown"  # a snapshot does not say
    CPU = "cpu"  # no GPU is meant: tensors of the CPU


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The device a trace was made on, and what of it was taken before the allocator came."""

    name: str
    total: Figure
    """As cudaMemGetInfo reports it."""
    context: Figure
    """CUDA context and libraries of this process, outside PyTorch's allocator."""
    in_use: int
    """Bytes held by other processes (a desktop, another job)."""
    machine: Machine = Machine.GHOST


@dataclass(frozen=True, slots=True)
class ScriptEnd:
    """How the run of the script ended."""

    reason: str
    """``steps`` (stopped after the steps asked for), ``end`` (its own end), ``exception``, ``out of memory``
    or ``interrupted``."""
    exit_code: int
    exception: str = ""
    """The exception as Python prints it below the traceback."""
    where: str = ""
    """``file:line`` of the innermost user frame of the exception, or empty."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of a script, as PyTorch's caching allocator saw it."""

    events: Events
    labels: tuple[Label, ...]
    stacks: tuple[tuple[int, ...], ...]
    """Each stack is indices into ``frames``, innermost first, PyTorch's own frames left out."""
    frames: tuple[Frame, ...]
    marks: tuple[Mark, ...]
    segments: tuple[Segment, ...]
    device: DeviceUse
    end: ScriptEnd
    settings: Mapping[str, str]
    """The allocator's settings in force, in the names of ``PYTORCH_ALLOC_CONF``; the whole string under
    ``conf``."""
    statistics: Mapping[str, int]
    """``torch.cuda.memory_stats()`` at the end, flat: the referee of every figure derived from the events."""
    versions: Mapping[str, str]
    command: tuple[str, ...]
    notes: tuple[Note, ...] = ()
    pools: tuple[tuple[int, int], ...] = ()
    """As PyTorch numbers them: the default pool, then the private ones (of CUDA graphs and
    ``torch.cuda.MemPool``) in the order in which they come. Empty where the history does not tell."""
    tensors: tuple[Tensor, ...] = ()
    """What held allocations."""


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
    """For those, the index of their ``FREE_REQUESTED``; ``n`` if there was none; -1 elsewhere."""


@dataclass(frozen=True, slots=True)
class Term:
    """One row of the summary."""

    name: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class Place:
    """A moment of the run, in the user's terms."""

    step: int
    """Training step, from 1; 0 before the first."""
    phase: Phase
    module: str
    op: str
    line: str
    """``file:line``, or empty."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """An allocation that failed for good."""

    place: Place
    requested: int
    free: int
    """Bytes the device still had free."""
    shortfall: int
    """Bytes missing, had the allocator's cache been of no use: ``segment size - free``."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Whether a training step leaves memory as it found it, judged at the end of each step."""

    steady_from: int | None
    """The first step that ended with as much held as every later one; None if the last two differ."""
    bytes_per_step: int
    """Bytes requested and held at the end of the last step, less those at the end of the one before; for
    a leak, of those alone that have outlived a whole step."""
    line: str
    """``file:line`` that holds most of what leaked; otherwise empty."""
    leak: bool
    """Whether what grows outlives the step that allocated it. Otherwise it may be batches of varying size."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What lowers what a run needs: it was tried."""

    what: str
    how: str
    """What to write."""
    costs: str
    saves: Figure
    """Bytes of the process at its peak, beyond what the advice above it saves."""
    needs: Figure
    """Bytes of the process at its peak, with it and all advice above it."""
    fits: bool | None
    """Whether the run then fits its device; None where it has none."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """The answer to: what would this script use?"""

    verdict: str
    """``fits``, ``does not fit`` (an allocation failed and the script carried on), ``out of memory``, or
    ``unknown``: the script failed or was interrupted, or this is a snapshot, which names no device."""
    device: DeviceUse
    steps: int
    peak_allocated: int
    peak_reserved: int
    peak_process: Figure
    peak_place: Place
    terms: tuple[Term, ...]
    """Rows that sum to the process's peak, outermost last."""
    out_of_memory: OutOfMemory | None
    growth: Growth
    end: ScriptEnd
    notes: tuple[Note, ...]
    versions: Mapping[str, str]
    command: tuple[str, ...] = field(default=())
    advice: tuple[Advice, ...] | None = None
    """What would lower the peak; None where nobody asked."""
    in_all: Figure | None = None
    """Bytes of the process at its peak where memory does not end, if that is known: advice counts from it."""
    untried: ScriptEnd | None = None
    """Why advice that needs a run of its own is missing: how the script ended, or that run (``refused``: it
    could not be run, or not with what was to be tried)."""
