"""Unmodified scripts whose optimizers get a plan's settings, or are refused by name."""

import pytest
import torch
from msgspec import json
from torch import nn

import memfit
from memfit.errors import UsageError
from memfit.injection import inject_plan
from memfit.injection.injection_files import (
    InjectionReport,
    InjectionReporter,
    InjectionSettings,
    injection_report_writer,
)
from memfit.injection.models_of_optimizers import ModelsOfOptimizers
from memfit.patching.installed_hooks import InstalledHooks
from memfit.records import Change
from memfit.strategies.mechanisms.offloaded_optimizer_state import OffloadedOptimizerState
from memfit.strategies.mechanisms.optimizer_step import unwrapped_optimizer_step
from support.late_stream import late_state_copies
from support.optimizer_loops import halving, loss_of, net, same

IN_BACKWARD = {"step_in_backward": True}
OFFLOADED = {"offload": True}


class Injection:
    """Injects settings into this process, as into a script's."""

    def __init__(self, folder):
        self.hooks, self.file = InstalledHooks(), folder / "report.json"
        self.models, self.report_file = (
            ModelsOfOptimizers(),
            InjectionReporter(injection_report_writer(self.file)),
        )
        self.models.names.follow(self.hooks)

    def change(self, settings, **more):
        return InjectionSettings(Change({"optimizer_state": settings, **more}), str(self.file))

    def make(self, settings, **more):
        injector = inject_plan._PlanInjector(self.change(settings, **more), self.report_file, self.models)
        injector.install(self.hooks)
        return injector

    @property
    def report(self):
        return json.decode(self.file.read_bytes(), type=InjectionReport)


@pytest.fixture
def injection(tmp_path):
    made = Injection(tmp_path)
    with late_state_copies():
        yield made
    made.hooks.remove()


def gradients(model):
    return [torch.Tensor.grad.__get__(each) for each in model.parameters()]  # not as a script reads them


class Script:
    """A script: it creates a model, an optimizer and a scheduler, and trains."""

    def __init__(self):
        self.model = net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = halving(self.optimizer)
        self.freed = []

    def train(self, between=lambda: None):
        for seed in range(3):
            self.optimizer.zero_grad()
            loss_of(self.model, seed).backward()
            self.freed.append(all(each is None for each in gradients(self.model)))
            between()
            self.optimizer.step()
            self.scheduler.step()
        return self

    @property
    def is_offloaded(self):
        return isinstance(
            getattr(unwrapped_optimizer_step(self.optimizer), "__self__", None), OffloadedOptimizerState
        )


@pytest.mark.parametrize("settings", [IN_BACKWARD, OFFLOADED, IN_BACKWARD | OFFLOADED])
@pytest.mark.parametrize("forked", [False, True])
def test_a_script_trains_the_same_bit_for_bit(injection, settings, forked):
    plain = Script().train()
    assert plain.freed == [False] * 3
    if forked:  # of a script as written, which has an optimizer already
        injection.models.note_optimizers(injection.hooks)
        script = Script()
        injection.make(settings).catch_up()
        assert injection.report.unfit_optimizer == ""  # before the next call of a module
        script.train()
    else:
        injection.make(settings)
        script = Script().train()
    assert same(script.model, plain.model)
    assert script.freed == [settings != OFFLOADED] * 3
    assert script.is_offloaded is (settings != IN_BACKWARD)
    assert (injection.report.unfit_optimizer, len(injection.report.models)) == ("", 1)


def test_a_script_that_clips_gradients_is_refused_and_goes_on(injection):
    injection.make(IN_BACKWARD)
    script = Script()
    script.train(lambda: nn.utils.clip_grad_norm_(script.model.parameters(), 1.0))
    assert "clip_grad_norm_ (test_inject_optimizer_state.py:" in injection.report.unfit_optimizer


def test_two_backwards_for_an_update_are_refused(injection):
    injection.make(IN_BACKWARD)
    script = Script()
    script.train(lambda: loss_of(script.model, 7).backward())
    assert "received its gradient in two parts" in injection.report.unfit_optimizer


def test_gradients_of_another_optimizer_s_loss_are_refused(injection):
    """As in a GAN: the generator's loss leaves gradients in the discriminator, which are dropped."""
    injection.make(IN_BACKWARD)
    generator, critic = Script(), Script()
    (loss_of(generator.model, 0) + loss_of(critic.model, 0)).backward()
    generator.optimizer.step()
    assert injection.report.unfit_optimizer == ""
    critic.optimizer.zero_grad()
    assert "zero_grad (test_inject_optimizer_state.py:" in injection.report.unfit_optimizer


def test_optimizers_that_share_parameters_are_refused(injection):
    injection.make(IN_BACKWARD)
    script = Script()
    other = torch.optim.SGD(script.model[0].parameters())
    script.train()
    assert "two optimizers of the script share parameters" in injection.report.unfit_optimizer
    assert other.param_groups


def test_an_optimizer_that_does_not_update_each_parameter_by_itself_is_refused(injection):
    injection.make(OFFLOADED)
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())
    loss_of(model, 0)
    assert "needs an optimizer that updates each" in injection.report.unfit_optimizer
    assert "step" not in vars(optimizer)


def test_a_script_is_refused_until_it_calls_a_module(injection):
    injection.make(OFFLOADED)
    script = Script()
    assert "calls no module" in injection.report.unfit_optimizer
    script.train()
    assert injection.report.unfit_optimizer == ""


def test_micro_batches_and_a_step_in_each_backward_contradict_each_other(injection):
    with pytest.raises(UsageError, match="step_in_backward and accumulation cannot be combined"):
        injection.make(IN_BACKWARD, accumulation={"parts_per_batch": 2})
    injection.make(OFFLOADED, accumulation={"parts_per_batch": 2})


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("own", [None, memfit.Precision("bf16")])
def test_an_engine_of_the_script_s_carries_the_settings_out(injection, early, own):
    injection.make(IN_BACKWARD | OFFLOADED)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters()) if early else torch.optim.AdamW
    engine = memfit.Engine(model, own, optimizer=optimizer, loss=loss_of)
    engine.step(0)
    assert engine._ledger.update.in_backward is not None
    assert (
        unwrapped_optimizer_step(engine.optimizer) == engine._ledger.update.offloaded.step
    )  # and not another's of ours
    assert all(each is None for each in gradients(model))
    assert (injection.report.unfit_optimizer, len(injection.report.models)) == ("", 1)


def test_settings_of_the_script_s_own_plan_are_refused(injection):
    injection.make(IN_BACKWARD)
    memfit.Engine(net(), memfit.OptimizerState(offload=True), optimizer=torch.optim.AdamW)
    assert "the script applies optimizer_state itself" in injection.report.unfit_optimizer


def test_a_fork_of_a_script_with_an_engine_does_not_get_the_settings(injection):
    memfit.Engine(net(), optimizer=torch.optim.AdamW, loss=loss_of)
    injected = inject_plan._Injected(injection.report_file, False, injection.models, None, InstalledHooks())
    with pytest.raises(UsageError, match=r"uses memfit\.Engine"):
        injected.become(injection.change(IN_BACKWARD), None)
