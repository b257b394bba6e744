"""The steps of a ZeroRedundancyOptimizer that overlap with the backward of a DistributedDataParallel.

Their update is made bucket by bucket in a communication hook, by a functional optimizer, which calls no hook
of optimizers. A rank may own no bucket; it gets each from its owner.
"""

from collections.abc import Callable
from typing import Any

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch

_BUCKETS = Patch(
    "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook",
    "_broadcast_bucket",
    why="count steps that overlap with the backward",
)


def count_overlapped_zero_steps(hooks: InstalledHooks, *count: Callable[[Any], object]) -> None:
    """Call functions with the optimizer whenever the last bucket of its step has been updated.

    Source: ``hook_with_zero_step`` and ``hook_with_zero_step_interleaved``, PyTorch 2.14.1.
    """

    def broadcast(original: Callable[..., Any], index: int, zero: Any) -> Any:
        result = original(index, zero)
        if index == len(zero._overlap_info.params_per_bucket) - 1:
            for each in count:
                each(zero)
        return result

    hooks.wrap_when_imported(_BUCKETS, _broadcast_bucket=broadcast)
