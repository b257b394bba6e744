"""``Engine.fit``: the order of callbacks, the progress bar, when it stops, and saves that resume."""

import importlib
import io
import random
import re
import sys
from contextlib import nullcontext

import pytest
import torch
from rich.console import Console
from torch import nn

import memfit
from memfit.errors import UsageError
from memfit.train import progress_bar
from support.lowest_loss import LowestLoss

MOMENTS = [
    name
    for name in vars(memfit.Callback)
    if name.startswith("on_")  # in the order of callbacks.py
]


class Diary(memfit.Callback):
    def __init__(self):
        self.lines = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda engine, *what: self.lines.append(name.removeprefix("on_"))
        return super().__getattribute__(name)


def engine(*plan, callbacks=(), loss=lambda model, data: model(data).square().mean(), lr=0.1):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return memfit.Engine(model, plan, optimizer=optimizer, loss=loss, callbacks=callbacks)


def loader(batches=3, size=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, generator=generator) for _ in range(batches)]


def test_events_are_called_in_order():
    diary = Diary()
    engine(memfit.Accumulation(parts_per_batch=2), callbacks=[diary]).fit(loader(1), epochs=2)
    window = ["window_begin", "micro_step_end", "micro_step_end"]
    window += ["optimizer_step_begin", "optimizer_step_end", "window_end"]
    epoch = ["epoch_begin", *window, "epoch_end"]
    assert diary.lines == ["fit_begin", *epoch, *epoch, "fit_end"]


def test_callbacks_are_called_at_every_event():
    diary = Diary()
    short = [True]

    def loss(model, data):
        if short.pop() if short else False:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return model(data).square().mean()

    engine(callbacks=[diary], loss=loss).fit(loader(1), validate=loader(1))
    assert set(diary.lines) == {moment.removeprefix("on_") for moment in MOMENTS}


def test_callbacks_are_called_as_listed_and_saving_last(tmp_path):
    calls = []

    class Records(memfit.Callback):
        def __init__(self, name):
            self.name = name

        def on_window_end(self, engine, result):
            calls.append((self.name, (tmp_path / "run").exists()))

    run = engine(callbacks=[memfit.Saving(tmp_path / "run"), Records("first"), Records("second")])
    run.fit(loader(1))
    assert calls == [("first", False), ("second", False)]
    assert (tmp_path / "run").exists()


def test_on_fit_end_is_called_when_training_fails():
    diary = Diary()

    def loss(model, data):
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        engine(callbacks=[diary], loss=loss).fit(loader(1))
    assert diary.lines[-1] == "fit_end"


def test_stop_ends_after_the_batch():
    class Stops(memfit.Callback):
        def on_window_end(self, engine, result):
            if engine.optimizer_step == 2:
                engine.stop()

    run = engine(callbacks=[Stops()])
    assert run.fit(loader(5), epochs=3).optimizer_step == 2
    assert (run.batch, run.epoch) == (2, 0)


@pytest.mark.parametrize("stopped", range(1, 9))
def test_a_run_that_is_saved_and_stopped_resumes_bit_for_bit(stopped, tmp_path):
    class Stops(memfit.Callback):
        def on_window_end(self, engine, result):
            if engine.optimizer_step == stopped:
                engine.stop()

    def noisy(model, data):
        return (model(data) + torch.randn(len(data), 2)).square().mean()

    def callbacks():
        return [LowestLoss(), memfit.Saving(tmp_path / "run")]

    def train(*extra):
        torch.manual_seed(7)
        run = engine(memfit.Accumulation(parts_per_batch=2), callbacks=[*callbacks(), *extra], loss=noisy)
        run.fit(torch.utils.data.DataLoader(torch.cat(loader()), batch_size=4, shuffle=True), epochs=3)
        return run

    whole = train()
    train(Stops())
    resumed = engine(memfit.Accumulation(parts_per_batch=2), callbacks=callbacks(), loss=noisy)
    resumed.load(tmp_path / "run")
    assert resumed.optimizer_step == stopped
    resumed.fit(torch.utils.data.DataLoader(torch.cat(loader()), batch_size=4, shuffle=True), epochs=3)
    assert (resumed.epoch, resumed.optimizer_step) == (3, 9)
    assert torch.equal(resumed.model.weight, whole.model.weight)
    assert resumed.callbacks[0].lowest == whole.callbacks[0].lowest


