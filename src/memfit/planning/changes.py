"""What can be changed about a script to lower the memory it needs, what to write for it, and what it costs.

Smaller batches, and batches in parts, are in ``batches.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memfit.allocator.config import AllocatorConfig, environment_settings
from memfit.analysis.script_change import PlannedRegion, PlannedStrategy, ScriptChange
from memfit.records import DividedBatches, OptionPurpose, ScriptOption, Trace

if TYPE_CHECKING:
    from memfit.planning.choose import CheckpointChoice

_EXPANDABLE = "expandable_segments:True"
_RECOMPUTING = "a second forward of these blocks"


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A change to the script, or several made together with ``|``."""

    change: ScriptChange = ScriptChange()  # noqa: RUF009 - frozen
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The same as settings of a ``memfit.Plan``, as far as it has them."""
    divided: DividedBatches | None = None
    late: bool = False
    """Whether work on side streams counts, so that the run must finish it as late as it can be."""
    words: tuple[str, ...] = ()
    """What it does, for the user."""
    how: tuple[str, ...] = ()
    """What to write, besides the call of ``memfit.apply`` that makes all strategies."""
    where: str = ""
    """``file:line`` to be changed, if known."""
    costs: str = ""
    """Empty if only runs tell."""
    batch_size: int = 0
    """Samples in a batch, if that changes."""

    @property
    def parts(self) -> int:
        """Micro-batches of a batch."""
        return self.divided.count if self.divided is not None else 1

    def __or__(self, other: "PlanChange") -> "PlanChange":
        """Return both changes together."""
        return PlanChange(
            self.change | other.change,
            {**self.settings, **other.settings},
            other.divided or self.divided,
            self.late or other.late,
            self.words + other.words,
            self.how + other.how,
            self.where or other.where,
            "; ".join(filter(None, (self.costs, other.costs))),
            other.batch_size or self.batch_size,
        )


def expandable_segments(trace: Trace) -> PlanChange | None:
    """Return the setting of the allocator, beside the script's own; None if it is on already."""
    if AllocatorConfig.read(trace.settings).expandable_segments:
        return None
    conf = ",".join(filter(None, (environment_settings(trace.settings), _EXPANDABLE)))
    return PlanChange(
        ScriptChange(conf=conf), words=("expandable segments",), how=(f"PYTORCH_ALLOC_CONF={conf}",)
    )


FUSED_OPTIMIZER = PlanChange(
    ScriptChange(fused=True),
    words=("fused optimizer",),
    how=("fused=True when creating the optimizer",),
    costs="no time, but results may differ in their last bits",
)


def _strategy(
    field: str,
    settings: Mapping[str, Any],
    words: str,
    *,
    optimizer: int | None = None,
    late: bool = False,
    costs: str = "",
) -> PlanChange:
    strategy = PlannedStrategy(field, tuple(settings.items()))
    change = ScriptChange((strategy,), optimizer)
    return PlanChange(change, {field: settings}, late=late, words=(words,), costs=costs)


def checkpointed_blocks(
    words: str, settings: Mapping[str, int | tuple[str, ...]], optimizer: int | None = None
) -> PlanChange:
    """Return the change that checkpoints the blocks that a model repeats.

    Args:
        words: what to call it.
        settings: of ``memfit.Checkpointing``.
        optimizer: which optimizer of the script has the model's parameters; None for all models.
    """
    return _strategy("checkpointing", settings, words, optimizer=optimizer, costs=_RECOMPUTING)


def precision(name: str, settings: Mapping[str, str | bool]) -> PlanChange:
    """Return the change to another precision, with settings of ``memfit.Precision``."""
    return _strategy("precision", settings, name)


def sharding(name: str, settings: Mapping[str, str | bool]) -> PlanChange:
    """Return the change that shards the script's models, with settings of ``memfit.Sharding``."""
    return _strategy("sharding", settings, name)


def kept_share(share: float, optimizer: int | None) -> PlanChange:
    """Return the change under which compiled graphs keep a share of their activations."""
    settings = {"activation_memory_budget": share}
    return _strategy("compilation", settings, f"activation_memory_budget {share:g}", optimizer=optimizer)


OFFLOADED_ACTIVATIONS = _strategy(
    "offload", {}, "offload activations", late=True, costs="host memory, and copies to the host and back"
)


def recomputation(choice: "CheckpointChoice", optimizer: int | None, *, offload: bool) -> PlanChange:
    """Return the change that carries out a choice.

    Args:
        choice: what to recompute.
        optimizer: which optimizer of the script has the model's parameters.
        offload: whether the inputs of what is recomputed wait on the host.
    """
    settings = {"regions": [_plain(region) for region in choice.regions]}
    strategy = PlannedStrategy("checkpointing", (("regions", choice.regions),))
    count = sum(len(region.modules) for region in choice.regions)
    change = PlanChange(
        ScriptChange((strategy,), optimizer),
        {"checkpointing": settings},
        words=(f"{count} module{'s' * (count != 1)} checkpointed",),
    )
    if not offload:
        return change
    return change | _strategy("offload", {"what": "inputs"}, "inputs offloaded", late=True)


def _plain(region: PlannedRegion) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in region.settings.items()
    }


def checkpointing_ways(options: tuple[ScriptOption, ...]) -> tuple[PlanChange, ...]:
    """Return the ways to checkpoint: the script's own option first; nothing if that is on."""
    own = [option for option in options if option.purpose is OptionPurpose.CHECKPOINTING]
    if any(option.value for option in own):
        return ()
    return (
        *(_switched_on(option, "gradient checkpointing", _RECOMPUTING) for option in own),
        checkpointed_blocks("checkpoint the repeated blocks", {}),
    )


def low_precisions(options: tuple[ScriptOption, ...]) -> tuple[PlanChange, ...]:
    """Return the script's own options for low precision that are off."""
    return tuple(
        _switched_on(option, option.words[-1].lstrip("-"), "lower precision: results differ")
        for option in options
        if option.purpose is OptionPurpose.LOW_PRECISION and not option.value
    )


def _switched_on(option: ScriptOption, what: str, costs: str) -> PlanChange:
    how = f"add {' '.join(option.words)} to the script's options"
    return PlanChange(ScriptChange(arguments=option.words), words=(what,), how=(how,), costs=costs)
