"""Plans kept in a file: the next run places its first step."""

import contextlib
import json

import pytest
import torch

import memfit
from memfit.errors import FileFormatError, OutputError
from support.arena_training import Training, same

pytestmark = pytest.mark.usefixtures("empty_cpu_arena")


def test_plans_from_a_file_place_the_first_step(tmp_path):
    path = tmp_path / "plans.json"
    seen = []
    for _ in range(2):
        with contextlib.closing(memfit.arena(device="cpu", plans=path)) as arena:
            seen.append(Training(arena).run(6).seen)
            first, later = arena.report().steps
    assert (first.name, later.name) == (f"first {later.name}", "training step with float32[8, 1, 8, 8]")
    assert (first.recorded, first.placed, first.unplanned) == (0, 1, 0)
    assert (later.recorded, later.placed, later.unplanned) == (0, 5, 0)
    assert first.kept > later.kept == 0  # Adam's state
    assert same(*seen)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"format":"memfit plans"', '"format":"other"'),
        ('"version":1', '"version":2'),
        ('"offset":[0', '"offset":[4'),
        ('"offset":[0', '"offset":[-2'),
        ('"offset":[0', '"offset":[70368744177664'),
        ('"offset":[0', '"offset":[0,0'),
        ('"height":4096', '"height":64'),
        ('"bound":', '"bounds":'),
        ('"height":4096', '"height":-1'),
        ('{"format"', "["),
    ],
)
def test_an_invalid_plan_file_is_refused(tmp_path, old, new):
    path = tmp_path / "plans.json"
    with contextlib.closing(memfit.arena(device="cpu", plans=path)) as arena:
        for _ in range(3):
            with arena.train():
                torch.ones(1000).sum()
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(FileFormatError, match=r"plans\.json"):
        memfit.arena(device="cpu", plans=path)


def test_plans_of_other_runs_stay_in_the_file_unused(tmp_path):
    path = tmp_path / "plans.json"

    def run(name, size):
        with memfit.arena(device="cpu", plans=path) as arena:
            for _ in range(4):
                with arena.train(name):
                    torch.ones(size)
            return arena.report().steps

    run("theirs", 1000)
    path.write_text(path.read_text().replace('"height":4032', '"height":70000000000000'))
    assert all("mine" in step.name for step in run("mine", 2000))
    kept = json.loads(path.read_text())["plans"]
    assert [plan["shapes"] for plan in kept] == [["theirs"], ["theirs"], ["mine"], ["mine"]]
    assert {plan["height"] for plan in kept[:2]} == {70000000000000}
    with pytest.warns(UserWarning, match="not enough memory for the arena"):
        run("theirs", 1000)


def test_a_dropped_plan_is_removed_from_the_file(tmp_path):
    path = tmp_path / "plans.json"
    with memfit.arena(device="cpu", plans=path) as arena:
        for _ in range(3):
            with arena.train():
                torch.ones(1000)
        torch.ones(3)
        with arena.train():
            torch.ones(1000)
        assert [plan["is_first"] for plan in json.loads(path.read_text())["plans"]] == [True, False]
        with pytest.warns(UserWarning, match="did not match its plan"), arena.train():
            torch.ones(2000)
        assert [plan["is_first"] for plan in json.loads(path.read_text())["plans"]] == [True]


def test_an_unwritable_plan_file_is_an_error_at_once(tmp_path):
    with pytest.raises(OutputError, match="absent"):
        memfit.arena(device="cpu", plans=tmp_path / "absent" / "plans.json")
