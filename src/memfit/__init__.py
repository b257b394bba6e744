"""memfit: know what GPU memory a training script will use before there is a GPU, and make it fit.

>>> import memfit
>>> result = memfit.dry_run("train.py", gpu="RTX-3060")  # doctest: +SKIP
>>> result.verdict, result.peak_allocated  # doctest: +SKIP
('fits', 6448338944)
>>> memfit.estimate(model, inputs, optimizer=optimizer).fits("RTX-3060")  # doctest: +SKIP
True
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memfit.api import diagnose, dry_run, estimate, read, record, replay, summarize, write_snapshot
    from memfit.capture.synthetic import synthetic_batch
    from memfit.errors import MemfitError

__version__ = "0.1.0"
__all__ = [
    "MemfitError",
    "diagnose",
    "dry_run",
    "estimate",
    "read",
    "record",
    "replay",
    "summarize",
    "synthetic_batch",
    "write_snapshot",
]
_HOMES = {"MemfitError": "memfit.errors", "synthetic_batch": "memfit.capture.synthetic"}


def __getattr__(name: str) -> object:
    # Late, so that importing memfit (and memfit --help) costs next to nothing.
    if name not in __all__:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "memfit.api")), name)
