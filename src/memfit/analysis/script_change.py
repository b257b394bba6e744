"""A change under which a script is run, and the result of such a run."""

from collections.abc import Callable
from dataclasses import dataclass

from memfit.records import LoaderBatchSize, OperationCounts, ScriptEnd, StepOperations, Trace


@dataclass(frozen=True, slots=True, order=True)
class PlannedRegion:
    """A ``memfit.Region``, without the class, which needs torch."""

    modules: tuple[str, ...]
    save_ops: tuple[str, ...] = ()
    split_at: tuple[str, ...] = ()
    recompute: str = "module"

    def __repr__(self) -> str:
        """Return the Python expression that creates it."""
        named = "".join(f", {name}={value!r}" for name, value in self.settings.items() if name != "modules")
        return f"memfit.Region({self.modules!r}{named})"

    @property
    def settings(self) -> dict[str, tuple[str, ...] | str]:
        """Its modules, and what differs from the defaults."""
        given: dict[str, tuple[str, ...] | str] = {
            "modules": self.modules,
            "save_ops": self.save_ops,
            "split_at": self.split_at,
            "recompute": self.recompute if self.recompute != "module" else "",
        }
        return {name: value for name, value in given.items() if value}


@dataclass(frozen=True, slots=True, order=True)
class PlannedStrategy:
    """A strategy of a ``Plan``, without the classes, which need torch.

    >>> PlannedStrategy("sharding", (("mode", "fsdp2"), ("offload", True))).code
    "memfit.Sharding(mode='fsdp2', offload=True)"
    """

    field: str
    """The plan's field: ``checkpointing``."""
    settings: tuple[tuple[str, str | float | tuple[PlannedRegion | str, ...]], ...] = ()
    """Those that differ from their defaults."""

    @property
    def code(self) -> str:
        """The Python expression that creates it."""
        name = "".join(word.capitalize() for word in self.field.split("_"))
        return f"memfit.{name}({', '.join(f'{key}={value!r}' for key, value in self.settings)})"


@dataclass(frozen=True, slots=True)
class ScriptChange:
    """Changes under which a script is run; none of them edits the training loop."""

    strategies: tuple[PlannedStrategy, ...] = ()
    optimizer: int | None = None
    """Only models of this optimizer, counted from 0, get the strategies; None for all models."""
    fused: bool = False
    """Whether PyTorch's optimizers use ``fused=True`` if the script does not choose an implementation."""
    arguments: tuple[str, ...] = ()
    """Options of the script's own, to be written after its arguments."""
    loader: LoaderBatchSize | None = None
    """The batch size that loaders created at this line get."""
    conf: str = ""
    """``PYTORCH_ALLOC_CONF``; empty for the script's own. Settings are replayed, not run."""
    micro_batches: int = 1
    """Of so many updates of the script, only the last is made, with the gradients of all."""
    operations: bool = False
    """Whether the operations of a training step are recorded, which changes nothing for the script."""
    eager: bool = False
    """Whether ``torch.compile`` does nothing: the script runs as if it did not call it."""

    def __or__(self, other: "ScriptChange") -> "ScriptChange":
        """Return both changes together."""
        return ScriptChange(
            tuple(sorted({*self.strategies, *other.strategies})),
            self.optimizer if other.optimizer is None else other.optimizer,
            self.fused or other.fused,
            self.arguments + other.arguments,
            other.loader or self.loader,
            other.conf or self.conf,
            self.micro_batches * other.micro_batches,
            self.operations or other.operations,
            self.eager or other.eager,
        )


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a run that completed."""

    trace: Trace
    models: tuple[str, ...] = ()
    """Models that strategies were applied to: the class of each, and the line that creates its optimizer."""
    shares: tuple[int, ...] = ()
    """By rank, the bytes of parameters whose optimizer state it holds; empty if all hold as much."""
    operations: StepOperations | None = None
    """Of a training step, if they were to be recorded."""
    late: bool = False
    """Whether GPU work on side streams finished late."""
    counts: OperationCounts | None = None
    """Of what the first step ran in models with strategies; None if it was not counted."""
    others: tuple["TrialResult", ...] = ()
    """Of the same change: other ranks that may need more, and runs in which GPU work finishes late."""


RunTrial = Callable[[ScriptChange, str], TrialResult | ScriptEnd]
"""Runs the script again, given a change and its name. Returns how the script ended if it did not complete."""


def ran_to_completion(end: ScriptEnd) -> bool:
    """Return whether a script completed: it ended by itself, or after the requested steps."""
    return (end.stopped or end.reason == "end") and not end.exit_code


def why_it_failed(end: ScriptEnd) -> str:
    """Return why a run under a change did not complete, as a clause or a sentence."""
    if end.reason == "refused":
        return end.exception
    where = f" ({end.where})" if end.where else ""
    first_line = end.exception.partition("\n")[0]
    return f"the script ended with {first_line or f'exit code {end.exit_code}'}{where}"
