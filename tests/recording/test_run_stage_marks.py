"""Marks of forwards that may be part of an evaluation."""

from types import SimpleNamespace

import torch
from torch import nn

from memfit.recording.event_labels import LabelBook
from memfit.recording.run_stage_marks import RunStageMarker
from memfit.records import MarkKind, UntrainedForwardReason


def test_a_module_is_trained_from_the_moment_an_optimizer_has_its_parameters():
    book, steps = LabelBook(), SimpleNamespace(optimizers=())
    stages = RunStageMarker(book, steps, wanted=True, labelled=True)
    body, head = nn.Linear(2, 2).eval(), nn.Linear(2, 2).eval()

    def marked():
        before = len(book.marks)
        with torch.no_grad():
            assert stages.enter_root(body)
            assert stages.enter_root(head)
        return [(kind, index) for _, kind, index in book.marks[before:]]

    teacher, student = (
        (MarkKind.EVALUATION, UntrainedForwardReason.NO_GRADIENTS),
        (MarkKind.EVALUATION, UntrainedForwardReason.EVALUATES),
    )
    assert marked() == marked() == [teacher, teacher]
    steps.optimizers = (torch.optim.SGD([nn.Parameter(torch.ones(2))]),)
    assert marked() == [teacher, teacher]
    optimizer = torch.optim.SGD(body.parameters())
    steps.optimizers = (optimizer,)
    assert marked() == marked() == [student, teacher]
    optimizer.add_param_group({"params": list(head.parameters())})
    assert marked() == [student, student]
    assert not stages.enter_root(body.train())
