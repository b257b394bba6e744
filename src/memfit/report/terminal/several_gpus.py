"""What a script for one GPU needs to train on several, as text."""

from collections.abc import Iterator, Mapping
from typing import Any

from memfit.analysis.strategy_comparison import SHARDINGS


def sharding_name(settings: Mapping[str, Any]) -> str:
    """Return the name of a sharding, given the settings of a ``memfit.Sharding``.

    >>> sharding_name({"mode": "fsdp2", "offload": True})
    'FSDP2 with offload'
    """
    name = next(name for name, mode in SHARDINGS.items() if mode == settings["mode"])
    return f"{name} with offload" if settings.get("offload") else name


def before_sharding() -> Iterator[str]:
    """Yield the lines to write before a model is sharded."""
    yield "    torch.distributed.init_process_group()"
    yield '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'


def sharded_optimizer(when: str) -> str:
    """Return the line that shards the optimizer with ZeRO-1."""
    return f'    optimizer = memfit.Sharding("zero1").optimizer(optimizer, model){when}'


def how_to_start(nproc: int) -> str:
    """Return how to start a script so that its ranks train on different samples."""
    return (
        "Give each rank its own part of the data (DistributedSampler), and start the script with "
        f"torchrun --nproc-per-node {nproc}."
    )
