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
    from memfit.api import (
        diagnose,
        diff,
        dry_run,
        estimate,
        explain,
        pack,
        read,
        record,
        replay,
        summarize,
        write_snapshot,
    )
    from memfit.arenas.arena import arena
    from memfit.errors import MemfitError
    from memfit.estimating.synthetic_batch import synthetic_batch
    from memfit.strategies.accumulation import Accumulation
    from memfit.strategies.apply import apply, revert
    from memfit.strategies.checkpointing import Checkpointing
    from memfit.strategies.configuration import Configuration, configure
    from memfit.strategies.offload import Offload
    from memfit.strategies.optimizer_state import OptimizerState
    from memfit.strategies.plan import Plan
    from memfit.strategies.precision import LossScale, Precision
    from memfit.strategies.precision_decorators import auto_fp16, force_fp32
    from memfit.train.callbacks import Callback, EarlyStopping, Saving
    from memfit.train.engine import Engine
    from memfit.train.job import Job
    from memfit.train.progress_bar import ProgressBar
    from memfit.train.step_result import StepResult
    from memfit.versions import __version__
    from memfit.watching.watch import watch

__all__ = [
    "Accumulation",
    "Callback",
    "Checkpointing",
    "Configuration",
    "EarlyStopping",
    "Engine",
    "Job",
    "LossScale",
    "MemfitError",
    "Offload",
    "OptimizerState",
    "Plan",
    "Precision",
    "ProgressBar",
    "Saving",
    "StepResult",
    "__version__",
    "apply",
    "arena",
    "auto_fp16",
    "configure",
    "diagnose",
    "diff",
    "dry_run",
    "estimate",
    "explain",
    "force_fp32",
    "pack",
    "read",
    "record",
    "replay",
    "revert",
    "summarize",
    "synthetic_batch",
    "watch",
    "write_snapshot",
]
_HOMES = {
    "__version__": "memfit.versions",
    "Accumulation": "memfit.strategies.accumulation",
    "Callback": "memfit.train.callbacks",
    "Checkpointing": "memfit.strategies.checkpointing",
    "Configuration": "memfit.strategies.configuration",
    "EarlyStopping": "memfit.train.callbacks",
    "Engine": "memfit.train.engine",
    "Job": "memfit.train.job",
    "LossScale": "memfit.strategies.precision",
    "MemfitError": "memfit.errors",
    "Offload": "memfit.strategies.offload",
    "OptimizerState": "memfit.strategies.optimizer_state",
    "Plan": "memfit.strategies.plan",
    "Precision": "memfit.strategies.precision",
    "ProgressBar": "memfit.train.progress_bar",
    "Saving": "memfit.train.callbacks",
    "StepResult": "memfit.train.step_result",
    "apply": "memfit.strategies.apply",
    "arena": "memfit.arenas.arena",
    "auto_fp16": "memfit.strategies.precision_decorators",
    "configure": "memfit.strategies.configuration",
    "force_fp32": "memfit.strategies.precision_decorators",
    "revert": "memfit.strategies.apply",
    "synthetic_batch": "memfit.estimating.synthetic_batch",
    "watch": "memfit.watching.watch",
}


def __getattr__(name: str) -> object:
    # Late, so that importing memfit (and memfit --help) costs next to nothing.
    if name not in __all__:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "memfit.api")), name)
