"""Train with other systems and, under the same settings, with memfit: the results must be equal.

    python tests/support/originals/report.py [mmengine lightning transformers accelerate]

Each row trains a model on the CPU with the original's own interface: MMEngine's OptimWrapper and
AmpOptimWrapper in a loop and in its Runner, Lightning's Trainer, transformers' Trainer, and Accelerate's
accumulate. ``memfit.Engine(model, settings).fit(...)`` trains an equal copy, and reads the settings as they
are given to the original. Weights, batches and their order, optimizer and scheduler are the same. After 20
updates all parameters, buffers and the optimizer's state must be equal bit for bit.

Where they differ, the row gives the reason, and a further training checks it: memfit, told to do as the
original does, must be equal bit for bit. Or only rounding differs, by at most one unit in the last place of
the largest value for each update. In a row with clipping, the gradients of some updates exceed the norm, and
those of others do not: if all were clipped, a wrong divisor would not show.

Exits with 1 if a row that must be equal is not, or if a stated difference is not seen any more. The results
were made with mmengine 0.10.7, lightning 2.6.6, transformers 5.23.0 and accelerate 1.15.0.
"""

import importlib
import os
import sys
import warnings
from importlib.metadata import version

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # MMEngine would train on a card

import torch
from comparison import compare

ORIGINALS = {
    "mmengine": "MMEngine",
    "lightning": "Lightning",
    "transformers": "transformers",
    "accelerate": "Accelerate",
}
"""Package -> its name; its rows are in ``with_<package>.py``."""


def report(package):
    """Print the table of one original; return how many rows failed."""
    print(f"## {ORIGINALS[package]} {version(package)}\n")
    print("| settings | interface | training | updates | outcome |\n|---|---|---|--:|---|")
    failed = 0
    for row in importlib.import_module(f"with_{package}").rows():
        outcome = compare(row)
        failed += outcome.failed
        text = f"**FAILED: {outcome.text}**" if outcome.failed else outcome.text
        how = f"`{row.how}`" if row.how else ""
        print(f"| `{written(row.settings)}` | {how} | {row.task} | {outcome.updates} | {text} |", flush=True)
    print()
    return failed


def written(settings):
    """Return settings as configuration files write them; the optimizer is in another column."""
    return ", ".join(f"{name}={_value(name, value)}" for name, value in settings.items())


def _value(name, value):
    if name == "optimizer":
        return "..."
    return f"dict({written(value)})" if isinstance(value, dict) else repr(value)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # BatchNorm with accumulation, on both sides; Lightning's advice
    sys.exit(sum(map(report, sys.argv[1:] or ORIGINALS)) > 0)
