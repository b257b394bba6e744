"""Which GPUs run a script, as written or under a plan."""

from collections.abc import Mapping
from dataclasses import dataclass

from memfit.records.result import PrintedResult
from memfit.records.script_plan import ScriptPlan


@dataclass(frozen=True, slots=True, repr=False)
class GpusFor(PrintedResult):
    """A script on every GPU of the table."""

    plans: tuple[ScriptPlan, ...]
    """A GPU each, in ascending order of their memory, which is the plan's budget."""
    failed: Mapping[str, str]
    """By GPU: why the script as written does not run on it, such as a PyTorch without kernels for it."""
    command: tuple[str, ...]
    versions: Mapping[str, str]
