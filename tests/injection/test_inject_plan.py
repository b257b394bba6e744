"""Reruns of a script with a plan: the models that get it, fused optimizers, and how the rerun ended."""

import copy
import functools
import re
import sys
from pathlib import Path

import pytest
import torch
from msgspec import json
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import memfit
from memfit.analysis.trial_result import TrialResult
from memfit.errors import TargetError
from memfit.injection import inject_plan
from memfit.injection.injection_files import (
    NEVER_CALLED,
    InjectionReport,
    InjectionReporter,
    InjectionSettings,
    injection_report_writer,
)
from memfit.injection.models_of_optimizers import ModelsOfOptimizers
from memfit.patching.installed_hooks import InstalledHooks
from memfit.records import Change, LoaderBatchSize, ScriptEnd
from memfit.run.options import RunOptions
from memfit.run.parent import RecordedRun, ScriptProgress
from memfit.strategies.mechanisms.wrap_forward import forward_wrappers
from memfit.trials import trial_run
from memfit.trials.script_standbys import ScriptRun
from support.traces import trace_of


class Net(nn.Module):
    """A model without a forward, as if its loop called the blocks or another method."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3))


def inject(change, hooks):
    """Have optimizers' models get the plan of a change."""
    models = ModelsOfOptimizers()
    models.names.follow(hooks)
    inject_plan._PlanInjector(
        change, InjectionReporter(injection_report_writer(Path(change.report))), models
    ).install(hooks)


@pytest.fixture
def changed(tmp_path):
    """Have the injector checkpoint models; return a function that reads the names of changed models."""
    report = tmp_path / "report.json"
    report.write_bytes(json.encode(InjectionReport()))
    hooks = InstalledHooks()
    inject(InjectionSettings(Change({"checkpointing": {}}), str(report)), hooks)
    entry = r"(\w+) \((?:optimizer|plan): test_inject_plan\.py:\d+\)"

    def models():
        found = json.decode(report.read_bytes(), type=InjectionReport).models
        return [re.fullmatch(entry, model)[1] for model in found]

    yield models
    hooks.remove()


def checkpointed(model):
    """Return, for each block, whether it is checkpointed."""
    return [any(forward_wrappers(block)) for block in model.blocks]


def test_a_trained_model_gets_the_plan_once_and_as_a_whole(changed):
    trained, teacher, plain = Net(), Net(), nn.Sequential(nn.Linear(2, 2))
    torch.optim.SGD(trained.blocks[1].parameters())
    torch.optim.Adam([{"params": iter(trained.parameters())}, {"params": plain.parameters()}])
    assert checkpointed(trained) == [True] * 3
    assert checkpointed(teacher) == [False] * 3
    assert changed() == ["Net"]  # the plain model has nothing to checkpoint


def test_copies_and_what_a_data_parallel_over_one_gpu_calls_get_the_plan(changed):
    copied, wrapped = copy.deepcopy(Net()), nn.DataParallel(Net())
    torch.optim.SGD([*copied.parameters(), *wrapped.parameters()])
    assert checkpointed(copied) == checkpointed(wrapped.module) == [True] * 3
    assert changed() == ["Net", "Net"]  # as without a GPU, where scripts leave the DataParallel out


@pytest.mark.parametrize("early", [False, True])
def test_a_plan_that_the_script_applies_stays_the_only_one(changed, early):
    model = Net()
    if early:
        torch.optim.SGD(model.parameters())
    memfit.apply(model.blocks, memfit.Checkpointing("1"))
    torch.optim.SGD(model.parameters())
    assert checkpointed(model) == [False, True, False]
    assert changed() == []


@pytest.mark.parametrize("own", [None, memfit.Precision("bf16"), memfit.Accumulation(parts_per_batch=2)])
@pytest.mark.parametrize("early", [True, False])
def test_a_plan_of_the_scripts_engine_is_completed(changed, early, own):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters()) if early else torch.optim.SGD
    engine = memfit.Engine(model, own, optimizer=optimizer)
    assert (checkpointed(model), changed()) == ([True] * 3, ["Net"])
    assert engine.plan == memfit.Engine(Net(), own, optimizer=torch.optim.SGD).plan


def test_a_plan_of_the_scripts_engine_keeps_its_settings(changed):
    model = Net()
    memfit.Engine(model, memfit.Checkpointing("blocks.1"), optimizer=torch.optim.SGD)
    assert (checkpointed(model), changed()) == ([False, True, False], [])


@pytest.mark.parametrize(
    ("chosen", "fused"),
    [({}, True), ({"fused": None, "foreach": None}, True), ({"fused": False}, False), ({"foreach": 1}, None)],
)
def test_an_optimizer_is_fused_unless_the_script_chooses(chosen, fused):
    def made(_optimizer, **settings):
        assert settings.get("fused") is fused

    inject_plan._fused(made, None, **chosen)


def test_loaders_created_at_the_line_get_the_other_batch_size():
    data, others = torch.arange(8), {"num_workers": 0}
    hooks = InstalledHooks()
    line = sys._getframe().f_lineno + 4
    size = LoaderBatchSize(2, f"{__file__}:{line}")
    hooks.wrap(inject_plan._LOADER, "__init__", functools.partial(inject_plan._resized, size))
    sampler = BatchSampler(SequentialSampler(data), 4, drop_last=False)
    found = [DataLoader(data, 4), DataLoader(data, batch_size=4), DataLoader(data, **others, batch_size=None)]
    own = DataLoader(data, batch_sampler=sampler)
    hooks.remove()
    assert [loader.batch_size for loader in found] == [2, 2, None]
    assert (own.batch_size, own.batch_sampler) == (None, sampler)


OFFLOAD = {"offload": {"what": "activations"}}
DDP = {"sharding": {"mode": "ddp"}}


