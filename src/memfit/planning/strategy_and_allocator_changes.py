"""What can be changed about a script to lower the memory it needs, what to write for it, and what it costs.

Smaller batches, and batches in parts, are in ``batch_size_changes.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from memfit.allocator.config import AllocatorConfig, allocator_conf_from_environment
from memfit.records import Change, ScriptOption, ScriptOptionPurpose, Trace

if TYPE_CHECKING:
    from memfit.planning.choose_checkpointing import CheckpointChoice

_EXPANDABLE = "expandable_segments:True"
_RECOMPUTING = "a second forward of these blocks"


def expandable_segments_change(trace: Trace) -> Change | None:
    """Return the setting of the allocator, beside the script's own; None if it is on already."""
    if AllocatorConfig.read(trace.settings).expandable_segments:
        return None
    conf = ",".join(filter(None, (allocator_conf_from_environment(trace.settings), _EXPANDABLE)))
    return Change(allocator=conf, words=("expandable segments",), how=(f"PYTORCH_ALLOC_CONF={conf}",))


FUSED_OPTIMIZER = Change(
    fused=True,
    words=("fused optimizer",),
    how=("fused=True when creating the optimizer",),
    costs="no time, but results may differ in their last bits",
)


def strategy_change(
    field: str, settings: Mapping[str, Any], words: str, *, optimizer: int | None = None, costs: str = ""
) -> Change:
    """Return the change that applies a strategy.

    Args:
        field: of ``memfit.Plan``.
        settings: of the strategy.
        words: what to call it.
        optimizer: which optimizer of the script has the model's parameters; None for all models.
        costs: as in ``Change``.
    """
    return Change({field: settings}, optimizer=optimizer, words=(words,), costs=costs)


_block_checkpointing = partial(strategy_change, "checkpointing", costs=_RECOMPUTING)
"""Returns the change that checkpoints the blocks that a model repeats."""


def activation_memory_budget_change(share: float, optimizer: int | None) -> Change:
    """Return the change under which compiled graphs keep a share of their activations."""
    settings = {"activation_memory_budget": share}
    return strategy_change(
        "compilation", settings, f"activation_memory_budget {share:g}", optimizer=optimizer
    )


OFFLOADED_ACTIVATIONS = strategy_change(
    "offload", {}, "offload activations", costs="host memory, and copies to the host and back"
)


def checkpoint_choice_change(choice: "CheckpointChoice", optimizer: int | None, *, offload: bool) -> Change:
    """Return the change that carries out a choice.

    Args:
        choice: what to recompute.
        optimizer: which optimizer of the script has the model's parameters.
        offload: whether the inputs of what is recomputed wait on the host.
    """
    settings = {"regions": [region.settings for region in choice.regions]}
    count = sum(len(region.modules) for region in choice.regions)
    words = f"{count} module{'s' * (count != 1)} checkpointed"
    change = strategy_change("checkpointing", settings, words, optimizer=optimizer)
    return change | strategy_change("offload", {"what": "inputs"}, "inputs offloaded") if offload else change


def checkpointing_changes(options: tuple[ScriptOption, ...]) -> tuple[Change, ...]:
    """Return the ways to checkpoint: the script's own option first; nothing if that is on."""
    own = [option for option in options if option.purpose is ScriptOptionPurpose.CHECKPOINTING]
    if any(option.value for option in own):
        return ()
    return (
        *(_switched_on(option, "gradient checkpointing", _RECOMPUTING) for option in own),
        _block_checkpointing({}, "checkpoint the repeated blocks"),
    )


def low_precision_script_options(options: tuple[ScriptOption, ...]) -> tuple[Change, ...]:
    """Return the script's own options for low precision that are off."""
    return tuple(
        _switched_on(option, option.words[-1].lstrip("-"), "lower precision: results differ")
        for option in options
        if option.purpose is ScriptOptionPurpose.LOW_PRECISION and not option.value
    )


def _switched_on(option: ScriptOption, what: str, costs: str) -> Change:
    how = f"add {' '.join(option.words)} to the script's options"
    return Change(arguments=option.words, words=(what,), how=(how,), costs=costs)


PRECISIONS = {
    "amp": strategy_change("precision", {"dtype": "bf16"}, "amp"),
    "bf16": strategy_change("precision", {"dtype": "bf16", "autocast": False}, "bf16"),
}
"""Other numerics that a plan may use."""
LOW_BIT_STATE = "8bit"
"""Other numerics of the optimizer: its state in 8 bits."""


@dataclass(frozen=True, slots=True)
class AllowedChanges:
    """What a plan may change."""

    allocator: bool = True
    """``PYTORCH_ALLOC_CONF``."""
    rounding: bool = True
    """The order in which sums are taken: batches are divided, and optimizers fused. And the kernels of
    compiled code, which round at other places."""
    precisions: tuple[str, ...] = ()
    """Of ``PRECISIONS``: used if they lower the peak, and a plan with them fits."""
    optimizer: bool = True
    """When the optimizer updates parameters, and where its state waits: bit for bit the same."""
    low_bit_state: bool = False
    """How many bits the optimizer's state has."""
    slowdown: float = float("inf")
    """How many times as long as the script as written a step may take at most, predicted."""


_PRODUCTS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.convolution",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_cudnn_attention",
)


def block_checkpointing_policies(optimizer: int | None) -> tuple[Change, ...]:
    """Return the policies: they checkpoint the blocks that a model repeats.

    Args:
        optimizer: which optimizer of the script has the model's parameters.
    """
    return (
        _block_checkpointing({}, "every block", optimizer=optimizer),
        _block_checkpointing({"every": 2}, "every 2nd block", optimizer=optimizer),
        _block_checkpointing({"save_ops": _PRODUCTS}, "every block, products kept", optimizer=optimizer),
    )
