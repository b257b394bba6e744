"""The scripts of others that foreign_plans.py plans: where each is in a folder of clones, data and command.

A script's options make it small enough for a CPU, and its activations large enough that an expert reaches
45 % of its need: parameters, their state and the CUDA context are a part of it that stays.
"""

import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ForeignScript:
    """A script as its repository has it, which is not edited."""

    name: str
    repository: str
    """On GitHub, with the commit that the results were made with."""
    folder: str
    """The folder of the clone, or one in it, in which the script is started: a copy."""
    command: tuple[str, ...]
    """The script and its arguments."""
    prepare: Callable[[Path], None]
    """Makes the data in the copied folder."""
    on_cpu: tuple[str, ...] = ()
    """Arguments with which it trains on a CPU, if it does not choose the device itself."""
    packages: tuple[str, ...] = ()
    """Needed besides torch."""
    environment: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[float, str] = field(default_factory=dict)
    """By share of the need: why no plan fits, in the words of an expert."""


def write_text(path: Path) -> None:
    """Write 4,000 lines of words in random order."""
    words = ["the", "ghost", "of", "a", "tensor", "and", "king", "shall", "not", "pass"]
    chosen = random.Random(0)  # noqa: S311 - text to train on
    path.write_text("\n".join(" ".join(chosen.choices(words, k=9)) for _ in range(4000)))


def _nano_gpt(folder: Path) -> None:
    data = folder / "data/shakespeare_char"
    write_text(data / "input.txt")  # the script downloads no text then
    subprocess.run([sys.executable, data / "prepare.py"], check=True, capture_output=True)


SCRIPTS = (
    ForeignScript(
        "nanoGPT",
        "karpathy/nanoGPT at 3adf61e",
        "nanoGPT",
        (
            "train.py",
            "--dataset=shakespeare_char",
            "--compile=False",
            "--dtype=float32",
            "--gradient_accumulation_steps=1",
            "--batch_size=192",
            "--n_layer=4",
            "--n_head=4",
            "--n_embd=128",
            "--block_size=256",
            "--eval_iters=1",
            "--warmup_iters=2",
        ),
        _nano_gpt,
        on_cpu=("--device=cpu", "--max_iters=1"),
        packages=("numpy", "requests"),
    ),
)
