"""A plan: the settings of every strategy in use, at most one of each.

    precision -> optimizer_state -> checkpointing -> offload    change model or optimizer, in this order
    compilation                                                 sets how torch.compile divides graphs
    batch_slices                                                divides batches inside the model's call
    sharding                                                    shares them among ranks; last, in ``apply``
    accumulation                                                divides batches; only ``Engine`` can

A plan is plain data: converted to JSON and back it is the same plan.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, get_args, get_type_hints

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.batch_slices import BatchSlices
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.compilation import Compilation
from memfit.strategies.offload import Offload
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.precision import Precision
from memfit.strategies.setting_checks import check_setting_types
from memfit.strategies.sharding import Sharding


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
    batch_slices: BatchSlices | None = None

    def __post_init__(self) -> None:
        """Check types, and that the strategies can be combined."""
        check_setting_types(self, "plan")
        conflict = (
            _offload_conflict(self)
            or _slices_conflict(self)
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


def _slices_conflict(plan: Plan) -> str:
    checkpointing = plan.checkpointing
    if plan.batch_slices is None or checkpointing is None:
        return ""
    if not (checkpointing.split_at or any(region.split_at for region in checkpointing.regions)):
        return ""
    return (
        "batch_slices and split_at cannot be combined. A slice runs again as a whole in the backward, and "
        "the parts of a region would be recomputed one by one inside that. Leave out one of the two."
    )


def sharding_conflict(plan: Plan, sharding: Sharding | None) -> str:
    """Return which strategy of a plan contradicts a sharding, and what to do; empty if none does."""
    if sharding is None:
        return ""
    return next(_sharding_conflicts(plan, sharding), "")


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


def _sharding_conflicts(plan: Plan, sharding: Sharding) -> Iterator[str]:
    """Yield what in a plan contradicts a sharding, and what to do."""
    accumulation, checkpointing, offload = plan.accumulation, plan.checkpointing, plan.offload
    if sharding.static_graph and accumulation is not None and accumulation.several:
        yield (
            "static_graph and accumulation cannot be combined. Accumulation runs micro-batches under "
            "no_sync, and with static_graph, DistributedDataParallel must reduce the first backward. "
            "Leave out static_graph."
        )
    if checkpointing is not None and checkpointing.use_reentrant:
        yield (
            "use_reentrant and sharding cannot be combined. Reentrant checkpointing runs a backward inside "
            "backward, which DistributedDataParallel and fully_shard do not follow. Leave out use_reentrant."
        )
    if offload is not None and offload.what == "activations" and sharding.mode == "fsdp2":
        yield (
            "offload of activations and sharding 'fsdp2' cannot be combined. It would copy gathered "
            "parameters, which fully_shard frees anyway, to the host. Use Checkpointing() and "
            "Offload(what='inputs'), or Sharding('fsdp2', offload=True)."
        )
    if plan.precision is not None:
        yield from _with_precision(sharding, plan.precision)
    if plan.optimizer_state is not None:
        yield from _with_optimizer_state(sharding, plan.optimizer_state)


def _with_precision(sharding: Sharding, precision: Precision) -> Iterator[str]:
    dtype = precision.dtype
    if precision.master_weights and sharding.mode != "ddp":
        yield (
            f"master_weights and sharding {sharding.mode!r} cannot be combined. Leave out autocast=False and "
            f"master_weights: the parameters stay float32. With fsdp2, pass Sharding('fsdp2', "
            f"param_dtype={dtype!r}): its sharded parameters are the master weights."
        )
    if sharding.param_dtype is not None and dtype != "fp32":
        yield (
            f"Precision({dtype!r}) and Sharding(param_dtype={sharding.param_dtype!r}) both choose in which "
            "dtype the model computes. Leave out one of the two: param_dtype also gathers parameters in that "
            "dtype, and autocast keeps single operations in float32."
        )


def _with_optimizer_state(sharding: Sharding, state: OptimizerState) -> Iterator[str]:
    if state.step_in_backward and sharding.mode != "fsdp2":
        yield (
            f"step_in_backward and sharding {sharding.mode!r} cannot be combined. Parameters would be "
            "updated before their gradients are reduced across ranks. Leave out step_in_backward, or "
            "choose fsdp2."
        )
    if state.step_in_backward and sharding.offload:
        yield (
            "step_in_backward and Sharding(offload=True) cannot be combined. fully_shard copies gradients to "
            "the host beside the computation, and they may be incomplete when a parameter is updated. Leave "
            "out one of the two."
        )
    if state.offload and sharding.offload:
        yield (
            "OptimizerState(offload=True) and Sharding(offload=True) cannot be combined: the sharded "
            "parameters are on the host, and so is their state. Leave out OptimizerState's offload."
        )
    if sharding.mode == "zero1" and (state.offload or state.backend is not None):
        setting = "offload=True" if state.offload else f"bits={state.bits}"
        yield (
            f"OptimizerState({setting}) and sharding 'zero1' cannot be combined: ZeroRedundancyOptimizer "
            "itself makes the optimizers of its shards. Leave out one of the two, or choose ddp or fsdp2."
        )
