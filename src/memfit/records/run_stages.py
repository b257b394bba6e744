"""The stages of a script's life, and what each needs."""

from dataclasses import dataclass
from enum import StrEnum

from memfit.records.provenance import Figure
from memfit.records.trace import ScriptLocation


class Stage(StrEnum):
    """What a script is doing with its model, over many steps."""

    SETUP = "setup"  # before the first forward
    LOADING = "loading"  # from reading a checkpoint to the next forward
    TRAINING = "training"
    EVALUATION = "evaluation"  # forwards without a backward, and what the script makes of their results
    SAVING = "saving"  # from asking for a state_dict to the next forward, if a file is written


@dataclass(frozen=True, slots=True)
class StageUse:
    """What one stage of a run uses, over all the times that the script is in it."""

    stage: Stage
    times: int
    """How often the script enters it."""
    allocated: int
    """Most bytes allocated in it."""
    reserved: int
    """Most bytes reserved in it, what earlier stages left in the allocator's cache included."""
    process: Figure
    """Most bytes of the process in it."""
    place: ScriptLocation | None
    """Where most was allocated; None if it never allocates more than it finds."""
    ran_out: bool
    """Whether an allocation failed in it, and the script did not recover."""
    leaves: int
    """Bytes that it allocated and that the script still held at the end of a later training step; the most of
    any time that it was entered. 0 for setup, loading and training, which are to leave something."""
    leaves_line: str
    """``file:line`` that allocated most of them; empty if there are none."""
    gradients: bool = False
    """Whether it is an evaluation with forwards that record gradients, and so keep activations."""
    resumed: bool = False
    """Whether this is a stage of the run that resumed from what the first one had written."""

    @property
    def name(self) -> str:
        """What users call it."""
        return f"{self.stage}, resumed" if self.resumed else self.stage
