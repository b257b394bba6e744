"""A plan: the settings of every strategy in use, at most one of each.

    precision -> optimizer_state -> checkpointing -> offload    change model or optimizer, in this order
    accumulation                                                divides batches; only ``Engine`` can

It is plain data: JSON and back is the same plan.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from torch import nn

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.field_types import check_types
from memfit.strategies.offload import Offload
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.precision import Precision, device_type


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings by strategy; None is plain training.

    Raises:
        UsageError: two of them cannot go together; it says why, and what to do instead.

    >>> Plan(accumulation=Accumulation(4)).accumulation.gradient_accumulation_steps
    4
    """

    precision: Precision | None = None
    optimizer_state: OptimizerState | None = None
    checkpointing: Checkpointing | None = None
    offload: Offload | None = None
    accumulation: Accumulation | None = None

    def __post_init__(self) -> None:
        """Check types, and have each strategy look at the others."""
        check_types(self, "plan")
        for strategy in self.strategies():
            why = strategy.conflicts(self) if hasattr(strategy, "conflicts") else None
            if why is not None:
                raise UsageError(why)

    def strategies(self) -> Iterator[Any]:
        """Return the settings that there are, in the order in which they are applied."""
        for field in fields(self):
            settings = getattr(self, field.name)
            if settings is not None:
                yield settings

    def autocast(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return the context for a forward of a model and its loss."""
        if self.precision is None:
            return nullcontext()
        return self.precision.context(device_type(model))

    @classmethod
    def of(cls, given: "Plan | Iterable[Any] | Any | None") -> "Plan":
        """Read a plan, the settings of one strategy, or a list of them.

        Raises:
            UsageError: it is something else, or there are two of a kind.
        """
        if given is None or isinstance(given, Plan):
            return given or cls()
        kinds = {get_args(kind)[0]: name for name, kind in get_type_hints(cls).items()}
        settings: dict[str, Any] = {}
        for one in given if isinstance(given, Iterable) else [given]:
            name = kinds.get(type(one))
            if name is None:
                raise UsageError(f"A plan is made of strategies' settings; {one!r} is none.")
            if name in settings:
                raise UsageError(f"A plan has one {name}, and here are two: {settings[name]} and {one}.")
            settings[name] = one
        return cls(**settings)
