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
    from memfit.capture.synthetic import synthetic_batch
    from memfit.errors import MemfitError
    from memfit.live.watch import watch
    from memfit.placing.arena import arena
    from memfit.strategies.accumulation import Accumulation
    from memfit.strategies.apply import apply, revert
    from memfit.strategies.checkpointing import Checkpointing
    from memfit.strategies.configuration import Configuration, configure
    from memfit.strategies.decorators import auto_fp16, force_fp32
    from memfit.strategies.offload import Offload
    from memfit.strategies.optimizer_state import OptimizerState
    from memfit.strategies.plan import Plan
    from memfit.strategies.precision import LossScale, Precision
    from memfit.train.callbacks import Callback, EarlyStopping, Saving
    from memfit.train.engine import Engine
    from memfit.train.job import Job
    from memfit.train.progress import ProgressBar
    from memfit.train.result import StepResult

__version__ = "0.1.0"
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
    "ProgressBar": "memfit.train.progress",
    "Saving": "memfit.train.callbacks",
    "StepResult": "memfit.train.result",
    "apply": "memfit.strategies.apply",
    "arena": "memfit.placing.arena",
    "auto_fp16": "memfit.strategies.decorators",
    "configure": "memfit.strategies.configuration",
    "force_fp32": "memfit.strategies.decorators",
    "revert": "memfit.strategies.apply",
    "synthetic_batch": "memfit.capture.synthetic",
    "watch": "memfit.live.watch",
}


def __getattr__(name: str) -> object:
    # Late, so that importing memfit (and memfit --help) costs next to nothing.
    if name not in __all__:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "memfit.api")), name)
