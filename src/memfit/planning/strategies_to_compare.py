"""The rows of a comparison: strategies of one GPU, alone and together; shardings; options of a script's own.

Mixed precision, slices of batches and checkpointing are there in all eight combinations.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from memfit.analysis.strategy_comparison import AS_WRITTEN, SHARDINGS, StrategyCombination, sharding_settings
from memfit.devices import Device
from memfit.planning.batch_size_changes import batch_size_of_setting, find_batch_size_setting
from memfit.planning.strategy_and_allocator_changes import block_checkpointing_policies
from memfit.records import Change, ShardingCalls, StepOperations, Trace
from memfit.records.own_sharding import call_options_in_words

_BLOCKS, _EVERY_2ND, _PRODUCTS_KEPT = (each.plan for each in block_checkpointing_policies(None))
_BF16, _FP16 = ({"precision": {"dtype": dtype}} for dtype in ("bf16", "fp16"))
_HALVES = {"batch_slices": {"count": 2}}
_ROWS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "precision": {"bf16": _BF16, "fp16": _FP16},
    "slices": {"2 slices": _HALVES, "4 slices": {"batch_slices": {"count": 4}}},
    "checkpointing": {
        "checkpointing": _BLOCKS,
        "checkpointing (every 2nd)": _EVERY_2ND,
        "checkpointing (products kept)": _PRODUCTS_KEPT,
    },
    "offload": {
        "offload": {"offload": {}},
        "checkpointing + offload": {**_BLOCKS, "offload": {"what": "inputs"}},
    },
    "optimizer": {
        "step in backward": {"optimizer_state": {"step_in_backward": True}},
        "optimizer state offloaded": {"optimizer_state": {"offload": True}},
        "8-bit optimizer state": {"optimizer_state": {"bits": 8, "backend": "bitsandbytes"}},
    },
}
"""By group, and by name: the settings of a ``memfit.Plan``."""
_COMBINED, _SHARDED = "combinations", "sharding"
_LOW = ("float16", "bfloat16")


def strategies_to_compare(
    world_size: int,
    *,
    distributed: bool = False,
    own: Sequence[ShardingCalls] = (),
    card: Device | None = None,
) -> Iterator[StrategyCombination]:
    """Yield what to compare: the script as written, then strategies, alone, combined and with shardings.

    Args:
        world_size: number of ranks.
        distributed: whether the script as written trains on several GPUs. Other shardings than its own do
            not suit it, but for ZeRO-1 beside a DistributedDataParallel.
        own: how it shards itself. Each option that it does not have is tried alone, and with checkpointing.
        card: which decides whether bf16 or fp16 is combined with others.

    >>> [one.name for one in strategies_to_compare(1)][-4:]
    ['bf16 + 2 slices', 'bf16 + checkpointing', '2 slices + checkpointing', 'bf16 + 2 slices + checkpointing']
    >>> fsdp2 = ShardingCalls("FSDP2", "fully_shard", ("train.py:8",), ({"reshard_after_forward": False},))
    >>> [one.name for one in strategies_to_compare(8, distributed=True, own=[fsdp2])][-2:]
    ['reshard_after_forward=False', 'reshard_after_forward=False + checkpointing']
    """
    yield StrategyCombination(AS_WRITTEN, Change())
    calls = {each.call for each in own}
    for group, rows in _ROWS.items():
        for name, plan in rows.items():
            conflicts = "fully_shard" in calls and plan.get("offload") == {}
            if not conflicts and not (distributed and group == "optimizer"):  # ranks reduce gradients first
                yield StrategyCombination(name, Change(plan), group)
    low = "bf16" if card is None or card.fast("bf16") else "fp16"
    single = (low, "2 slices", "checkpointing")
    plans = {name: plan for rows in _ROWS.values() for name, plan in rows.items()}
    for names in (*combinations(single, 2), single):
        plan = {field: given for name in names for field, given in plans[name].items()}
        yield StrategyCombination(" + ".join(names), Change(plan), _COMBINED)
    shardings = SHARDINGS if world_size > 1 and not distributed else {}
    if "DistributedDataParallel" in calls:
        shardings = {"ZeRO-1": "zero1"}
    for name, mode in shardings.items():
        yield from _sharded(name, sharding_settings(mode) if not distributed else {"mode": mode})
    for each in own:
        for options in (*each.options, *each.others):
            name, change = call_options_in_words(options), Change(own_sharding={each.call: options})
            yield StrategyCombination(name, change, _SHARDED)
            yield StrategyCombination(f"{name} + checkpointing", change | Change(_BLOCKS), _SHARDED)


def _sharded(name: str, settings: dict[str, Any]) -> Iterator[StrategyCombination]:
    """Yield a sharding alone, with checkpointing, with offload, and with both.

    With fsdp2, what is offloaded are the shards: offloaded activations would conflict with it.
    """
    sharding: dict[str, Any] = {"sharding": settings}
    if settings["mode"] == "fsdp2":
        offload = inputs = {"sharding": {**settings, "offload": True}}
    else:
        offload, inputs = {**sharding, "offload": {}}, {**sharding, "offload": {"what": "inputs"}}
    for more, plan in (
        ("", sharding),
        (" + checkpointing", {**sharding, **_BLOCKS}),
        (" + offload", offload),
        (" + checkpointing + offload", {**inputs, **_BLOCKS}),
    ):
        yield StrategyCombination(f"{name}{more}", Change(plan), _SHARDED)


def why_unsuitable(change: Change, written: StepOperations | None) -> str:
    """Return why strategies do not suit a script, as far as its own step shows it; empty if they may.

    Args:
        change: the strategies.
        written: the operations of the script as written, if they were recorded.
    """
    if "precision" not in change.plan or written is None:
        return ""
    own = next((each.dtype for each in written.forward if each.flops and each.dtype in _LOW), "")
    return f"the script itself computes in {own}" if own else ""


def with_dimension_of_samples(change: Change, trace: Trace, written: StepOperations | None) -> Change:
    """Return slices along the dimension in which the script's batches have their samples.

    Args:
        change: the strategies.
        trace: of the script as written.
        written: its operations.
    """
    setting = find_batch_size_setting(trace)
    if "batch_slices" not in change.plan or setting is None or written is None or written.samples is None:
        return change
    size = batch_size_of_setting(setting)
    first = next(filter(None, written.samples.shapes), ())
    if size not in first or first[0] == size:
        return change
    slices = {**change.plan["batch_slices"], "dim": first.index(size)}
    return change | Change({"batch_slices": slices})
