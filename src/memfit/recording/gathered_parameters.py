"""Parameters as FSDP2 gathers them from all ranks for a module's computation: they are no rank's share.

Modules hold them in the place of their shares meanwhile. What FSDP1 gathers, modules do not name.

Source: ``FSDPParam.init_unsharded_param``, torch/distributed/fsdp/_fully_shard/_fsdp_param.py, PyTorch 2.14.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from memfit.patching.after_import import after_import
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch

_FSDP = Patch(
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam",
    "init_unsharded_param",
    why="tell gathered parameters from shares",
)


class GatheredParameters:
    """The gathered parameters of a script. Nothing is kept alive."""

    def __init__(self) -> None:
        self._gathered: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def watch(self, hooks: InstalledHooks) -> None:
        """Note what FSDP gathers from now on."""

        def follow() -> None:
            hooks.wrap(_FSDP, "init_unsharded_param", self._note)

        hooks.on_removal(after_import("torch.distributed.fsdp._fully_shard._fsdp_param", follow))

    def holds(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is a gathered one."""
        return self._gathered.get(id(parameter)) is parameter

    def _note(self, original: Callable[..., None], holder: Any, *args: Any) -> None:
        original(holder, *args)
        gathered = holder._unsharded_param
        self._gathered[id(gathered)] = gathered
