"""Marks: moments of a run between two events of the allocator."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum


class MarkKind(StrEnum):
    """What a mark in the trace stands for."""

    FORWARD = "forward"  # an outermost module was called
    BACKWARD = "backward"  # a backward pass began
    OPTIMIZER_STEP = "optimizer step"  # an optimizer has stepped (or its scaler skipped it)
    TRAINING_STEP = "training step"  # every optimizer in use has stepped once more
    CAPTURE_BEGIN = "capture begin"  # a CUDA graph: until it ends, no cached memory is released
    CAPTURE_END = "capture end"
    MEM_POOL_GONE = "mem pool gone"  # a torch.cuda.MemPool was deleted: its cached memory is released
    RESET_PEAK = "reset peak"  # the script called torch.cuda.reset_peak_memory_stats
    EMPTY_CACHE = "empty cache"  # the script called torch.cuda.empty_cache
    SIZE_BOUND = "size bound"  # an operator's size, which depends on GPU values, is set to its upper bound
    EVALUATION = "evaluation"  # the outermost module just called is in eval mode, or records no gradients
    BATCH = "batch"  # the script asked a DataLoader for a batch
    SERVED = "served batch"  # a DataLoader gives the script a batch that memfit has chosen
    LOADER_END = "loader end"  # a DataLoader had no more batches
    SAVE = "save"  # a state_dict was made, or written to a file
    LOAD = "load"  # a file with a state_dict was read


class UntrainedForwardReason(IntEnum):
    """Why a forward may be part of an evaluation, or says nothing about it."""

    EVALUATES = 0
    """An optimizer has parameters of the module, which is in eval mode and records no gradients."""
    EVAL_MODE = 1
    """The same, but it records gradients: a network may also be trained in eval mode."""
    NO_GRADIENTS = 2
    """It records none, or no optimizer has its parameters: an average, a teacher, or a roll-out."""
    NO_PARAMETERS = 3
    """It has no parameters: a loss or a metric, which belongs to the forward before it."""


class SaveKind(IntEnum):
    """What a script makes of its state."""

    STATE = 0
    """A ``state_dict``, which may stay in memory."""
    FILE = 1
    """A file."""
    FILE_BESIDE = 2
    """A file, in a thread beside the one that trains: a checkpoint that is saved while training goes on."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment between two events: just before ``events[position]``."""

    position: int
    kind: MarkKind
    index: int
    """For ``OPTIMIZER_STEP`` the optimizer; for ``MEM_POOL_GONE`` the pool, whose PyTorch id is (0, index);
    for ``SIZE_BOUND`` the note in ``Trace.notes``; for ``EVALUATION`` an ``UntrainedForwardReason``; for
    ``BATCH`` and ``LOADER_END`` the loader, counted in the order in which they were first read; for
    ``SERVED`` 4 times the scan in ``Trace.scans`` plus the batch in its ``served``, or plus 3 for the
    loader's own next batch; for ``SAVE`` a ``SaveKind``; otherwise the number of earlier marks of this
    kind."""
