"""When a recording on a card reads the card's usage."""

import pytest
import torch

from memfit.run import backend


class CountingMeter:
    """A stand-in for ``OutsideMeter`` that counts its readings."""

    readings = 0

    def read(self):
        self.readings += 1


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(backend, "OutsideMemoryMeter", CountingMeter)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return backend.CardBackend()


def test_two_steps_in_quick_succession_are_read_once(card):
    card.stepped()
    card.stepped()
    assert card._outside.readings == 1


def test_steps_are_read_again_after_the_interval(card, monkeypatch):
    monkeypatch.setattr(backend, "READING_INTERVAL", 0.0)
    card.stepped()
    card.stepped()
    assert card._outside.readings == 2


def test_nothing_is_read_during_graph_capture(card, monkeypatch):
    # A runtime call that the capture does not expect may end it.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    card.stepped()
    assert card._outside.readings == 0


def test_nothing_is_read_before_the_script_initialises_cuda(card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    card.stepped()
    assert card._outside.readings == 0
