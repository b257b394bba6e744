"""A question that a script asks of a store again and again is refused, unless it may end."""

import re
import threading

import pytest

from memfit.ghost.ranks import answering_store
from memfit.ghost.ranks.answering_store import EndlessWaitDetector


@pytest.fixture
def clock(monkeypatch):
    """Return the seconds that have passed, as a list of one number that a test sets."""
    seconds = [0.0]
    monkeypatch.setattr(answering_store.time, "monotonic", lambda: seconds[0])
    return seconds


def asked(clock, seconds, work=lambda: 0, times=1):
    """Ask for a key every second and return what was refused."""
    refused = []
    waits = EndlessWaitDetector(refused.append, work)
    for clock[0] in range(seconds):
        for key in [f"0//done/{rank}" for rank in range(times)]:
            waits.ask((key,))
    return refused


@pytest.mark.parametrize("keys", [1, 3])
def test_a_question_asked_for_more_than_five_seconds_is_refused(clock, keys):
    assert asked(clock, 6, times=keys) == []
    refused = asked(clock, 7, times=keys)
    assert len(refused) == keys
    assert re.search(r"_waits.py:\d+ waits in a loop for another rank to change 'done/0' in a", refused[0])


def test_a_training_loop_may_ask_at_every_step(clock):
    assert asked(clock, 100, work=lambda: clock[0] // 4) == []


def test_a_line_that_asks_seldom_is_not_refused(clock):
    refused = []
    waits = EndlessWaitDetector(refused.append, lambda: 0)
    for clock[0] in (0, 100, 200):
        waits.ask(("done",))
    assert refused == []


def test_another_thread_may_watch_a_key(clock):
    refused = []
    thread = threading.Thread(target=lambda: refused.extend(asked(clock, 100)))
    thread.start()
    thread.join()
    assert refused == []
