"""Train with other systems and, under the same settings, with memfit: the results must be equal.

    python benchmarks/originals.py [--only mmengine,lightning,transformers,accelerate]

Each row trains a model on the CPU with the original's own interface: MMEngine's OptimWrapper and
AmpOptimWrapper in a loop and in its Runner, Lightning's Trainer, transformers' Trainer, and Accelerate's
accumulate. ``memfit.Engine(model, settings).fit(...)`` trains an equal copy, and reads the settings as they
are given to the original. Weights, batches and their order, optimizer and scheduler are the same. After 20
updates all parameters, buffers and the optimizer's state must be equal bit for bit.

Where they are not, the row says why, and the benchmark checks that this is the reason: memfit trains again,
told to do as the original does, which must be equal bit for bit. Or only rounding differs, by at most one
unit in the last place of the largest value for each update. In a row with clipping, the gradients of some
updates exceed the norm, and those of others do not: all clipped alike would hide a wrong divisor.

The rows are in benchmarks/originals/. Exits with 1 if a row that must be equal is not, if a stated difference
is not seen any more, or if none of the originals is installed. Needs, in the versions that the results were
made with (MMEngine 0.10.7 imports with setuptools 84.2.1 and torch 2.14.1 as it is):

    pip install mmengine==0.10.7 lightning==2.6.6 transformers==5.23.0 accelerate==1.15.0
"""

import importlib
import os
import sys
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from measuring import command_line

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # MMEngine would train on a card

import torch

sys.path.insert(0, str(Path(__file__).parent / "originals"))

from comparison import compare

ORIGINALS = {
    "mmengine": "MMEngine",
    "lightning": "Lightning",
    "transformers": "transformers",
    "accelerate": "Accelerate",
}
"""Package -> its name; its rows are in ``with_<package>.py``."""


def report(package: str) -> tuple[int, int] | None:
    """Print the table of one original; return how many rows it has and how many failed, None without it."""
    try:
        number = version(package)
    except PackageNotFoundError:
        print(f"## {ORIGINALS[package]}\n\nnot installed (pip install {package})\n", flush=True)
        return None
    print(f"## {ORIGINALS[package]} {number}\n")
    print("| settings | interface | training | updates | outcome |\n|---|---|---|--:|---|")
    rows = list(importlib.import_module(f"with_{package}").rows())
    failed = 0
    for row in rows:
        outcome = compare(row)
        failed += outcome.failed
        text = f"**FAILED: {outcome.text}**" if outcome.failed else outcome.text
        how = f"`{row.how}`" if row.how else ""
        print(f"| `{written(row.settings)}` | {how} | {row.task} | {outcome.updates} | {text} |", flush=True)
    print()
    return len(rows), failed


def written(settings: Mapping[str, Any]) -> str:
    """Return settings as configuration files write them; the optimizer is in another column."""
    return ", ".join(f"{name}={_value(name, value)}" for name, value in settings.items())


def _value(name: str, value: Any) -> str:
    if name == "optimizer":
        return "..."
    return f"dict({written(value)})" if isinstance(value, Mapping) else repr(value)


def main() -> int:
    """Print a table for each original; return 1 if a row failed, or nothing was compared."""
    parser = command_line(__doc__)
    parser.add_argument("--only", default=",".join(ORIGINALS), metavar="PACKAGES", help="separated by commas")
    chosen = parser.parse_args().only.split(",")
    if unknown := sorted(set(chosen) - set(ORIGINALS)):
        parser.error(f"no rows for {', '.join(unknown)}; there are {', '.join(ORIGINALS)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # BatchNorm with accumulation, on both sides; Lightning's advice
    found = [result for result in map(report, chosen) if result is not None]
    compared, failed = sum(rows for rows, _ in found), sum(failed for _, failed in found)
    print(f"torch {torch.__version__}: {compared} comparisons, {failed} failed")
    return int(failed > 0 or not compared)


if __name__ == "__main__":
    sys.exit(main())
