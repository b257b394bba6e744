"""Shardings that scripts have themselves: the call that makes each, and options of it that change memory.

    the script calls    fully_shard(layer, mesh=mesh)
    an option           fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy())
    in a Change         {"fully_shard": {"offload_policy": "CPUOffloadPolicy()"}}

An option has the call's own names, and values as in JSON; a text stands for the object that it creates.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CallOptions = Mapping[str, Any]
"""Arguments of a call by name; of ``DEEPSPEED``, what is in its configuration, nested as there."""
DEEPSPEED = "deepspeed.initialize"
"""The call that takes a configuration."""


@dataclass(frozen=True, slots=True)
class OwnSharding:
    """A way in which scripts shard themselves."""

    name: str
    call: str
    """What the script calls."""
    options: tuple[CallOptions, ...]
    """What may lower the peak: plans and comparisons try it in place of the script's own, alone."""
    others: tuple[CallOptions, ...] = ()
    """What only comparisons try."""


OWN_SHARDINGS = (
    OwnSharding(
        "FSDP2",
        "fully_shard",
        ({"reshard_after_forward": True}, {"offload_policy": "CPUOffloadPolicy()"}),
        ({"reshard_after_forward": False},),
    ),
    OwnSharding(
        "DDP", "DistributedDataParallel", ({"gradient_as_bucket_view": True},), ({"static_graph": True},)
    ),
    OwnSharding(
        "DeepSpeed",
        DEEPSPEED,
        (),
        (
            *({"zero_optimization": {"stage": stage}} for stage in range(4)),
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            {
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "cpu"},
                    "offload_param": {"device": "cpu"},
                }
            },
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class ShardingCalls:
    """How a script as written shards itself."""

    name: str
    """As in ``OwnSharding``."""
    call: str
    """The same."""
    lines: tuple[str, ...]
    """The script's lines that make the calls, or make a library do so."""
    options: tuple[CallOptions, ...]
    """Those of ``OwnSharding`` that not all of these calls have already."""
    others: tuple[CallOptions, ...] = ()
    """The same."""


def call_options_in_words(options: CallOptions) -> str:
    """Return arguments as they are written in a call.

    >>> call_options_in_words({"reshard_after_forward": False, "offload_policy": "CPUOffloadPolicy()"})
    'reshard_after_forward=False, offload_policy=CPUOffloadPolicy()'
    >>> call_options_in_words({"zero_optimization": {"stage": 2}})
    '{"zero_optimization": {"stage": 2}}'
    """
    if any(isinstance(value, Mapping) for value in options.values()):
        return json.dumps(options)
    return ", ".join(f"{name}={value}" for name, value in options.items())


def unknown_call_options(own_sharding: Mapping[str, CallOptions]) -> tuple[str, ...]:
    """Return the options, by call, that ``OWN_SHARDINGS`` does not have.

    >>> unknown_call_options({"fully_shard": {"reshard_after_forward": True, "offload_policy": "rm()"}})
    ('fully_shard(offload_policy=rm())',)
    """
    known = {own.call: (*own.options, *own.others) for own in OWN_SHARDINGS}
    return tuple(
        f"{call}({call_options_in_words({name: value})})"
        for call, options in own_sharding.items()
        for name, value in options.items()
        if {name: value} not in known.get(call, ())
    )


_OFFLOADING = ("offload_policy", "offload_optimizer", "offload_param")


def offloads_shards(options: CallOptions) -> bool:
    """Return whether shards wait on the host, and the CPU updates them.

    >>> offloads_shards({"offload_policy": "CPUOffloadPolicy()"})
    True
    """
    inner = (value for value in options.values() if isinstance(value, Mapping))
    return any(name in options for name in _OFFLOADING) or any(map(offloads_shards, inner))
