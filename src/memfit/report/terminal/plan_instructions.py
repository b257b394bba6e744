"""What to write for a plan: the code before sharding, the start on several GPUs, the optimizer."""

from collections.abc import Iterator, Mapping
from typing import Any

from memfit.analysis.strategy_comparison import SHARDINGS
from memfit.records import ShardingCalls
from memfit.records.own_sharding import DEEPSPEED
from memfit.report.escape_control_characters import escaped


def sharding_name(settings: Mapping[str, Any]) -> str:
    """Return the name of a sharding, given the settings of a ``memfit.Sharding``.

    >>> sharding_name({"mode": "fsdp2", "offload": True})
    'FSDP2 with offload'
    """
    name = next(name for name, mode in SHARDINGS.items() if mode == settings["mode"])
    return f"{name} with offload" if settings.get("offload") else name


def code_before_sharding() -> Iterator[str]:
    """Yield the lines to write before a model is sharded."""
    yield "    torch.distributed.init_process_group()"
    yield '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'


def sharded_optimizer_code(when: str) -> str:
    """Return the line that shards the optimizer with ZeRO-1."""
    return f'    optimizer = memfit.Sharding("zero1").optimizer(optimizer, model){when}'


def own_sharding_instruction(own: ShardingCalls, option: str) -> str:
    """Return how to change an option of the sharding that a script has itself.

    >>> own_sharding_instruction(ShardingCalls("FSDP2", "fully_shard", ("train.py:8",), ()), "it")
    'pass it in each call of fully_shard: train.py:8'
    """
    into = "the configuration of" if own.call == DEEPSPEED else "each call of"
    return f"pass {option} in {into} {own.call}: {escaped(', '.join(own.lines))}"


def launch_instruction(nproc: int) -> str:
    """Return how to start a script whose ranks share each batch."""
    return (
        "Seed the data alike on every rank: each reads the whole batch, and the model computes the rank's "
        f"share of it. Start the script with torchrun --nproc-per-node {nproc}."
    )


_WORDS = {
    "bits": (
        "{bits}-bit optimizer state",
        "The optimizer's state has {bits} bits ({backend}).",
    ),
    "offload": (
        "optimizer state offloaded",
        "The optimizer's state waits on the host between updates, which are made on the GPU.",
    ),
    "step_in_backward": (
        "step in backward",
        "The backward updates each parameter once its gradient is complete, and frees the gradient.",
    ),
}
"""By setting: in a few words, and in a sentence."""


def optimizer_changes_in_words(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a plan changes about the optimizer: for each setting, a few words and a sentence.

    >>> [words for words, _ in optimizer_changes_in_words({"bits": 8, "step_in_backward": True})]
    ['8-bit optimizer state', 'step in backward']
    """
    values = {"backend": "torchao" if settings.get("bits") == 4 else "bitsandbytes", **settings}  # noqa: PLR2004
    for name, (words, sentence) in _WORDS.items():
        if settings.get(name):
            yield words.format(**values), sentence.format(**values)
