"""When a recording on a card looks at it."""

import pytest
import torch

from memfit.run import backend


class Counted:
    """Stands for the reader of the card."""

    looks = 0

    def look(self):
        self.looks += 1


@pytest.fixture
def card(monkeypatch):
    monkeypatch.setattr(backend, "Outside", Counted)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return backend.OnCard()


def test_it_looks_at_the_end_of_a_step_and_not_again_at_once(card):
    card.stepped()
    card.stepped()
    assert card._outside.looks == 1


def test_it_looks_again_after_a_while(card, monkeypatch):
    monkeypatch.setattr(backend, "BETWEEN_LOOKS", 0.0)
    card.stepped()
    card.stepped()
    assert card._outside.looks == 2


def test_it_never_looks_while_a_graph_is_captured(card, monkeypatch):
    # A call into the runtime that is not the capture's own may end the capture.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    card.stepped()
    assert card._outside.looks == 0


def test_it_does_not_initialise_cuda_for_a_script_that_trains_on_the_cpu(card, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    card.stepped()
    assert card._outside.looks == 0
