"""Two runs compared: what each held at the same kind of moment, row by row."""

from dataclasses import dataclass

from memfit.records.breakdown import GroupBy
from memfit.records.printed_result import PrintedResult
from memfit.records.trace import ScriptLocation


@dataclass(frozen=True, slots=True)
class RowChange:
    """Bytes of one row (a category, module, line or op) in each run."""

    name: str
    before: int
    after: int


@dataclass(frozen=True, slots=True, repr=False)
class RunDifference(PrintedResult):
    """Two runs side by side."""

    at: str
    """The moment: ``peak``, a phase, or a training step."""
    by: GroupBy
    places: tuple[ScriptLocation, ScriptLocation]
    allocated: tuple[int, int]
    """Bytes at that moment; the rows of each run sum to them."""
    reserved: tuple[int, int]
    """The most that each run reserved."""
    outside: tuple[int, int]
    """What each process held outside PyTorch's allocator: the CUDA context and NCCL."""
    rows: tuple[RowChange, ...]
    """Largest change first; unchanged rows last."""
    names: tuple[str, str] = ("before", "after")
    """Of the runs; two ranks of one job are named as such."""
