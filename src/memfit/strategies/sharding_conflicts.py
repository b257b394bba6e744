"""Strategies that cannot be combined with sharding: which, why, and what to do instead."""

from collections.abc import Iterator

from memfit.strategies.accumulation import Accumulation
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.offload import Offload
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.precision import Precision
from memfit.strategies.sharding import Sharding


def sharding_conflicts(
    sharding: Sharding,
    *,
    precision: Precision | None,
    state: OptimizerState | None,
    checkpointing: Checkpointing | None,
    offload: Offload | None,
    accumulation: Accumulation | None,
) -> Iterator[str]:
    """Yield what in a plan contradicts its sharding, and what to do."""
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
    if precision is not None:
        yield from _with_precision(sharding, precision)
    if state is not None:
        yield from _with_optimizer_state(sharding, state)


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
