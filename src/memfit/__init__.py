"""memfit: know what GPU memory a training script will use before there is a GPU, and make it fit.

>>> import memfit
>>> result = memfit.dry_run("train.py", gpu="RTX-3060")  # doctest: +SKIP
>>> result.verdict, result.peak_allocated  # doctest: +SKIP
('fits', 6448338944)
>>> memfit.estimate(model, inputs, optimizer=optimizer).fits("RTX-3060")  # doctest: +SKIP
True
"""

# ruff: noqa: I001 - one statement a module, aliases and all

TYPE_CHECKING = False  # of typing, whose import would delay the command's first reaction to Ctrl-C
_NAMES_OF_MODULE = {
    "memfit.api": (
        "auto_checkpoint",
        "check",
        "compare",
        "diagnose",
        "diff",
        "dry_run",
        "estimate",
        "explain",
        "gpus_for",
        "max_batch",
        "pack",
        "plan",
        "read",
        "record",
        "replay",
        "summarize",
        "verify",
        "write_snapshot",
    ),
    "memfit.arenas.open_arena": ("arena",),
    "memfit.errors": ("MemfitError",),
    "memfit.estimating.synthetic_batch": ("synthetic_batch",),
    "memfit.strategies.accumulation": ("Accumulation",),
    "memfit.strategies.apply": ("apply", "revert"),
    "memfit.strategies.arena_settings": ("ArenaSettings",),
    "memfit.strategies.checkpoint_function": ("checkpoint",),
    "memfit.strategies.checkpointing": ("Checkpointing", "Region"),
    "memfit.strategies.chunked_head": ("ChunkedHead",),
    "memfit.strategies.compilation": ("Compilation",),
    "memfit.strategies.configuration": ("Configuration", "configure"),
    "memfit.strategies.offload": ("Offload",),
    "memfit.strategies.optimizer_state": ("OptimizerState",),
    "memfit.strategies.plan": ("Plan",),
    "memfit.strategies.precision": ("LossScale", "Precision"),
    "memfit.strategies.precision_decorators": ("auto_fp16", "force_fp32"),
    "memfit.strategies.sharding": ("Sharding",),
    "memfit.train.callbacks": ("Callback", "EarlyStopping", "Saving"),
    "memfit.train.engine": ("Engine",),
    "memfit.train.job": ("Job",),
    "memfit.train.progress_bar": ("ProgressBar",),
    "memfit.train.accumulation_window": ("StepResult",),
    "memfit.versions": ("__version__",),
    "memfit.watching.watch": ("watch",),
}
_INTEGRATIONS = {"accelerate", "lightning", "mmengine", "transformers"}
"""Modules that need the extra of their name."""
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}
__all__ = sorted(_MODULE_OF_NAME)  # noqa: PLE0605 - strings, from the table

if TYPE_CHECKING:  # type checkers cannot read the table; a test checks that these imports agree with it
    from memfit.api import (
        auto_checkpoint as auto_checkpoint,
        check as check,
        compare as compare,
        diagnose as diagnose,
        diff as diff,
        dry_run as dry_run,
        estimate as estimate,
        explain as explain,
        gpus_for as gpus_for,
        max_batch as max_batch,
        pack as pack,
        plan as plan,
        read as read,
        record as record,
        replay as replay,
        summarize as summarize,
        verify as verify,
        write_snapshot as write_snapshot,
    )
    from memfit.arenas.open_arena import arena as arena
    from memfit.errors import MemfitError as MemfitError
    from memfit.estimating.synthetic_batch import synthetic_batch as synthetic_batch
    from memfit.integrations import (
        accelerate as accelerate,
        lightning as lightning,
        mmengine as mmengine,
        transformers as transformers,
    )
    from memfit.strategies.accumulation import Accumulation as Accumulation
    from memfit.strategies.apply import (
        apply as apply,
        revert as revert,
    )
    from memfit.strategies.arena_settings import ArenaSettings as ArenaSettings
    from memfit.strategies.checkpoint_function import checkpoint as checkpoint
    from memfit.strategies.checkpointing import (
        Checkpointing as Checkpointing,
        Region as Region,
    )
    from memfit.strategies.chunked_head import ChunkedHead as ChunkedHead
    from memfit.strategies.compilation import Compilation as Compilation
    from memfit.strategies.configuration import (
        Configuration as Configuration,
        configure as configure,
    )
    from memfit.strategies.offload import Offload as Offload
    from memfit.strategies.optimizer_state import OptimizerState as OptimizerState
    from memfit.strategies.plan import Plan as Plan
    from memfit.strategies.precision import (
        LossScale as LossScale,
        Precision as Precision,
    )
    from memfit.strategies.precision_decorators import (
        auto_fp16 as auto_fp16,
        force_fp32 as force_fp32,
    )
    from memfit.strategies.sharding import Sharding as Sharding
    from memfit.train.callbacks import (
        Callback as Callback,
        EarlyStopping as EarlyStopping,
        Saving as Saving,
    )
    from memfit.train.engine import Engine as Engine
    from memfit.train.job import Job as Job
    from memfit.train.progress_bar import ProgressBar as ProgressBar
    from memfit.train.accumulation_window import StepResult as StepResult
    from memfit.versions import __version__ as __version__
    from memfit.watching.watch import watch as watch


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_INTEGRATIONS})


def __getattr__(name: str) -> object:
    # Imported on first use, so that ``import memfit`` and ``memfit --help`` stay fast.
    from importlib import import_module

    if name in _INTEGRATIONS:
        return import_module(f"memfit.integrations.{name}")
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module 'memfit' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF_NAME[name]), name)
