"""The flat buffers of DeepSpeed's optimizers: parameters and gradients that no tensor of the model shows."""

from collections.abc import Callable, Iterable
from typing import Any

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.label_running_modules import tensors_in_containers
from memfit.recording.memory_owners import MemoryOwners
from memfit.records import Category

_WHY = "identify its flat parameters and gradients"
_STEPS = (
    Patch("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer", "step", why=_WHY),
    Patch("deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3", "step", why=_WHY),
    Patch("deepspeed.runtime.bf16_optimizer:BF16_Optimizer", "step", why=_WHY),
    Patch("deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer", "step", why=_WHY),
)
_ATTRIBUTES = {
    Category.PARAMETER: (
        *("bit16_groups_flat", "lp_param_buffer", "bf16_groups_flat", "fp16_groups_flat"),
        *("fp16_partitioned_groups_flat", "param_buffer_of_bit16_for_cpu_offload_groups"),
    ),
    Category.GRADIENT: (
        *("averaged_gradients", "all_grad_tensors", "ipg_buckets", "grad_partitions_flat_buffer"),
        *("fp32_groups_gradients_flat", "accumulated_grads_in_cpu", "temp_grad_buffer_for_cpu_offload"),
    ),
}
"""Attributes of the optimizers that hold tensors, or buckets with tensors, in lists and dictionaries.

Source: ``deepspeed/runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``bf16_optimizer.py`` and
``fp16/fused_optimizer.py``, DeepSpeed 0.19.8.
"""


def record_deepspeed_buffers(hooks: InstalledHooks, owners: MemoryOwners, moment: Callable[[], int]) -> None:
    """Record the flat buffers of DeepSpeed's optimizers whenever one of them begins a step.

    Args:
        hooks: with which DeepSpeed's methods are replaced once it has been imported.
        owners: to which the buffers are added.
        moment: returns the serial of the current moment.
    """

    def step(original: Callable[..., Any], optimizer: Any, *args: Any, **options: Any) -> Any:
        serial = moment()
        for category, names in _ATTRIBUTES.items():
            found = [getattr(optimizer, name, None) for name in names]
            owners.record_flat(serial, category, tensors_in_containers(_without_buckets(found)))
        return original(optimizer, *args, **options)

    for patch in _STEPS:
        hooks.wrap_when_imported(patch, step=step)


def _without_buckets(values: Iterable[Any]) -> list[Any]:
    """Return values with the buffer of each bucket in the bucket's place."""
    flat = [each for value in values for each in (value.values() if isinstance(value, dict) else [value])]
    return [getattr(each, "buffer", each) for each in flat]
