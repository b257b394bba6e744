"""Waiting for autograd's threads, with the kernel's status of each thread replaced."""

import ctypes
import threading

import pytest

from memfit.ghost import load_ghost

RUNNING, SLEEPING = "State:\tR (running)", "State:\tS (sleeping)\nswitches: 1"
SLEEPING_AGAIN = "State:\tS (sleeping)\nswitches: 2"


@pytest.fixture
def polls(monkeypatch):
    """Return a function that sets the status of each poll, and a list that counts the sleeps in between."""
    sleeps = []
    monkeypatch.setattr(load_ghost.time, "sleep", sleeps.append)

    def set_statuses(*statuses):
        remaining = iter(statuses)
        monkeypatch.setattr(load_ghost, "_autograd_threads", lambda: next(remaining))

    return set_statuses, sleeps


def test_it_returns_once_every_thread_slept_for_two_polls_in_a_row(polls):
    set_statuses, sleeps = polls
    set_statuses([RUNNING], [RUNNING], [SLEEPING, RUNNING], [SLEEPING], [SLEEPING_AGAIN], [SLEEPING_AGAIN])
    load_ghost.wait_until_autograd_threads_sleep()
    assert len(sleeps) == 5


def test_it_returns_without_a_sleep_if_there_are_no_such_threads(polls):
    set_statuses, sleeps = polls
    set_statuses([])
    load_ghost.wait_until_autograd_threads_sleep()
    assert not sleeps


def test_it_gives_up_on_a_thread_that_never_sleeps(polls, monkeypatch):
    _, sleeps = polls
    clock = iter(range(10))
    monkeypatch.setattr(load_ghost.time, "monotonic", lambda: next(clock) / 4)
    monkeypatch.setattr(load_ghost, "_autograd_threads", lambda: [RUNNING])
    load_ghost.wait_until_autograd_threads_sleep()
    assert len(sleeps) == 3  # a second, in steps of a quarter


def test_threads_are_found_by_name_and_read_as_sleeping_while_they_wait():
    ready, leave = threading.Event(), threading.Event()

    def work():
        ctypes.CDLL(None).pthread_setname_np(
            ctypes.c_ulong(threading.get_ident()), ctypes.c_char_p(b"pt_autograd_9")
        )
        ready.set()
        leave.wait()

    assert load_ghost._autograd_threads() == []
    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    load_ghost.wait_until_autograd_threads_sleep()
    (status,) = load_ghost._autograd_threads()
    leave.set()
    thread.join()
    assert "S (sleeping)" in status
