"""``ChunkedHead.with_loss``, and what ``memfit.ChunkedHead`` refuses."""

import pytest
import torch
from torch import nn

from memfit import ChunkedHead
from memfit.errors import UsageError
from support.plain_head import CLASSES, FEATURES, POSITIONS, case, error, gradients_of, ignored, plain


def test_a_loss_of_ones_own_over_any_suffix_of_a_network():
    torch.manual_seed(0)
    suffix = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.Linear(8, 5)
    ).double()
    x = torch.randn(6, 7, 8, dtype=torch.float64, requires_grad=True)
    y, mask = torch.randn(6, 7, 5, dtype=torch.float64), torch.rand(6, 7) > 0.3

    def squared(result, targets):
        wanted, counts = targets
        return (result - wanted).square().mean(-1)[counts].sum(), counts.sum()

    total, count = squared(suffix(x), (y, mask))
    expected = gradients_of(total / count, suffix, x)
    loss = ChunkedHead(suffix, 3).with_loss(squared, x, (y, mask))
    assert error(gradients_of(loss, suffix, x), expected) <= 1e-12
    loss = ChunkedHead(suffix, 3).with_loss(lambda result, wanted: (result - wanted).square().sum(), x, y)
    expected = gradients_of((suffix(x) - y).square().sum(), suffix, x)
    assert error(gradients_of(loss, suffix, x), expected) <= 1e-12


def test_sums_of_low_precision_are_added_in_float32():
    head = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(head.weight)
    x = torch.ones(1024, 2, dtype=torch.bfloat16, requires_grad=True)
    loss = ChunkedHead(head, 1024).with_loss(lambda result, targets: result.sum(), x, x)
    assert (loss.dtype, loss.item()) == (torch.float32, 2048)  # bfloat16's sum would stay at 512
    loss.backward()
    assert head.weight.grad.tolist() == [[1024, 1024]]


def test_slices_in_which_nothing_counts_may_have_a_constant_loss():
    head, hidden, targets = case()
    flat, wanted = hidden.flatten(0, 1), ignored(targets).flatten()

    def counted(result, own):
        if not (own >= 0).any():
            return torch.zeros(()), 0
        return nn.functional.cross_entropy(result, own, reduction="sum"), (own >= 0).sum()

    expected = gradients_of(plain(head, hidden, ignored(targets)), head, hidden)
    for chunks in (POSITIONS, 4):
        loss = ChunkedHead(head, chunks).with_loss(counted, flat, wanted)
        assert error(gradients_of(loss, head, hidden), expected) <= 1e-12


TEMPERATURE = nn.Parameter(torch.ones(1))
REFUSED = {
    "not a function of the head": (
        lambda r, t: (r * TEMPERATURE.double()).sum(),
        "shape \\(1,\\) that requires",
    ),
    "detached": (lambda r, t: r.detach().sum(), "does not depend"),
    "a vector": (lambda r, t: r.sum(0), "not a tensor of shape \\(101,\\) and dtype float64"),
    "a number": (lambda r, t: 1.0, "not a float"),
    "a differentiable divisor": (lambda r, t: (r.sum(), r.exp().sum()), "divisor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_losses_without_a_right_gradient_are_refused(name):
    head, hidden, targets = case()
    loss, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        ChunkedHead(head, 2).with_loss(loss, hidden.flatten(0, 1), targets.flatten())


def test_heads_that_differ_from_slice_to_slice_are_refused():
    _, hidden, targets = case()
    norm = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)).double()
    with pytest.raises(UsageError, match=r"batch normalization \(0\)"):
        ChunkedHead(norm)(hidden, targets)
    own = nn.Sequential(nn.BatchNorm1d(FEATURES, track_running_stats=False), nn.Linear(FEATURES, CLASSES))
    with pytest.raises(UsageError, match=r"batch normalization \(0\)"):
        ChunkedHead(own.double().eval())(hidden, targets)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, CLASSES)).double()
    with pytest.raises(UsageError, match=r"changes its buffer 'parametrizations\.weight\.0\._u'"):
        ChunkedHead(spectral)(hidden, targets)
    plain(spectral.eval(), hidden, targets)
    assert torch.allclose(ChunkedHead(spectral, 4)(hidden, targets), plain(spectral, hidden, targets))


def test_bad_arguments_are_refused():
    head, hidden, targets = case()
    for make, message in (
        (lambda: ChunkedHead(head.forward), "needs a module as its head, not a method"),
        (lambda: ChunkedHead(head, 0), "'chunks' must be an integer of at least 1, not 0"),
        (lambda: ChunkedHead(head, True), "not True"),
        (lambda: ChunkedHead(head, 2, "int8"), "gradient_dtype='int8' is not"),
        (lambda: ChunkedHead(head)(hidden, targets, reduction="none"), "reduction must be 'mean' or 'sum'"),
        (lambda: ChunkedHead(head)(hidden[:, 1:], targets), r"targets of shape \(3, 13\) do not fit"),
        (lambda: ChunkedHead(head)(hidden, targets, token_weights=targets[0]), "must have the shape"),
        (lambda: ChunkedHead(head).with_loss(plain, hidden, targets[1:]), "first dimensions"),
    ):
        with pytest.raises(UsageError, match=message):
            make()
