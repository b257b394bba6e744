"""The log-probabilities of a loss are found."""

import torch
from torch import nn

from memfit.planning.plan_search_base import log_softmax_bytes
from memfit.recording.step_operations import StepOperationRecorder


def recorded(loss):
    model = nn.Linear(8, 100)
    recorder = StepOperationRecorder(model)
    recorder.start()
    loss(model(torch.ones(6, 8))).backward()
    return recorder.stop()


def test_those_of_a_cross_entropy_are_found():
    targets = torch.zeros(6, dtype=torch.long)
    assert log_softmax_bytes(recorded(lambda x: nn.functional.cross_entropy(x, targets))) == 4 * 6 * 100
    assert log_softmax_bytes(recorded(lambda x: x.square().mean())) == 0
