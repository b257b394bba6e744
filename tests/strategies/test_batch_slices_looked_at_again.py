"""Whether samples meet, in other samples than the first two, for other random numbers, and in later calls."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from memfit import BatchSlices
from memfit.errors import UsageError
from support.slice_cases import WIDTH, Case, Of, trained

REFUSED = {
    "mixed with a chance of 1 in 10": (
        Case(lambda s, x: s.logits(x + x.flip(0) if torch.rand(1) < 0.1 else x)),
        "combines samples",
    ),
    "less its mean, by a number that is rarely 3": (
        Case(lambda s, x: s.logits(x) - (torch.randint(4, ()) == 3) * s.logits(x).mean(0)),
        "combines samples",
    ),
    "sorted, with the order": (
        Case(
            lambda s, x, n: (s.logits(x[n.argsort()]), n.argsort()),
            lambda n: (torch.randn(n, 4, WIDTH), torch.arange(n)),
            loss=lambda out: out[0].mean(),
        ),
        "for each alone, by 50 %",
    ),
    "as long as the longest, not the first two": (
        Case(
            lambda s, x, n: s.logits(x[:, : int(n.max())]).mean(1),
            lambda n: (torch.randn(n, 4, WIDTH), torch.tensor([2, 2] + [4, 1, 3] * n)[:n]),
            samples=12,
        ),
        "for 4 samples of the batch differs from what it returns for each half of them",
    ),
    "less its mean, if there are more than two": (
        Case(lambda s, x: s.logits(x) - (len(x) > 2) * s.logits(x).mean(0), samples=12),
        "for 4 samples",
    ),
    "a dimension that the input lacks": (
        Case(Of.logits, dim=7),
        "dim=7, and no tensor that the model is passed has such a dimension: they have up to 3",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_samples_that_meet_beside_the_first_two_are_refused_in_the_first_call(name):
    case, message = REFUSED[name]
    with pytest.raises(UsageError, match=r"^batch_slices: ") as refused:
        trained(case, BatchSlices(3, dim=case.dim), torch.float64)
    assert message in str(refused.value)


@pytest.mark.parametrize("begin", [1, 2, 3, 4, 6, 95, 101])
def test_a_model_whose_samples_meet_in_a_later_call_is_refused_when_it_is_looked_at_again(begin):
    checked = [1, 2, 3, 4, 10, 100, 200]
    model = Of(lambda s, x: s.logits(x) - (s.number >= begin) * s.logits(x).mean(0))
    BatchSlices(2).apply(model)
    x = torch.randn(4, 4, WIDTH)
    refused = min(each for each in checked if each >= begin)
    for model.number in range(1, refused):
        model(x).sum().backward()
    model.number = refused
    with pytest.raises(UsageError, match="combines samples"):
        model(x)


@pytest.mark.parametrize("lower", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_loss", [False, True])
def test_looking_again_whether_samples_meet_changes_nothing(is_loss, lower, monkeypatch):
    """With random numbers of all generators, buffers, accumulated gradients and autocast."""

    def forward(s, x):
        shift = random.random() + float(np.random.rand()) + torch.rand((), generator=s.generator)  # noqa: NPY002, S311
        out = F.dropout(s.rest(s.logits(x + shift + torch.rand(()))), 0.3)
        return out.square().mean() if is_loss else out

    def steps():
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        model = Of(forward, rest=nn.BatchNorm1d(4).eval())
        model.generator = torch.Generator()
        BatchSlices(3).apply(model)
        optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
        for step in range(12):
            with torch.autocast("cpu", lower or torch.bfloat16, enabled=lower is not None):
                out = model(torch.randn(7, 4, WIDTH))
            loss = out if is_loss else out.square().mean()
            loss.backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        drawn = random.random(), np.random.rand(), torch.rand(2).tolist()  # noqa: NPY002, S311
        own = torch.rand(2, generator=model.generator).tolist()
        return losses, drawn, own, [each.tolist() for each in model.state_dict().values()]

    ours = steps()
    monkeypatch.setattr("memfit.strategies.mechanisms.sliced_forward.is_checked_again", lambda _: False)
    assert ours == steps()
