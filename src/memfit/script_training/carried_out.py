"""What of a plan memfit carries out in a script that stays as it is, and what the script's loop must do."""

from collections.abc import Iterator
from dataclasses import replace

from memfit.records import Change

_IN_THE_LOOP = ("accumulation", "sharding")
"""Strategies that a plan's settings may have, and that take a change of the script."""


def carried_out(change: Change) -> Change:
    """Return the part of a change that memfit makes while the script trains."""
    plan = {name: given for name, given in change.plan.items() if name not in _IN_THE_LOOP}
    divided = change.micro_batches
    arguments = change.arguments if divided is not None and divided.by_option else ()
    return replace(change, plan=plan, micro_batches=None, arguments=arguments, loader=None)


def left_out(change: Change) -> tuple[str, ...]:
    """Return what else is in a change, and how to carry it out.

    >>> left_out(Change({"checkpointing": {}, "sharding": {"mode": "fsdp2"}}))
    ('sharding: write model = memfit.apply(model, PLAN) before the optimizer is created.',)
    """
    return tuple(_left_out(change))


def _left_out(change: Change) -> Iterator[str]:
    divided = change.micro_batches
    if divided is not None and not divided.by_option:
        yield (
            f"{divided.count} micro-batches of {divided.size} instead of each batch: "
            f"{'; '.join((divided.how, *divided.in_loop))}."
        )
    elif divided is None and "accumulation" in change.plan:
        yield "accumulation: accumulate gradients in the script's loop, or use memfit.Engine."
    if "sharding" in change.plan:
        yield "sharding: write model = memfit.apply(model, PLAN) before the optimizer is created."