def test_row_30_the_bar_names_what_it_counts():
    text = io.StringIO()
    bar = memfit.ProgressBar(Console(file=text, force_terminal=True, width=80, color_system=None))
    engine(memfit.Accumulation(parts_per_batch=2), callbacks=[bar]).fit(loader(), epochs=2)
    shown = text.getvalue()
    assert re.search(r"epoch 1/2 ━+ 3/3 batches, 1 per update  [0-9.]+/s  0:00:00 left  loss [0-9.]+", shown)
    assert re.search(r"epoch 2/2 ━+ 3/3 batches, 1 per update", shown)


def test_a_run_saved_between_epochs_resumes_with_another_batch_size(tmp_path):
    class Seen(memfit.Callback):
        def on_epoch_begin(self, engine):
            batches.append(engine.batch)

    batches, data = [], torch.cat(loader())
    run = engine()
    run.fit(torch.utils.data.DataLoader(data, batch_size=4), epochs=2)
    run.save(tmp_path / "run")
    resumed = engine(callbacks=[Seen()])
    resumed.load(tmp_path / "run")
    resumed.fit(torch.utils.data.DataLoader(data, batch_size=6), epochs=3)
    assert (resumed.epoch, resumed.optimizer_step) == (3, 3 + 3 + 2)
    assert batches == [0]


def test_rereading_an_epoch_shows_a_bar():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    assert list(progress_bar.show_rereading_progress(range(5), 5, console)) == list(range(5))
    assert "re-reading the epoch" in text.getvalue()
    assert "100%" in text.getvalue()


def test_a_window_left_open_at_the_end_of_a_block_is_an_error():
    run = engine(memfit.Accumulation(batches_per_update=4))
    with pytest.raises(UsageError, match="called for 1 of its 4 micro-batches"), run:
        run.backward(run.model(loader(1)[0]).square().mean())
    with pytest.raises(ZeroDivisionError), run:
        1 / 0  # noqa: B018 - the first error is the one raised
    run.flush()
    with run:
        pass


def test_an_error_names_the_missing_part():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(UsageError, match="also needs optimizer="):
        memfit.Engine(model)
    with pytest.raises(UsageError, match="need a loss"):
        memfit.Engine(model, optimizer=optimizer).step(loader(1)[0])
    with pytest.raises(UsageError, match=r"in the memfit\.Job, not in the call"):
        memfit.Engine(memfit.Job(model, optimizer), max_grad_norm=1.0)


def test_a_job_may_have_factories_of_its_optimizer_and_scheduler():
    model = nn.Linear(3, 2)
    job = memfit.Job(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        lambda model, data: model(data).square().mean(),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        "update",
    )
    run = memfit.Engine(job)
    run.fit(loader(2))
    assert run.optimizer.param_groups[0]["lr"] == 0.25


def test_a_compiled_model_trains_like_the_original():
    plain, ours = (
        engine(memfit.Accumulation(parts_per_batch=2)),
        engine(memfit.Accumulation(parts_per_batch=2)),
    )
    compiled = memfit.Engine(
        torch.compile(ours.model, backend="aot_eager"),
        memfit.Accumulation(parts_per_batch=2),
        optimizer=torch.optim.AdamW(ours.model.parameters(), lr=0.1),
        loss=lambda model, data: model(data).square().mean(),
    )
    for data in loader():
        plain.step(data)
        compiled.step(data)
    assert torch.equal(plain.model.weight, ours.model.weight)
    plain.load_state_dict(compiled.state_dict())  # parameters have the names of the original model
    assert plain.optimizer_step == 3


def state_of(path):
    run = engine()
    run.load(path)
    return run.optimizer_step


class Leaves(memfit.Callback):
    """A callback that ends training in a given way after an update."""

    def __init__(self, after, leave):
        self.after, self.leave = after, leave

    def on_window_end(self, engine, result):
        if engine.optimizer_step == self.after:
            self.leave(engine)


