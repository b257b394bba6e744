"""A change under which a script is run, and the result of such a run."""

from collections.abc import Callable
from dataclasses import dataclass

from memfit.records import LoaderBatchSize, ScriptEnd, Trace


@dataclass(frozen=True, slots=True)
class ScriptChange:
    """Changes under which a script is run; none of them edits the training loop."""

    strategies: tuple[str, ...] = ()
    """Fields of a ``Plan``, each with its default settings."""
    fused: bool = False
    """Whether PyTorch's optimizers use ``fused=True`` if the script does not choose an implementation."""
    arguments: tuple[str, ...] = ()
    """Options of the script's own, to be written after its arguments."""
    loader: LoaderBatchSize | None = None
    """The batch size that loaders created at this line get."""
    conf: str = ""
    """``PYTORCH_ALLOC_CONF``; empty for the script's own. Settings are replayed, not run."""

    def __or__(self, other: "ScriptChange") -> "ScriptChange":
        """Return both changes together."""
        return ScriptChange(
            tuple(sorted({*self.strategies, *other.strategies})),
            self.fused or other.fused,
            self.arguments + other.arguments,
            other.loader or self.loader,
            other.conf or self.conf,
        )


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a run that completed."""

    trace: Trace
    models: tuple[str, ...] = ()
    """Models that strategies were applied to: the class of each, and the line that creates its optimizer."""


RunScript = Callable[[ScriptChange, str], TrialResult | ScriptEnd | None]
"""Reruns the script with unlimited memory, given a change and its name. Returns how the script ended if it
did not complete; None if the script must not be run."""


def ran_to_completion(end: ScriptEnd) -> bool:
    """Return whether a script completed: it ended by itself, or after the requested steps."""
    return end.reason in ("steps", "end") and not end.exit_code
