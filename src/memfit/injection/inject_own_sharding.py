"""Note the calls by which a script shards itself, and give them other options.

    fully_shard(layer, mesh=mesh)  ──>  fully_shard(layer, mesh=mesh, reshard_after_forward=False)

A call has the memory that it has with the option written in the script.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.records import OWN_SHARDINGS, OwnSharding, ShardingCalls
from memfit.records.own_sharding import CallOptions
from memfit.user_lines import innermost_line_of_place, innermost_user_line

_WHY = "note how a script shards itself, and change that"
_CALLS = {
    # Where it is defined: its importers get what is here when they import it.
    "fully_shard": Patch("torch.distributed.fsdp._fully_shard._fully_shard", "fully_shard", why=_WHY),
    "DistributedDataParallel": Patch(
        "torch.nn.parallel.distributed:DistributedDataParallel", "__init__", why=_WHY
    ),
}
"""By call: what memfit replaces."""


def _cpu_offload_policy() -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return CPUOffloadPolicy()


_OBJECTS: Mapping[str, Callable[[], Any]] = {"CPUOffloadPolicy()": _cpu_offload_policy}
"""By text, what creates the object that it stands for in ``OWN_SHARDINGS``."""


@dataclass(eq=False)
class OwnShardingInjector:
    """Notes the calls by which a script shards itself, and changes their options.

    Args:
        options: by call, what replaces the script's own; as in ``Change``.
        on_change: called with the calls whenever they differ from those before.
    """

    options: Mapping[str, CallOptions]
    on_change: Callable[[tuple[ShardingCalls, ...]], None]
    _noted: dict[str, ShardingCalls] = field(default_factory=dict)

    def install(self, hooks: InstalledHooks) -> None:
        """Hook the calls, each as soon as the script imports it."""
        for own in OWN_SHARDINGS:
            patch = _CALLS[own.call]
            (name,) = patch.names
            hooks.wrap_when_imported(patch, **{name: functools.partial(self._called, own)})

    def _called(self, own: OwnSharding, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        signature = inspect.signature(original)
        given, made = signature.bind(*args, **kwargs), signature.bind(*args, **kwargs)
        given.apply_defaults()
        self._note(own, innermost_line_of_place(innermost_user_line()), given.arguments)
        made.arguments |= {name: _value(value) for name, value in self.options.get(own.call, {}).items()}
        return original(*made.args, **made.kwargs)

    def _note(self, own: OwnSharding, line: str, given: Mapping[str, Any]) -> None:
        before = self._noted.get(own.call, ShardingCalls(own.name, own.call, (), ()))
        options, others = (
            tuple(each for each in every if each in lacking or not _has(given, each))
            for every, lacking in ((own.options, before.options), (own.others, before.others))
        )
        lines = tuple(dict.fromkeys((*before.lines, line)))
        self._noted[own.call] = now = ShardingCalls(own.name, own.call, lines, options, others)
        if now != before:
            self.on_change(tuple(self._noted.values()))


def _has(given: Mapping[str, Any], options: CallOptions) -> bool:
    return all(given.get(name) == _value(value) for name, value in options.items())


def _value(value: Any) -> Any:
    """Return the object that a text stands for; any other value is itself."""
    return _OBJECTS[value]() if isinstance(value, str) else value
