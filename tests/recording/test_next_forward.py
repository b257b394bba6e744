"""Forwards are noticed without a hook on every module."""

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_forward_pre_hooks

from memfit.patching.installed_hooks import InstalledHooks
from memfit.recording.event_labels import LabelBook
from memfit.recording.run_stage_marks import NextForwardWatcher
from memfit.records import MarkKind


class Noticed:
    """What a ``NextForwardWatcher`` notices."""

    def __init__(self):
        self.hooks, self.book, self.roots, self.calls = InstalledHooks(), LabelBook(), [], 0
        self.in_backward = self.evaluates = False
        NextForwardWatcher(self._is_backward, self._on_root).install(self.hooks, self.book)

    def _is_backward(self):
        self.calls += 1
        return self.in_backward

    def _on_root(self, module):
        self.roots.append(module)
        self.book.mark(MarkKind.FORWARD, 0)
        return self.evaluates


@pytest.fixture
def noticed():
    noticed = Noticed()
    yield noticed
    noticed.hooks.remove()


def test_the_first_forward_after_a_mark_is_noticed(noticed):
    model, loss, x = nn.Sequential(nn.Flatten(), nn.Linear(2, 2)), nn.MSELoss(), torch.ones(2, 2)
    before = list(_global_forward_pre_hooks)
    model[0](x)  # without parameters
    for _ in range(3):
        loss(model(x), model(x))
    assert noticed.roots == [model]
    assert noticed.calls == 2  # not the modules inside it
    assert len(_global_forward_pre_hooks) == len(before) - 1
    noticed.book.mark(MarkKind.BATCH, 0)
    loss(x, model(x))
    assert noticed.roots == [model] * 2
    noticed.book.mark(MarkKind.BATCH, 0)
    noticed.in_backward = True  # a checkpoint is recomputed
    model(x)
    assert noticed.roots == [model] * 2
    noticed.in_backward = False
    model[1](x)
    assert noticed.roots == [model] * 2 + [model[1]]


def test_each_forward_that_trains_nothing_is_noticed(noticed):
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    noticed.evaluates = True
    model(x)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.ones(1, 3))
    model(x)
    assert noticed.roots == [model] * 3
    assert not model._forward_hooks
    noticed.evaluates = False
    for _ in range(3):
        model(x)
    assert noticed.roots == [model] * 4


def test_the_hook_is_suspended_with_the_others_and_removed(noticed):
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    model(x)
    with noticed.hooks.suspended():
        noticed.book.mark(MarkKind.BATCH, 0)
        model(x)
        assert noticed.roots == [model]
    model(x)
    with noticed.hooks.suspended():
        pass
    model(x)  # put back, but not awaited
    assert noticed.roots == [model] * 2
    noticed.book.mark(MarkKind.BATCH, 0)
    noticed.hooks.remove()
    noticed.book.mark(MarkKind.BATCH, 0)
    model(x)
    assert noticed.roots == [model] * 2


LOOPS = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint
    from torch.utils.data import DataLoader, TensorDataset
    body, head, loss = nn.Sequential(nn.Linear(64, 256), nn.ReLU()), nn.Linear(256, 64), nn.MSELoss()
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = body, head
        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=False))
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.ones(1024, 64)), 256)
    def train(x):
        loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    for epoch in range(2):
        for x, in loader:
            train(x.cuda())
        model.eval()
        for x, in loader:  # the same loader
            with torch.no_grad():
                for _ in range(3):
                    x = model(x.cuda())
        model.train()
        torch.save(model.state_dict(), "model.pt")
    x = torch.ones(512, 64).cuda()
    for _ in range(2):  # without a loader
        train(x)
        model.eval()
        kept = [model(x) for _ in range(3)]
        model.train()
        del kept
    train(x)
"""


@pytest.mark.slow
@pytest.mark.warm
def test_stages_are_the_same_without_labels(dry_run):
    answers = [
        [
            (stage["name"], stage["times"], stage["allocated"], stage["reserved"], stage["leaves"])
            for stage in dry_run(LOOPS, options=("--whole", *labels)).answer["stages"]
        ]
        for labels in ((), ("--no-labels",))
    ]
    assert answers[0] == answers[1]
    assert [name for name, *_ in answers[0]] == ["setup", "training", "evaluation", "saving"]
    assert [times for _, times, *_ in answers[0]] == [1, 5, 4, 2]
