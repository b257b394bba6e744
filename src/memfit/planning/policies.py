"""Policies of checkpointing that people use, to be run beside a plan."""

from memfit.analysis.script_change import PlannedStrategy, ScriptChange
from memfit.planning.plan_runs import PlanChange

_PRODUCTS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.convolution",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_cudnn_attention",
)


def _policy(words: str, settings: dict[str, int | tuple[str, ...]], optimizer: int | None) -> PlanChange:
    strategy = PlannedStrategy("checkpointing", tuple(settings.items()))
    return PlanChange(ScriptChange((strategy,), optimizer), {"checkpointing": settings}, words=(words,))


def standard_policies(optimizer: int | None) -> tuple[PlanChange, ...]:
    """Return the policies: they checkpoint the blocks that a model repeats.

    Args:
        optimizer: which optimizer of the script has the model's parameters.
    """
    return (
        _policy("every block", {}, optimizer),
        _policy("every 2nd block", {"every": 2}, optimizer),
        _policy("every block, products kept", {"save_ops": _PRODUCTS}, optimizer),
    )
