"""What of a plan memfit carries out in a script that stays as it is, and what the script's loop must do."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memfit.planning.plan_file import PlanFile

_IN_THE_LOOP = ("accumulation", "sharding")
"""Strategies that a plan's settings may have, and that take a change of the script."""


@dataclass(frozen=True, slots=True)
class CarriedOut:
    """A plan, as far as it needs no change of the script."""

    settings: dict[str, Any]
    """By field of a ``memfit.Plan``: the settings of a strategy."""
    arguments: tuple[str, ...]
    """Options of the script's own."""
    left_out: tuple[str, ...]
    """What else is in the plan, and how to carry it out."""

    @classmethod
    def of(cls, plan: PlanFile) -> "CarriedOut":
        """Divide a plan.

        >>> CarriedOut.of(PlanFile({"checkpointing": {}, "sharding": {"mode": "fsdp2"}}, "", None)).left_out
        ('sharding: write model = memfit.apply(model, PLAN) before the optimizer is created.',)
        """
        settings = {name: given for name, given in plan.settings.items() if name not in _IN_THE_LOOP}
        divided = plan.micro_batches
        arguments = divided.arguments if divided is not None and divided.by_option else ()
        return cls(settings, arguments, tuple(_left_out(plan)))


def _left_out(plan: PlanFile) -> Iterator[str]:
    divided = plan.micro_batches
    if divided is not None and not divided.by_option:
        yield (
            f"{divided.count} micro-batches of {divided.size} instead of each batch: "
            f"{'; '.join((divided.how, *divided.in_loop))}."
        )
    elif divided is None and "accumulation" in plan.settings:
        yield "accumulation: accumulate gradients in the script's loop, or use memfit.Engine."
    if plan.is_sharded:
        yield "sharding: write model = memfit.apply(model, PLAN) before the optimizer is created."
