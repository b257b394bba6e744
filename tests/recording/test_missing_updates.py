"""Which updates count as missing: by the order of backward passes, reads, updates and forwards."""

import pytest
import torch

from memfit.recording import missing_updates
from memfit.recording.missing_updates import UpdateWatcher
from memfit.recording.use_of_read import Branch, ReadUse
from memfit.records import FINITE_CHECK, StandIn


def optimizer():
    """Return an optimizer of a parameter that has a gradient."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter])


def missing(events, *, stopped=False, shortened=False, optimizers=1):
    """Return what is missing, and the lines named, after events.

    ``b`` is a backward pass, ``e`` one in eval mode, ``f`` a forward, ``g`` one in eval mode, ``1`` an update
    of the first optimizer, ``2`` of the second, ``0`` one that is asked for and not made, ``w`` a write to a
    parameter, ``r`` a read that is reported, and a capital letter a read of that line with another use.
    """
    existing = [optimizer() for _ in range(optimizers)]
    watcher = UpdateWatcher()
    for each in existing:
        watcher.note_optimizer(each)
    for event in events.replace(" ", ""):
        if event in "be":
            watcher.enter_backward(trains=event == "b")
        elif event in "fg":
            watcher.enter_forward(trains=event == "f")
        elif event == "0":
            watcher.note_attempt()
        elif event.isdigit():
            watcher.note_update(existing[int(event) - 1])
        elif event == "w":
            with torch.no_grad():
                existing[0].param_groups[0]["params"][0].sub_(1)
        elif event != "r":
            watcher.note_read(StandIn(event, "an integer", "1", f"{event}:1=0"), ReadUse.UNKNOWN)
        else:
            watcher.note_read(StandIn("r", "a float", "1", "r:1=0"), ReadUse.REPORTED)
    text, reads = watcher.missing(stopped=stopped, shortened=shortened)
    return text, "".join(read.where for read in reads)


@pytest.mark.parametrize(
    "events",
    [
        "f f",  # inference
        "fb1 fb1",
        "fb1L fb1L fb1L",
        "fbL fbL fbL1 fbL fbL fbL1",  # accumulation, with the loss read for each batch
        "fbL fbL fb1L fbL fbL fb1L",
        "fbL fbL fb1L fbL fbLE",  # and a last batch that completes no update, with a read at the end
        "fbD fb1 fb1",  # a read in the first batch alone
        "fb1 fb1 feA feA feA",  # attacks on the trained model
        "fb1 fb fb fb",  # backward passes whose reason no read tells
        "fbAfbA fb1 fbAfbA fb1",  # attacks in training
        "1 1",  # a captured step that is replayed
        "fb",  # gradients alone: no read led away from an update, and none was asked for
        "fbr fbr",
        "fbAw fbAw",  # updates by hand
        "gA gA",  # an evaluation
        "fr fr",
    ],
)
def test_updates_are_complete(events):
    assert missing(events) == ("", "")


@pytest.mark.parametrize(
    ("events", "text", "lines"),
    [
        ("fbA fbA", "The script ran 2 backward passes, and its optimizers never stepped", "A"),
        ("A A", "The script made an optimizer and ran no backward pass for its updates", "A"),
        ("fAB f", "The script made an optimizer and ran no backward pass for its updates", "BA"),
        ("fb0", "The script ran 1 backward pass, and its optimizers never stepped, or without gradients", ""),
        ("w fbA", "The script ran 1 backward pass, and its optimizers never stepped", "A"),
        ("fLbA fLbA", "The script ran 2 backward passes, and its optimizers never stepped", "A"),
        ("fb1 fbA fbA fbA", "3 of 4 updates were skipped", "A"),
        ("fb1L fbLA fbLA", "2 of 3 updates were skipped", "A"),
        ("fbL fbL1 fbL fbLA fbL fbLA", "2 of 3 updates were skipped", "A"),
        ("fb1 fbAB fbAB", "2 of 3 updates were skipped", "BA"),
    ],
)
def test_updates_are_missing(events, text, lines):
    assert missing(events) == (text, lines)


def test_a_script_that_memfit_stopped_may_have_made_the_updates_later():
    assert missing("fb1 fbA fbA", stopped=True) == ("", "")
    assert missing("fb fb", stopped=True)[0].endswith("never stepped")  # it had no time for one
    assert missing("fb fb", shortened=True)[0].endswith("never stepped")
    assert missing("A A", stopped=True) == ("", "")


def test_an_optimizer_with_gradients_of_its_own_must_step_too():
    text = "1 of 2 optimizers never stepped, although there are gradients for it"
    assert missing("fbA fb1 fbA fb1", optimizers=2) == (text, "A")
    assert missing("fbA fb1 fbA fb1", optimizers=2, stopped=True) == (text, "A")
    assert missing("fb fb1 fb fb1", optimizers=2) == (text, "")
    assert missing("fb fb1 fb fb1", optimizers=2, stopped=True) == ("", "")
    assert missing("fbA fb1 fbA fb2", optimizers=2) == ("", "")


def test_a_spare_optimizer_of_the_same_parameters_or_without_gradients_may_stay_unused():
    watcher, used = UpdateWatcher(), optimizer()
    spare = torch.optim.Adam(used.param_groups[0]["params"])
    idle = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    for each in (used, spare, idle):
        watcher.note_optimizer(each)
    watcher.enter_backward(trains=True)
    watcher.note_update(used)
    assert watcher.missing(stopped=False) == ("", ())


def test_a_step_without_gradients_is_no_update():
    watcher, idle = UpdateWatcher(), torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    for _ in range(3):
        watcher.enter_backward(trains=True)
        watcher.note_attempt()
        watcher.note_update(idle)
    text, _ = watcher.missing(stopped=True)
    assert text == "The script ran 3 backward passes, and its optimizers never stepped, or without gradients"


def test_reads_that_steer_loops_are_reported_newest_first_but_for_checks():
    watcher = UpdateWatcher()
    for line, what in (("A", "a float"), ("B", "a boolean"), ("A", "a float"), ("C", "a check")):
        watcher.note_read(StandIn(line, what, "1", f"{line}:1=0"), ReadUse.STEERS)
    watcher.note_read(StandIn("D", "a float", "1", "D:1=0"), ReadUse.UNKNOWN)
    assert [read.where for read in watcher.steering(stopped=False)] == ["A", "B"]
    assert watcher.steering(stopped=True) == ()


def test_reads_that_leave_out_a_branch_are_reported_until_it_runs(monkeypatch):
    watcher, first, second = UpdateWatcher(), *(Branch("t.py", (n, 0), (n, 9)) for n in (1, 2))
    reads = [
        StandIn(line, what, "1", f"{line}:1=0") for line, what in (("A", "a check"), ("B", FINITE_CHECK))
    ]
    reads += [StandIn("C", "a float", "1", "C:1=0")]
    for read in reads:
        watcher.note_read(read, ReadUse.UNKNOWN, (first,))
    watcher.note_read(reads[0], ReadUse.STEERS, (second,))
    for stopped in (True, False):
        assert {read.where for read in watcher.steering(stopped=stopped)} == {"A", "C"}
    monkeypatch.setattr(missing_updates, "running_branches", lambda among: [*among][:1] * 2)
    watcher.note_branches()
    watcher.note_read(reads[2], ReadUse.UNKNOWN, (first,))
    assert [read.where for read in watcher.steering(stopped=True)] == ["A"]
    watcher.enter_backward(trains=True)
    assert watcher.steering(stopped=True) == ()
