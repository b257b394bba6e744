"""State files: written completely or not at all, and plain data only."""

import fcntl
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import memfit
from memfit import random_state
from memfit.errors import FileFormatError, UsageError
from memfit.train.resume import state_file
from memfit.train.training_job import SchedulerAndInterval
from support.lowest_loss import LowestLoss


def test_a_file_is_written_completely_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "state"
    state_file.save_state_file({"version": 1}, path)

    def torn(value, file):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="No space left"):
        state_file.save_state_file({"version": 2}, path)
    assert state_file.load_state_file(path) == {"version": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["state"]


def test_two_processes_cannot_write_the_same_file(tmp_path):
    with (tmp_path / ".state.partial").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="Another process is saving"):
            state_file.save_state_file({"version": 1}, tmp_path / "state")
    state_file.save_state_file({"version": 1}, tmp_path / "state")


@pytest.mark.slow
@pytest.mark.process
def test_a_killed_run_resumes_bit_for_bit():
    """MEMFIT_TIMES=6 kills six times as often."""
    kills = 8 * int(os.environ.get("MEMFIT_TIMES", "1"))
    script = Path(__file__).parents[1] / "support" / "killed_run.py"
    done = subprocess.run([sys.executable, script, f"{kills}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{kills} kills" in done.stdout
    assert "0 unfinished files left" in done.stdout


class Evil:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense", pickle.dumps(Evil(), 2), pickle.dumps({"version": Evil()}, 2)],
)
def test_a_file_that_is_not_plain_data_is_refused(tmp_path, content, capsys):
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(FileFormatError, match="Cannot resume from"):
        state_file.load_state_file(tmp_path / "state")
    assert capsys.readouterr().out == ""


def test_a_flipped_bit_is_detected(tmp_path):
    """PyTorch would load the file, with another parameter."""
    path = tmp_path / "state"
    state_file.save_state_file({"version": 1, "parameter": torch.full((64,), 1.5)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(torch.full((64,), 1.5).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert torch.load(path)["parameter"][0] != 1.5
    with pytest.raises(FileFormatError, match="or is damaged"):
        state_file.load_state_file(path)


def test_other_dicts_and_missing_files_are_refused(tmp_path):
    torch.save({"model": {}}, tmp_path / "state")
    with pytest.raises(FileFormatError, match="does not hold the state"):
        state_file.load_state_file(tmp_path / "state")
    with pytest.raises(FileNotFoundError):
        state_file.load_state_file(tmp_path / "nothing")


def test_random_numbers_continue_from_a_restored_state():
    import random

    import numpy as np

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002, S311

    kept = random_state.get_random_state()
    first = draw()
    random_state.set_random_state(kept)
    assert draw() == first


class WithExtra(nn.Linear):
    extra = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def engine(lr=0.1, extra=None, callbacks=()):
    torch.manual_seed(0)
    model = WithExtra(4, 1)
    model.extra = extra
    return memfit.Engine(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        loss=lambda model, data: model(data).square().mean(),
        callbacks=callbacks,
    )


def test_numpy_numbers_are_saved_and_read(tmp_path):
    def run():
        metric = LowestLoss(lambda result: np.mean([1.0, 2.0]))
        extra = {"scale": np.float32(1.5), "seen": [np.int64(3), (np.bool_(True),)]}
        return engine(np.logspace(-3, -1, 3)[1], extra, [metric])

    first, resumed = run(), engine(callbacks=[LowestLoss()])
    first.fit([torch.ones(4, 4)], epochs=2)
    first.save(tmp_path / "run")
    assert type(first.optimizer.param_groups[0]["lr"]) is np.float64, "the run itself keeps its numbers"
    resumed.load(tmp_path / "run")
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert resumed.model.extra == {"scale": 1.5, "seen": [3, (True,)]}
    assert resumed.callbacks[0].lowest == 1.5
    assert type(resumed.callbacks[0].lowest) is float


@pytest.mark.parametrize(
    ("extra", "place"),
    [
        (Path("x"), r"state\['model'\]\['_extra_state'\] is a pathlib\.\w+"),
        ({"a": [1, Evil()]}, r"\['_extra_state'\]\['a'\]\[1\] is a .*test_state_file\.Evil"),
        ({"a": np.longdouble(1)}, r"\['_extra_state'\]\['a'\] is a numpy\.longdouble"),
        ({"a": np.zeros(3)}, r"\['_extra_state'\]\['a'\] is a numpy\.ndarray"),
    ],
)
def test_a_value_that_load_would_refuse_is_refused_by_save(extra, place, tmp_path):
    engine().save(tmp_path / "run")
    before = (tmp_path / "run").read_bytes()
    with pytest.raises(UsageError, match=f"Cannot save the run: .*{place}"):
        engine(extra=extra).save(tmp_path / "run")
    assert (tmp_path / "run").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_the_state_of_pytorchs_schedulers_is_plain(tmp_path):
    def run():
        created = engine()
        epochs = list(np.arange(2, 8, 2))
        scheduler = torch.optim.lr_scheduler.MultiStepLR(created.optimizer, epochs, gamma=0.5)
        created.scheduler = created._ledger.update.scheduler = scheduler
        created._ledger.update.schedule = SchedulerAndInterval(created.scheduler, "update")
        return created

    first, resumed = run(), run()
    first.fit([torch.ones(4, 4)] * 3)
    first.save(tmp_path / "run")
    resumed.load(tmp_path / "run")
    assert resumed.scheduler.milestones == {2: 1, 4: 1, 6: 1}
    for trained in (first, resumed):
        trained.step(torch.ones(4, 4))
    assert resumed.scheduler.get_last_lr() == first.scheduler.get_last_lr() == [0.025]
