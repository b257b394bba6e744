"""A plan: the settings of every strategy in use, at most one of each.

    precision -> optimizer_state -> checkpointing -> offload    change model or optimizer, in this order
    compilation                                                 sets how torch.compile divides graphs
    sharding                                                    shares them among ranks; last, in ``apply``
    accumulation                                                divides batches; only ``Engine`` can

A plan is plain data: converted to JSON and back it is the same plan.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.compilation import Compilation
from memfit.strategies.field_types import check_types
from memfit.strategies.offload import Offload
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.precision import Precision
from memfit.strategies.sharding import Sharding
from memfit.strategies.sharding_conflicts import sharding_conflicts


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings by strategy; None leaves a strategy out.

    Raises:
        UsageError: two of them cannot be combined; the message says why, and what to do instead.

    >>> Plan(accumulation=Accumulation(parts_per_batch=4)).accumulation.steps
    4
    """

    precision: Precision | None = None
    optimizer_state: OptimizerState | None = None
    checkpointing: Checkpointing | None = None
    offload: Offload | None = None
    sharding: Sharding | None = None
    accumulation: Accumulation | None = None
    compilation: Compilation | None = None

    def __post_init__(self) -> None:
        """Check types, and that the strategies can be combined."""
        check_types(self, "plan")
        conflict = (
            _offload_conflict(self)
            or _step_in_backward_conflict(self)
            or sharding_conflict(self, self.sharding)
        )
        if conflict:
            raise UsageError(conflict)

    def strategies(self) -> Iterator[Any]:
        """Yield the settings in use, in the order in which they are applied."""
        for field in fields(self):
            settings = getattr(self, field.name)
            if settings is not None:
                yield settings

    @classmethod
    def of(cls, given: "Plan | Iterable[Any] | Any | None") -> "Plan":
        """Return the plan made of a plan, the settings of one strategy, or a list of settings.

        Raises:
            UsageError: ``given`` is something else, or has two settings of one strategy.
        """
        if given is None or isinstance(given, Plan):
            return given or cls()
        kinds = {get_args(kind)[0]: name for name, kind in get_type_hints(cls).items()}
        settings: dict[str, Any] = {}
        for each in given if isinstance(given, Iterable) else [given]:
            name = kinds.get(type(each))
            if name is None:
                raise UsageError(
                    f"A plan can contain only strategies, such as memfit.Precision('bf16'), not {each!r}."
                )
            if name in settings:
                raise UsageError(
                    f"A plan can have only one {name}, but two were given: {settings[name]} and {each}."
                )
            settings[name] = each
        return cls(**settings)


# ---- Strategies that cannot be combined -------------------------------------------------------------------


def _offload_conflict(plan: Plan) -> str:
    if plan.offload is None or plan.offload.what != "inputs" or plan.checkpointing is not None:
        return ""
    return (
        "offload: what='inputs' offloads the inputs of checkpointed modules, but the plan "
        "has no checkpointing. Add Checkpointing(...), or pass what='activations' to Offload."
    )


def sharding_conflict(plan: Plan, sharding: Sharding | None) -> str:
    """Return which strategy of a plan contradicts a sharding, and what to do; empty if none does."""
    if sharding is None:
        return ""
    found = sharding_conflicts(
        sharding,
        precision=plan.precision,
        state=plan.optimizer_state,
        checkpointing=plan.checkpointing,
        offload=plan.offload,
        accumulation=plan.accumulation,
    )
    return next(found, "")


def _step_in_backward_conflict(plan: Plan) -> str:
    """Return which setting needs all gradients at once, and what to do; empty if none does."""
    if plan.optimizer_state is None or not plan.optimizer_state.step_in_backward:
        return ""
    accumulation, precision = plan.accumulation, plan.precision
    if accumulation is not None and accumulation.several:
        return (
            "step_in_backward and accumulation cannot be combined. step_in_backward updates parameters in "
            "each backward pass, so every micro-batch would cause its own update. Leave out one of the two."
        )
    if precision is not None and precision.dtype == "fp16":
        return (
            "fp16 and step_in_backward cannot be combined. Loss scaling skips the whole update if any "
            "gradient is not finite. step_in_backward updates parameters before all gradients are known. "
            "Choose bf16, or leave out step_in_backward."
        )
    if precision is not None and precision.master_weights:
        return (
            "step_in_backward and master_weights cannot be combined. step_in_backward updates each "
            "parameter as soon as backward has computed its gradient. With master_weights, the optimizer "
            "updates float32 copies, which get no gradient from backward. Leave out one of the two."
        )
    return ""
