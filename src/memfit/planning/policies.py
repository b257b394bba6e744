"""Policies of checkpointing that people use, to be run beside a plan."""

from memfit.planning.changes import checkpointed_blocks
from memfit.records import Change

_PRODUCTS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.convolution",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_cudnn_attention",
)


def standard_policies(optimizer: int | None) -> tuple[Change, ...]:
    """Return the policies: they checkpoint the blocks that a model repeats.

    Args:
        optimizer: which optimizer of the script has the model's parameters.
    """
    return (
        checkpointed_blocks("every block", {}, optimizer),
        checkpointed_blocks("every 2nd block", {"every": 2}, optimizer),
        checkpointed_blocks("every block, products kept", {"save_ops": _PRODUCTS}, optimizer),
    )
