"""The options that memfit lowers before a trainer of a library reads them; with stand-ins for trainers."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from memfit.recording.short_trainers import TrainerShortener

DEFAULTS = {
    "max_steps": -1,
    "num_train_epochs": 3.0,
    "eval_strategy": "no",
    "eval_steps": None,
    "eval_delay": 0,
    "save_strategy": "no",
    "save_steps": 500,
    "load_best_model_at_end": False,
}
BATCHES = 3


class TrainerState:
    def __init__(self, global_step=0):
        self.global_step, self.eval_steps, self.save_steps = global_step, 500, 500

    def compute_steps(self, arguments, max_steps):
        self.eval_steps, self.save_steps = arguments.eval_steps, arguments.save_steps

    @classmethod
    def load_from_json(cls, step):
        return cls(step)


class Trainer:
    """transformers' Trainer, as far as its options go."""

    def __init__(self, **options):
        self.args = SimpleNamespace(**DEFAULTS | options)

    def train(self, resume_from_checkpoint=None):
        self.steps = self.args.max_steps
        if self.steps < 0:
            self.steps = int(self.args.num_train_epochs * BATCHES)
        self.state = TrainerState()
        self.state.compute_steps(self.args, self.steps)
        if resume_from_checkpoint:
            self.state = TrainerState.load_from_json(resume_from_checkpoint)


class Fit:
    """Lightning's Trainer, as far as its options go."""

    def __init__(self, *, max_epochs=-1, max_steps=-1, epochs_done=0, every_n_train_steps=0, **options):
        self.training, self.accumulate_grad_batches = True, 1
        self.global_step = epochs_done * BATCHES
        progress = SimpleNamespace(current=SimpleNamespace(ready=epochs_done))
        self.fit_loop = Loop(max_epochs, progress, SimpleNamespace(max_steps=max_steps))
        self.check_val_every_n_epoch, self.val_check_interval = 1, 1.0
        self.limit_train_batches = self.limit_val_batches = 1.0
        self.limit_test_batches = self.limit_predict_batches = 1.0
        saving = SimpleNamespace(_every_n_train_steps=every_n_train_steps, _every_n_epochs=0)
        self.checkpoint_callbacks = [saving]
        vars(self).update(options)

    def _run_stage(self):
        return self


class Loop(SimpleNamespace):
    def __init__(self, max_epochs, epoch_progress, epoch_loop):
        super().__init__(max_epochs=max_epochs, epoch_progress=epoch_progress, epoch_loop=epoch_loop)

    @property
    def max_steps(self):
        return self.epoch_loop.max_steps


@pytest.fixture
def short(monkeypatch):
    stand_ins = {
        "transformers.trainer": {"Trainer": Trainer},
        "transformers.trainer_callback": {"TrainerState": TrainerState},
        "lightning.pytorch.trainer.trainer": {"Trainer": Fit},
        "pytorch_lightning.trainer.trainer": {"Trainer": type("WithoutStages", (), {})},
    }
    for name, members in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    trainers = TrainerShortener(BATCHES)
    trainers.install()
    yield trainers
    trainers._hooks.remove()


def found(short):
    return [(each.where.removeprefix("TrainingArguments."), each.to, each.of) for each in short.shortened]


STEPS = {"eval_strategy": "steps", "save_strategy": "steps"}


@pytest.mark.parametrize(
    ("options", "lowered"),
    [
        ({"num_train_epochs": 10.5}, [("num_train_epochs", 2, 11)]),
        ({"num_train_epochs": 1.0}, []),
        ({"max_steps": 1000, "num_train_epochs": 10}, [("max_steps", 6, 1000)]),
        ({"max_steps": 5, "eval_steps": 50, **STEPS}, []),  # nothing of it would have happened
        ({"num_train_epochs": 2, "eval_strategy": "epoch", "eval_delay": 5}, [("eval_delay", 1, 5)]),
        (
            {"max_steps": 1000, "eval_steps": 50, **STEPS},
            [("max_steps", 6, 1000), ("eval_steps", 3, 50), ("save_steps", 3, 500)],
        ),
        (
            {"num_train_epochs": 2, "eval_steps": 2, "load_best_model_at_end": True, **STEPS},
            [("save_steps", 2, 500)],  # a multiple of eval_steps
        ),
        ({"max_steps": 6, "eval_steps": 0.5, "save_steps": 0.5, **STEPS}, []),  # shares of the run
    ],
)
def test_options_of_transformers_are_lowered(short, options, lowered):
    Trainer(**options).train()
    assert found(short) == lowered


def test_options_that_a_script_sets_after_it_created_the_trainer_are_lowered(short):
    trainer = Trainer()
    trainer.args.num_train_epochs = 100
    trainer.train()
    assert (trainer.steps, found(short)) == (6, [("num_train_epochs", 2, 100)])


def test_a_resumed_run_goes_on_as_one_that_was_shortened(short):
    trainer = Trainer(num_train_epochs=100, eval_steps=100, **STEPS)
    trainer.train(5000)  # the step at which a run in full was saved
    assert (trainer.steps, trainer.state.global_step) == (12, 6)
    assert (trainer.state.eval_steps, trainer.state.save_steps) == (3, 3)
    assert TrainerState.load_from_json(5000).global_step == 5000, "read by the script itself"


@pytest.mark.parametrize(
    ("options", "lowered"),
    [
        ({}, [("Trainer.max_epochs", 2, None)]),
        ({"max_epochs": 1}, []),
        ({"max_epochs": 100}, [("Trainer.max_epochs", 2, 100)]),
        ({"max_epochs": 100, "epochs_done": 7}, [("Trainer.max_epochs", 9, 100)]),
        ({"max_steps": 1000}, [("Trainer.max_steps", 6, 1000)]),
        (
            {"max_steps": 1000, "val_check_interval": 50},
            [("Trainer.max_steps", 6, 1000), ("Trainer.val_check_interval", 3, 50)],
        ),
        (
            {"max_epochs": 100, "check_val_every_n_epoch": 10},
            [("Trainer.check_val_every_n_epoch", 1, 10), ("Trainer.max_epochs", 2, 100)],
        ),
        ({"max_epochs": 2, "check_val_every_n_epoch": 10}, []),  # it would not have validated
        ({"max_epochs": 1, "every_n_train_steps": 50}, [("SimpleNamespace.every_n_train_steps", 3, 50)]),
    ],
)
def test_options_of_lightning_are_lowered(short, options, lowered):
    Fit(**options)._run_stage()
    assert found(short) == lowered


@pytest.mark.parametrize("training", [True, False])
def test_a_share_of_a_pass_is_all_of_the_shortened_pass(short, training):
    limits = {"limit_train_batches": 0.0, "limit_val_batches": 0.1, "limit_test_batches": 5}
    trainer = Fit(max_epochs=1, training=training, **limits)
    assert trainer._run_stage() is trainer
    assert {name: vars(trainer)[name] for name in limits} == limits | {"limit_val_batches": 1.0}
    assert short.shortened == ()
