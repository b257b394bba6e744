"""Batch slices equal the whole batch: the loss, and the gradients of parameters and inputs."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from memfit import BatchSlices
from support.slice_cases import (
    CLASSES,
    LIMITS,
    WIDTH,
    Case,
    Of,
    Pair,
    Registered,
    attend,
    attention,
    by_token,
    cached,
    counted,
    entropy,
    expect_equal,
    frozen,
    images,
    labels,
    masked_mean,
    mean_of_counted,
    recurrent,
    same,
    tied,
    trained,
    with_few_labels,
    with_labels,
    with_no_labels,
    with_no_labels_first,
)

CASES = {
    "tensor": Case(Of.logits),
    "tuple": Case(lambda s, x: (s.logits(x), x), loss=lambda out: (out[0] * out[1][..., :CLASSES]).mean()),
    "unused output": Case(lambda s, x: (s.logits(x), s.up(x)), loss=lambda out: out[0].square().mean()),
    "dict, other types": Case(
        lambda s, x: {"a": s.logits(x), "b": None, "c": [3, "text"]}, loss=lambda out: out["a"].exp().mean()
    ),
    "named tuple": Case(
        lambda s, x: Pair(s.logits(x), s.up(x)), loss=lambda out: out.logits.mean() + out.features.var()
    ),
    "registered dataclass": Case(
        lambda s, x: Registered(s.logits(x), "n"), loss=lambda out: out.logits.square().sum()
    ),
    "transposed": Case(
        lambda s, x: s.logits(x).permute(2, 1, 0), loss=lambda out: (out * out.roll(1, 2)).mean()
    ),
    "folded": Case(lambda s, x: s.logits(x).flatten(0, 1), loss=lambda out: (out * out.roll(1, 0)).mean()),
    "a loss over all samples": Case(
        Of.logits, loss=lambda out: torch.logsumexp(out.flatten(1) @ out.flatten(1).T, 1).mean()
    ),
    "two views of each sample": Case(
        lambda s, x: s.logits(torch.cat([x, x.flip(-1)]) + torch.rand(1) * 0),
        loss=lambda out: (out * out.roll(1, 0)).mean(),
    ),
    "one number for each sample": Case(lambda s, x: s.head(s.up(x)).mean((1, 2))[:, None].sigmoid()),
    "a mask made anew": Case(
        lambda s, x: setattr(s, "mask", torch.ones(4, 1).tril()) or s.logits(x * s.mask)
    ),
    "not a number": Case(Of.logits, prepare=lambda model: setattr(model, "best", float("nan"))),
    "an input that requires a gradient in the forward": Case(
        lambda s, x: s.logits(x.detach().clone().requires_grad_()).square().mean(), loss=same
    ),
    "infinite where it is masked": Case(
        lambda s, x: s.logits(x).masked_fill(torch.eye(4, CLASSES) > 0, -torch.inf),
        loss=lambda out: out.exp().mean(),
    ),
    "transformers' cache": Case(
        lambda s, x: (s.logits(x), SimpleNamespace(keys=x) if s.config.use_cache else None),
        loss=lambda out: out[0].square().mean(),
        prepare=lambda model: setattr(model, "config", SimpleNamespace(use_cache=True)),
    ),
    "transformers' cache, of a part's own configuration": Case(
        lambda s, x: (s.logits(x), SimpleNamespace(keys=x) if s.up.config.use_cache else None),
        loss=lambda out: out[0].square().mean(),
        prepare=lambda model: setattr(model.up, "config", SimpleNamespace(use_cache=True)),
    ),
    "a shape of the last call": Case(lambda s, x: setattr(s, "shape", x.shape) or s.logits(x)),
    "keywords only": Case(
        lambda s, *, b, x: s.logits(x + b),
        lambda n: (),
        kwargs=lambda n: {"x": torch.randn(n, 4, WIDTH), "b": 2},
    ),
    "several inputs": Case(
        lambda s, x, others, scale: s.logits(x * others["y"] + scale),
        lambda n: (torch.randn(n, 4, WIDTH), {"y": torch.randn(n, 1, WIDTH)}, torch.randn(WIDTH)),
    ),
    "a list of samples": Case(
        lambda s, x, texts: s.logits(x + torch.tensor([len(each) for each in texts])[:, None, None]),
        lambda n: (torch.randn(n, 4, WIDTH), ["a" * each for each in range(n)]),
    ),
    "a list of images, and one of their targets": Case(
        lambda s, x, of: (
            s.conv(torch.stack(x)) * torch.stack([each["box"].sum() for each in of])[:, None, None, None]
        ),
        lambda n: ([*images(n)[0]], [{"box": torch.randn(1 + each, 4)} for each in range(n)]),
        layers=lambda: {"conv": nn.Conv2d(3, 2, 3)},
        samples=6,
    ),
    "a mask of other size": Case(
        attend, lambda n: (torch.randn(n, 4, WIDTH), torch.randn(4, 4).tril()), layers=attention
    ),
    "a mask of the batch's size": Case(
        attend,
        lambda n: (torch.randn(n, 5, WIDTH), torch.ones(5, 5).triu(1).bool()),
        layers=attention,
        samples=6,
    ),
    "convolutions": Case(
        lambda s, x: s.conv(x.to(memory_format=torch.channels_last)),
        images,
        layers=lambda: {"conv": nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 2, 1))},
    ),
    "batch norm, frozen": Case(
        lambda s, x: s.conv(x),
        images,
        layers=lambda: {"conv": nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8).eval())},
        prepare=lambda model: model.eval(),
    ),
    "LSTM": recurrent(nn.LSTM),
    "GRU": recurrent(nn.GRU),
    "sequences first, folded, with a state": Case(
        lambda s, x, state: tuple(
            each.flatten(0, 1) if each is out[0] else each for out in [s.rnn(x, state)] for each in out
        ),
        lambda n: (torch.randn(5, n, WIDTH), torch.randn(2, n, WIDTH)),
        loss=lambda out: (out[0] * out[0].roll(1, 0)).mean() + out[1].square().mean(),
        layers=lambda: {"rnn": nn.GRU(WIDTH, WIDTH, 2)},
        dim=1,
    ),
    "a state whose samples lie along another dimension": Case(
        lambda s, x, state: s.rnn(x, state),
        lambda n: (torch.randn(n, 5, WIDTH), (torch.randn(2, n, WIDTH), torch.randn(2, n, WIDTH))),
        loss=lambda out: out[0].square().mean() + out[1][0].sum(),
        layers=lambda: {"rnn": nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)},
    ),
    "sequences first, folded by sample": Case(
        lambda s, x: s.logits(x).transpose(0, 1).flatten(0, 1),
        lambda n: (torch.randn(5, n, WIDTH),),
        loss=lambda out: (out * out.roll(1, 0)).mean(),
        dim=1,
    ),
    "a mask that the first call makes": Case(
        cached,
        layers=attention,
        loss=lambda out: out.square().mean(),
    ),
    "tied": Case(
        lambda s, x: s.logits(x) + s.other(x).mean(-1, keepdim=True),
        layers=lambda: {"other": nn.Linear(WIDTH, 9)},
        prepare=tied,
    ),
    "frozen": Case(lambda s, x: s.logits(x + s.position), prepare=frozen),
    "a gradient that two parameters share": Case(lambda s, x: s.logits(x + (s.position + s.kind))),
    "a gradient that parameter and input share, by sample": Case(
        lambda s, x: s.logits(x + s.position),
        lambda n: (torch.randn(n, 4, WIDTH).requires_grad_(),),
        samples=4,
    ),
    "an expanded gradient": Case(lambda s, x: s.logits(x) + s.position.sum()),
    "used in some slices": Case(
        lambda s, x: torch.stack([s.logits(each + s.position[0] if each[0, 0] > 0 else each) for each in x])
    ),
    "requires a gradient in some slices": Case(
        lambda s, x: torch.stack([s.logits(each) if each[0, 0] > 0 else each[:, :CLASSES] for each in x])
    ),
    "parametrized": Case(Of.logits, prepare=lambda model: nn.utils.parametrizations.weight_norm(model.up)),
    "sum of squares": Case(lambda s, x: s.logits(x).square().sum(), loss=same),
    "mean": Case(lambda s, x: s.logits(x).square().mean() * 3 / 2, loss=same),
    "mse": Case(lambda s, x: F.mse_loss(s.logits(x), x[..., :CLASSES]), loss=same),
    "smooth l1, mean of negatives": Case(
        lambda s, x: -F.smooth_l1_loss(s.logits(x), x[..., :CLASSES]), loss=same
    ),
    "cross-entropy": Case(entropy(), with_labels, same),
    "cross-entropy, sum": Case(entropy(reduction="sum"), with_labels, same),
    "cross-entropy, other index": Case(
        entropy(ignore_index=1), lambda n: (*with_labels(n)[:1], labels(n).abs() % 5), same
    ),
    "cross-entropy, label smoothing": Case(entropy(label_smoothing=0.1), with_labels, same),
    "masked mean": Case(masked_mean, with_labels, same),
    "cross-entropy, slices without targets": Case(entropy(), with_few_labels, same),
    "masked mean, slices without targets": Case(masked_mean, with_few_labels, same),
    "cross-entropy, the first slices without targets": Case(entropy(), with_no_labels_first, same),
    "cross-entropy, no targets": Case(entropy(), with_no_labels, same),
    "mean of no elements in some slices": Case(mean_of_counted, with_few_labels, same),
    "mean of no elements in the first slices": Case(mean_of_counted, with_no_labels_first, same),
    "mean of no elements": Case(mean_of_counted, with_no_labels, same),
    "divided by a number": Case(lambda s, x, y: by_token(s, x, y).sum() / 1000, with_labels, same),
    **{
        f"masked mean, {limit}, {labelled.__name__}": Case(counted(divisor), labelled, same)
        for labelled in (with_few_labels, with_no_labels_first, with_no_labels)
        for limit, divisor in {
            "at least one target": lambda n: n.clamp_(min=1),  # which writes to the count
            "at least one target, in Python": lambda n: max(int(n), 1),
            "at least two and a half": lambda n: torch.maximum(n, torch.full_like(n, 2.5)),
            "a little more than the targets": lambda n: n + 0.01,
        }.items()
        if labelled is not with_no_labels_first or "one" in limit  # others are refused: two samples show none
    },
    "divided by the samples": Case(lambda s, x, y: by_token(s, x, y).sum() / len(x), with_labels, same),
    "divided by what is passed": Case(
        lambda s, x, y, count: entropy(reduction="sum")(s, x, y) / count,
        lambda n: (*with_labels(n), torch.tensor(17)),
        same,
    ),
    "divided by a number that is passed": Case(
        lambda s, x, y, count: entropy(reduction="sum")(s, x, y) / count,
        lambda n: (*with_labels(n), 17),
        same,
    ),
    "two means over samples": Case(
        lambda s, x: s.logits(x).square().mean() + 0.1 * s.up(x).abs().mean(), loss=same
    ),
    "loss and logits": Case(
        lambda s, x, y: (entropy()(s, x, y), s.logits(x)),
        with_labels,
        lambda out: out[0] * out[1].detach().std(),
    ),
    "loss, input requires a gradient": Case(
        entropy(), lambda n: (torch.randn(n, 4, WIDTH).requires_grad_(), labels(n)), same
    ),
    "loss, tied": Case(
        lambda s, x: (s.logits(x) + s.other(x).mean(-1, keepdim=True)).square().mean(),
        loss=same,
        layers=lambda: {"other": nn.Linear(WIDTH, 9)},
        prepare=tied,
    ),
    "loss, LSTM": Case(
        lambda s, x: s.rnn(x)[0].square().mean(),
        lambda n: (torch.randn(n, 5, WIDTH),),
        same,
        lambda: {"rnn": nn.LSTM(WIDTH, WIDTH, batch_first=True)},
    ),
    "evaluation with gradients": Case(
        lambda s, x: s.logits(F.dropout(x, 0.5, s.training)), prepare=lambda model: model.eval()
    ),
}


FAST = {((3, 1), torch.float32), ((2, 2), torch.float64), ((7, 1), torch.float64)}


@pytest.mark.parametrize(
    ("slices", "dtype"),
    [
        pytest.param(*each, marks=() if each in FAST else pytest.mark.slow, id=f"{each[0]}-{each[1]}")
        for each in product([(3, 1), (2, 2), (7, 1)], LIMITS)
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_slices_equal_the_whole_batch(name, slices, dtype):
    case = CASES[name]
    settings = BatchSlices(*slices, dim=case.dim)
    expect_equal(trained(case, settings, dtype), trained(case, None, dtype), LIMITS[dtype])