def ctrl_c(engine):
    raise KeyboardInterrupt


@pytest.mark.parametrize("leave", [memfit.Engine.stop, ctrl_c], ids=["stop", "ctrl-c"])
def test_fit_saves_the_remaining_windows_when_it_ends(leave, tmp_path):
    saving = memfit.Saving(tmp_path / "run", every=100)
    run = engine(callbacks=[saving, Leaves(2, leave)])
    with nullcontext() if leave is memfit.Engine.stop else pytest.raises(KeyboardInterrupt):
        run.fit(loader(5), epochs=2)
    assert state_of(tmp_path / "run") == 2


def test_a_save_leaves_out_the_window_that_ctrl_c_interrupted(tmp_path):
    def loss(model, data):
        if run.optimizer_step == 2:
            raise KeyboardInterrupt
        return model(data).square().mean()

    run = engine(callbacks=[memfit.Saving(tmp_path / "run", every=100)], loss=loss)
    with pytest.raises(KeyboardInterrupt):
        run.fit(loader(5))
    assert state_of(tmp_path / "run") == 2
    assert torch.equal(run.model.weight, trained(2).weight)


def trained(steps):
    run = engine()
    run.fit(loader(5)[:steps])
    return run.model


def test_a_run_without_new_windows_is_not_saved_again(tmp_path, monkeypatch):
    saves = []
    monkeypatch.setattr(memfit.Engine, "save", lambda engine, path: saves.append(engine.optimizer_step))
    engine(callbacks=[memfit.Saving(tmp_path / "run"), Leaves(2, memfit.Engine.stop)]).fit(loader(5))
    assert saves == [1, 2]


def test_a_torn_run_is_not_saved_when_fit_ends(tmp_path):
    def torn(engine):
        engine._ledger.update._stepping = True
        engine.stop()

    engine(callbacks=[memfit.Saving(tmp_path / "run", every=100), Leaves(2, torn)]).fit(loader(5))
    assert not (tmp_path / "run").exists()


def test_a_model_that_trains_in_evaluation_mode_is_a_warning():
    """``from_pretrained`` returns it so, and an evaluation of the user's own may leave it so."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval()
    run = memfit.Engine(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, x: model(x).square().mean(),
    )
    with pytest.warns(UserWarning, match=r"The whole Sequential is in evaluation mode.*Call model\.train"):
        run.fit([torch.ones(2, 3)])
    assert not model.training

    class Evaluating(memfit.Callback):
        def on_epoch_end(self, engine):
            engine.model.eval()

    model.train()
    run.callbacks = [Evaluating()]
    with pytest.warns(UserWarning, match="is in evaluation mode, and stays in it"):
        run.fit([torch.ones(2, 3)], 3)


def test_a_model_of_which_a_part_is_in_evaluation_mode_trains_without_a_warning():
    """Frozen statistics, and the mode after a validation."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    run = memfit.Engine(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda model, x: model(x).square().mean(),
    )
    run.fit([torch.ones(2, 3)], 2, validate=[torch.ones(2, 3)])
    assert [each.training for each in model] == [True, False]


def test_a_generator_is_refused_in_the_second_epoch():
    run = engine()
    run.fit(iter(loader(3)), epochs=1)
    assert run.optimizer_step == 3
    run = engine()
    with pytest.raises(UsageError, match=r"no batches in epoch 2\. A generator, for example,"):
        run.fit(iter(loader(3)), epochs=3)
    assert (run.optimizer_step, run.epoch) == (3, 1)


def test_importing_the_progress_bar_leaves_pythons_generator_unchanged(monkeypatch):
    """rich draws random numbers at import time, and the first engine imports it, after a script's seeding."""
    for name in [module for module in sys.modules if module.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "memfit.train.progress_bar")
    monkeypatch.setattr(memfit.train, "progress_bar", progress_bar)
    random.seed(3)
    before = random.getstate()
    reimported = importlib.import_module("memfit.train.progress_bar")
    assert reimported is not progress_bar
    assert random.getstate() == before