@pytest.fixture
def rerun(monkeypatch):
    """Return a function that reruns a script and pretends that the rerun ended as given."""

    def run(end, report=InjectionReport(models=("Net", "Net")), plan=OFFLOAD):  # noqa: B008 - frozen
        change = Change(plan, fused=True, arguments=("--bf16",))

        def run_script(command, options, _ghost, _output, _on_progress, **_start):
            if isinstance(end, TargetError):
                raise end
            assert command == ("train.py", "--fast", "--bf16")
            module, file = options.preload
            assert module == inject_plan.__name__
            settings = json.decode(Path(file).read_bytes(), type=InjectionSettings)
            assert (settings.change, settings.silent) == (change, True)
            Path(settings.report).write_bytes(json.encode(report))
            return RecordedRun(trace_of((), end=end), None)

        monkeypatch.setattr(trial_run, "run_script", run_script)
        return trial_run.run_trial(ScriptRun(("train.py", "--fast"), RunOptions(), None, change), print)

    return run


@pytest.mark.parametrize("end", [ScriptEnd("end", 0), ScriptEnd("steps", 0)])
def test_a_completed_run_reports_the_models_that_were_changed(rerun, end):
    found = rerun(end)
    assert isinstance(found, TrialResult)
    assert (found.trace.end, found.models) == (end, ("Net", "Net"))


@pytest.mark.parametrize(
    "end", [ScriptEnd("end", 3), ScriptEnd("exception", 1), ScriptEnd("out of memory", 1)]
)
def test_a_failed_run_reports_how_it_ended(rerun, end):
    assert rerun(end) == end


@pytest.mark.parametrize("why", ["unfit_optimizer", "cannot_accumulate"])
def test_a_run_ends_once_the_script_does_what_its_change_does_not_permit(monkeypatch, why):
    def run_script(_command, options, _ghost, _output, on_progress, **_more):
        settings = json.decode(Path(options.preload[1]).read_bytes(), type=InjectionSettings)
        waiting = InjectionReport(models=("Net",), unfit_optimizer=NEVER_CALLED)  # it may call one yet
        Path(settings.report).write_bytes(json.encode(waiting))
        on_progress(ScriptProgress(step=1))
        report = InjectionReport(models=("Net",), **{why: "it clips gradients"})
        Path(settings.report).write_bytes(json.encode(report))
        on_progress(ScriptProgress(step=2))
        pytest.fail("the run goes on")

    monkeypatch.setattr(trial_run, "run_script", run_script)
    shown = []
    run = ScriptRun(("train.py",), RunOptions(), None, Change(fused=True))
    found = trial_run.run_trial(run, shown.append)
    assert [each.step for each in shown] == [1]
    assert found.reason == "refused"
    assert "it clips gradients" in found.exception


def test_a_rerun_in_which_no_model_was_changed_is_refused(rerun):
    found = rerun(ScriptEnd("end", 0), InjectionReport())
    reason = "offload could not be applied to any model whose parameters an optimizer takes"
    assert found == ScriptEnd("refused", 0, reason)
    found = rerun(ScriptEnd("end", 0), InjectionReport(refusals=(("it does not suit", ""),)))
    assert found == ScriptEnd("refused", 0, "it does not suit")


def test_a_model_that_a_plan_does_not_suit_does_not_keep_others_from_it(rerun):
    found = rerun(ScriptEnd("end", 0), InjectionReport(models=("Net",), refusals=(("no blocks", ""),)))
    assert found.models == ("Net",)


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (InjectionReport(models=("Net",), refusals=(("no blocks", ""),)), "no blocks"),
        (InjectionReport(models=("Net",), uncalled=("Net",)), "the script does not call Net itself"),
    ],
)
def test_a_sharding_must_suit_every_model_and_be_called(rerun, report, why):
    found = rerun(ScriptEnd("end", 0), report, DDP)
    assert (found.reason, found.exception[: len(why)]) == ("refused", why)


def test_a_sharding_that_does_not_suit_is_named_rather_than_the_failure_that_followed(rerun):
    refused = InjectionReport(refusals=(("the script itself trains Net in a DistributedDataParallel", ""),))
    assert rerun(ScriptEnd("exception", 1), refused, DDP).exception == refused.refusals[0][0]


def test_a_plan_that_runs_again_what_it_keeps_is_refused(rerun):
    found = rerun(ScriptEnd("end", 0), InjectionReport(("Net",), again={"aten.mm.default": 4}))
    assert found.exception == "the recomputation runs again what the plan keeps: aten.mm.default (4 times)"


def test_a_completed_run_reports_the_share_of_each_rank(rerun):
    assert rerun(ScriptEnd("end", 0), InjectionReport(("Net",), shares=(3, 2)), DDP).shares == (3, 2)


def test_a_run_that_cannot_start_reports_why(rerun):
    found = rerun(TargetError("train.py failed before it used the GPU: EOFError"))
    assert found.reason == "refused"
    assert (
        found.exception
        == "when memfit ran the script without input, train.py failed before it used the GPU: EOFError"
    )


def test_interrupting_the_rerun_interrupts_everything(rerun):
    with pytest.raises(KeyboardInterrupt):
        rerun(ScriptEnd("interrupted", 130))


def test_a_plan_for_one_optimizer_s_models_leaves_others_alone(tmp_path):
    hooks, report = InstalledHooks(), tmp_path / "report.json"
    inject(InjectionSettings(Change({"checkpointing": {}}, optimizer=1), str(report)), hooks)
    try:
        models = [nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))) for _ in range(3)]
        for model in models:
            torch.optim.SGD(model.parameters())
    finally:
        hooks.remove()
    assert ["forward" in vars(model[0]) for model in models] == [False, True, False]
