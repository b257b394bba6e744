"""Shorten the loops that trainers count in steps or epochs: transformers' ``Trainer`` and Lightning's.

Options are lowered on the trainer's own objects when its training begins: then the script has set them, and a
checkpoint that it resumes from has been named. Evaluation and saving that the script asks for by steps come
at least once in the shorter run. Loaders are shortened by ``loader_shortener.py``.
"""

import math
from collections.abc import Callable
from typing import Any

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.records import Shortened

EPOCHS = 2
"""Epochs at most: the second shows what the first leaves behind. Steps at most are those of as many passes
over a shortened loader. A run that resumes has as many more."""
_TRAINER_STATE = Patch(
    "transformers.trainer_callback:TrainerState",
    *("compute_steps", "load_from_json"),
    why="shorten training that is counted in steps",
    optional="some versions of transformers",
)
_TRAIN = Patch(
    "transformers.trainer:Trainer",
    "train",
    why="shorten training that is counted in steps or epochs",
    optional="some versions of transformers",
)
_LIGHTNING = tuple(
    Patch(
        f"{package}.trainer.trainer:Trainer",
        "_run_stage",
        why="shorten training that is counted in steps or epochs",
        optional="some versions of Lightning",
    )
    for package in ("lightning.pytorch", "pytorch_lightning")
)
_UNLIMITED = (None, -1)  # as Lightning says it


class TrainerShortener:
    """Makes the loops of trainers shorter from ``install`` on."""

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._hooks = InstalledHooks()
        self._resumes = False  # within transformers' Trainer.train, as the next
        self._steps: float = math.inf  # the script's own number, where it says one
        self._often: float = math.inf  # steps from one evaluation to the next, at most
        self._found: dict[Shortened, None] = {}  # each once: a script may create a trainer for each fold

    @property
    def shortened(self) -> tuple[Shortened, ...]:
        """What was shortened, in the order in which the options were lowered."""
        return tuple(self._found)

    def install(self) -> None:
        """Shorten loops as soon as the script has imported a trainer."""
        self._hooks.wrap_when_imported(
            _TRAINER_STATE, compute_steps=self._compute_steps, load_from_json=self._load_state
        )
        self._hooks.wrap_when_imported(_TRAIN, train=self._train)
        for trainer in _LIGHTNING:
            self._hooks.wrap_when_imported(trainer, _run_stage=self._run_stage)

    def _lower(self, holder: Any, attribute: str, most: int, option: str) -> None:
        """Lower an attribute, unless it is unset or no greater; ``option`` is its name for the user."""
        value = getattr(holder, attribute, None)
        if value is not None and value > most:
            setattr(holder, attribute, most)
            self._found[Shortened(option, most, math.ceil(value))] = None

    # -- transformers -------------------------------------------------------------------------

    def _train(
        self,
        original: Callable[..., Any],
        trainer: Any,
        resume_from_checkpoint: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._resumes, self._often = bool(resume_from_checkpoint), math.inf
        epochs = EPOCHS + EPOCHS * self._resumes
        if trainer.args.max_steps > 0:  # then the Trainer ignores the number of epochs
            self._steps = trainer.args.max_steps
            self._lower_argument(trainer.args, "max_steps", epochs * self._batches)
        else:
            self._lower_argument(trainer.args, "num_train_epochs", epochs)
        try:
            return original(trainer, resume_from_checkpoint, *args, **kwargs)
        finally:
            self._resumes, self._steps = False, math.inf

    def _lower_argument(self, arguments: Any, name: str, most: int) -> None:
        self._lower(arguments, name, most, f"TrainingArguments.{name}")

    def _load_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the state in a checkpoint as a shortened run would have left it."""
        state = original(*args, **kwargs)
        if self._resumes:
            state.global_step = min(state.global_step, EPOCHS * self._batches)
            state.eval_steps = min(state.eval_steps, self._often)
            state.save_steps = min(state.save_steps, self._often)
        return state

    def _compute_steps(
        self, original: Callable[..., None], state: Any, arguments: Any, max_steps: int
    ) -> None:
        """Have evaluation and saving happen in a run of ``max_steps``, and training go on between two."""
        often = self._often = max(1, max_steps // (EPOCHS + EPOCHS * self._resumes))
        if arguments.eval_strategy == "steps" and arguments.eval_steps <= self._steps:
            self._lower_argument(arguments, "eval_steps", often)
        if arguments.eval_strategy != "no" and arguments.eval_delay <= self._steps:
            self._lower_argument(arguments, "eval_delay", 1)
        if arguments.save_strategy == "steps" and arguments.save_steps <= self._steps:
            if arguments.load_best_model_at_end and arguments.eval_steps >= 1:
                often -= often % int(arguments.eval_steps)  # the Trainer wants a multiple
            self._lower_argument(arguments, "save_steps", often)
        original(state, arguments, max_steps)

    # -- Lightning ----------------------------------------------------------------------------

    def _run_stage(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        for kind in ("train", "val", "test", "predict"):
            limit = getattr(trainer, f"limit_{kind}_batches")
            if isinstance(limit, float) and 0 < limit < 1:  # a part of the shortened pass may be no batch
                setattr(trainer, f"limit_{kind}_batches", 1.0)
        if trainer.training:
            self._limit_fit(trainer)
        return original(trainer, *args, **kwargs)

    def _limit_fit(self, trainer: Any) -> None:
        loop = trainer.fit_loop
        epochs = loop.epoch_progress.current.ready + EPOCHS
        if loop.max_epochs in _UNLIMITED and loop.max_steps in _UNLIMITED:
            loop.max_epochs = epochs
            self._found[Shortened("Trainer.max_epochs", epochs, None)] = None
        if trainer.check_val_every_n_epoch is not None and (
            loop.max_epochs in _UNLIMITED or trainer.check_val_every_n_epoch <= loop.max_epochs
        ):
            self._lower(trainer, "check_val_every_n_epoch", 1, "Trainer.check_val_every_n_epoch")
        self._lower(loop, "max_epochs", epochs, "Trainer.max_epochs")
        steps = trainer.global_step + EPOCHS * self._batches
        self._lower(loop.epoch_loop, "max_steps", steps, "Trainer.max_steps")
        if isinstance(trainer.val_check_interval, int):
            self._lower(trainer, "val_check_interval", self._batches, "Trainer.val_check_interval")
        often = max(1, self._batches // trainer.accumulate_grad_batches)
        for callback in trainer.checkpoint_callbacks:
            for name, most in (("every_n_train_steps", often), ("every_n_epochs", 1)):
                self._lower(callback, f"_{name}", most, f"{type(callback).__name__}.{name}")
