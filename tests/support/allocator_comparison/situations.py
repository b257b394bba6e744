"""Every setting of the allocator, alone and in pairs, on random devices; and what the driver found in one."""

import itertools
import json
import random
import subprocess
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).with_name("drive.py")
GIB = 1 << 30

# Setting -> values to test. A conf combines values of one or two settings.
SETTINGS = {
    "expandable_segments": ("expandable_segments:True",),
    "max_split_size_mb": ("max_split_size_mb:20", "max_split_size_mb:64", "max_split_size_mb:200"),
    "max_non_split_rounding_mb": ("max_split_size_mb:64,max_non_split_rounding_mb:128",),
    "large_segment_size_mb": ("large_segment_size_mb:12", "large_segment_size_mb:48"),
    "roundup_power2_divisions": (
        "roundup_power2_divisions:1",
        "roundup_power2_divisions:8",
        "roundup_power2_divisions:[1:2,8:4,64:8,>:2]",
        "roundup_power2_divisions:[256:0,512:2]",
    ),
    "garbage_collection_threshold": ("garbage_collection_threshold:0.6", "garbage_collection_threshold:0.9"),
    "per_process_memory_fraction": ("per_process_memory_fraction:0.7", "per_process_memory_fraction:0.5"),
    "throw_on_cudamalloc_oom": ("throw_on_cudamalloc_oom:True",),
}
EXCLUDE = {"max_split_size_mb", "max_non_split_rounding_mb"}  # values of the second include the first
REFUSED = (
    "max_split_size_mb:20",
    "large_segment_size_mb:48",
)  # PyTorch refuses a max_split_size below large_segment_size


def situations(dice: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Return every conf, first single settings and then pairs, each with random options of the driver."""
    alone = ["", *itertools.chain(*SETTINGS.values())]
    pairs = [
        ",".join(dice.choice([pair for pair in both if pair != REFUSED]))
        for first, second in itertools.combinations(SETTINGS, 2)
        if {first, second} != EXCLUDE
        for both in [list(itertools.product(SETTINGS[first], SETTINGS[second]))]
    ]
    return [(conf, _options(dice, conf)) for conf in alone + pairs]


def _options(dice: random.Random, conf: str) -> dict[str, Any]:
    streams = dice.choice((1, 1, 2, 3, 4))
    return {
        "seed": dice.randrange(1 << 30),
        "streams": streams,
        "share": 0.0 if streams == 1 else dice.choice((0.0, 0.1, 0.3)),
        "total": (2 if "throw" in conf else dice.choice((2, 4, 8, 80)))
        * GIB,  # it throws only on a full device
        "live": dice.choice((0.3, 0.6, 0.95)),
        "fraction": dice.choice((None, 0.75, 0.8)) if "fraction" not in conf else None,
        "pools": dice.choice((0, 0, 2)),
    }


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the result that a process of the driver printed."""
    if done.returncode != 0 and "Unrecognized" in done.stderr:
        return {"operations": 0, "mismatch": "", "unknown": True}  # an older PyTorch lacks the setting
    if done.returncode != 0:
        return {
            "operations": 0,
            "mismatch": "".join(done.stderr.strip().splitlines()[-1:]) or "the driver printed no error",
        }
    return json.loads(done.stdout.splitlines()[-1])
