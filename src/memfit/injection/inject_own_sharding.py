"""Note the calls by which a script shards itself, and give them other options.

    fully_shard(layer, mesh=mesh)  ──>  fully_shard(layer, mesh=mesh, reshard_after_forward=False)

A call has the memory that it has with the option written in the script.
"""

import copy
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.records import OWN_SHARDINGS, OwnSharding, ShardingCalls
from memfit.records.own_sharding import DEEPSPEED, CallOptions
from memfit.user_lines import innermost_line_of_place, innermost_user_line

_WHY = "note how a script shards itself, and change that"
_CALLS = {
    # Where it is defined: its importers get what is here when they import it.
    "fully_shard": Patch("torch.distributed.fsdp._fully_shard._fully_shard", "fully_shard", why=_WHY),
    "DistributedDataParallel": Patch(
        "torch.nn.parallel.distributed:DistributedDataParallel", "__init__", why=_WHY
    ),
    DEEPSPEED: Patch("deepspeed", "initialize", why=_WHY),
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
        line, options = innermost_line_of_place(innermost_user_line()), self.options.get(own.call, {})
        if own.call == DEEPSPEED:
            configuration = _configuration(given.arguments)
            if configuration is not None:
                self._note(own, line, configuration)
            if configuration is not None and options:
                made.arguments |= _with_configuration(given.arguments, _merged(configuration, options))
        else:
            self._note(own, line, given.arguments)
            made.arguments |= {name: _value(value) for name, value in options.items()}
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
    """Return whether a call has options; of nested ones, all that are named."""
    return all(
        isinstance(given.get(name), Mapping) and _has(given[name], value)
        if isinstance(value, Mapping)
        else given.get(name) == _value(value)
        for name, value in options.items()
    )


def _value(value: Any) -> Any:
    """Return the object that a text of the table stands for; any other value is itself."""
    return _OBJECTS[value]() if isinstance(value, str) and value in _OBJECTS else value


# ---- DeepSpeed's configuration ----------------------------------------------------------------------------


def _configuration(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the configuration that ``deepspeed.initialize`` is given; None if that is no dict and no file.

    Source: ``initialize`` in ``deepspeed/__init__.py``, DeepSpeed 0.19.8.
    """
    found = given["config"] or given["config_params"] or getattr(given["args"], "deepspeed_config", None)
    if isinstance(found, str | Path) and Path(found).is_file():
        found = json.loads(Path(found).read_bytes())
    return found if isinstance(found, Mapping) else None


def _with_configuration(given: Mapping[str, Any], configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``deepspeed.initialize`` that pass a configuration, and no other."""
    args = given["args"]
    if getattr(args, "deepspeed_config", None) is not None:
        args = copy.copy(args)
        args.deepspeed_config = None
    return {"args": args, "config": configuration, "config_params": None}


def _merged(configuration: Mapping[str, Any], options: CallOptions) -> dict[str, Any]:
    """Return a configuration with options in it; what is nested is merged as well."""
    return {
        **configuration,
        **{
            name: _merged(configuration.get(name) or {}, value) if isinstance(value, Mapping) else value
            for name, value in options.items()
        },
    }
