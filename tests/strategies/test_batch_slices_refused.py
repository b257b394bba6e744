"""What batch slices refuse: models that combine samples, and what a loss of one slice's tensors would be."""

import functools
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves

from memfit import BatchSlices
from memfit.errors import UsageError
from memfit.strategies.mechanisms import forward_side_effects
from support.slice_cases import (
    CLASSES,
    WIDTH,
    Case,
    Of,
    entropy,
    expect_equal,
    images,
    same,
    trained,
    with_labels,
)

OUT_OF_SIGHT = torch.Generator()


def keeping(model):
    model.kept = [None]


def shuffled(count):
    order = [*range(count)]
    random.shuffle(order)
    return order


def scaled_to_one(x):
    x.register_hook(lambda gradient: gradient / gradient.norm())
    return x


def with_counts(n):
    return torch.randn(n, 4, WIDTH), torch.tensor([0, 0, 2, 1, 1, 0, 2][:n])


REFUSED = {
    "batch norm": (
        Case(lambda s, x: s.conv(x), images, layers=lambda: {"conv": nn.BatchNorm2d(3)}),
        "conv is a BatchNorm2d in training mode",
    ),
    "similarities": (
        Case(lambda s, x: s.logits(x).flatten(1) @ s.logits(x).flatten(1).T),
        "no row for each of them",
    ),
    "a mean over the batch": (Case(lambda s, x: s.logits(x).mean(0)), "no row for each of them"),
    "less its mean": (Case(lambda s, x: s.logits(x) - s.logits(x).mean(0)), "combines samples"),
    "less its mean, in training": (
        Case(lambda s, x: F.dropout(s.logits(x) - s.training * s.logits(x).mean(0))),
        "combines samples",
    ),
    "less its mean, with numbers drawn in evaluation": (
        Case(lambda s, x: F.dropout(s.logits(x) - s.logits(x).mean(0), training=True)),
        "combines samples",
    ),
    "divided by its deviation, which one sample lacks": (
        Case(lambda s, x: s.logits(x) / (s.logits(x).var(0, correction=0) / (len(x) - 1)).sqrt()),
        "for each alone, in which numbers are infinite or NaN",
    ),
    "less its mean, some infinite": (
        Case(
            lambda s, x: (s.logits(x) - s.logits(x).mean(0)).masked_fill(
                torch.eye(4, CLASSES) > 0, -torch.inf
            )
        ),
        "combines samples",
    ),
    "mixed in random order": (
        Case(lambda s, x: s.logits(x + x[torch.randperm(len(x))])),
        "combines samples",
    ),
    "mixed in the order of random numbers": (
        Case(lambda s, x: s.logits(x + x[torch.rand(len(x)).argsort()])),
        "combines samples",
    ),
    "mixed by Python's shuffle": (Case(lambda s, x: s.logits(x + x[shuffled(len(x))])), "combines samples"),
    "sequences first": (
        Case(lambda s, x: s.rnn(x)[0], layers=lambda: {"rnn": nn.LSTM(WIDTH, WIDTH)}),
        "pass dim=",
    ),
    "contrastive loss": (
        Case(
            lambda s, x: F.cross_entropy(
                s.logits(x).flatten(1) @ x.flatten(1)[:, :20].T, torch.arange(len(x))
            ),
            loss=same,
        ),
        "it reduces 4 elements for two samples, and 1 and 1 for each alone",
    ),
    "loss of means": (
        Case(lambda s, x: s.logits(x).mean(0).square().sum(), loss=same),
        "it reduces 20 elements for two samples, and 20 and 20 for each alone",
    ),
    "a variance": (Case(lambda s, x: s.logits(x).var(), loss=same), "its graph ends in VarBackward0"),
    "a sum and a mean": (
        Case(lambda s, x: s.logits(x).mean() + s.up(x).square().sum(), loss=same),
        "adds a mean over samples to a sum",
    ),
    "means over other tokens": (
        Case(lambda s, x, y: entropy()(s, x, y) + s.logits(x).square().mean(), with_labels, same),
        "weigh the slices of a batch differently",
    ),
    "a sum and a constant": (
        Case(lambda s, x: s.logits(x).square().sum() + 0.01, loss=same),
        "combines samples",
    ),
    "two losses": (
        Case(lambda s, x: (s.logits(x).mean(), s.up(x).mean()), loss=sum),
        "returns 2 single numbers",
    ),
    "logits differentiated beside the loss": (
        Case(
            lambda s, x, y: (entropy()(s, x, y), s.logits(x)), with_labels, lambda out: out[0] + out[1].mean()
        ),
        "differentiates an output",
    ),
    "a tensor of its own": (
        Case(
            lambda s, x: (s.logits(x) * s.own[0]).mean(),
            loss=same,
            prepare=lambda model: setattr(model, "own", [torch.ones(1, requires_grad=True)]),
        ),
        "neither a parameter nor an argument",
    ),
    "a counter": (
        Case(
            lambda s, x: s.logits(x * s.position.new_ones(1)) + s.seen.add_(1),
            prepare=lambda model: model.register_buffer("seen", torch.zeros(1)),
        ),
        "changes its tensor 'seen'",
    ),
    "a statistic, in the place of the one before": (
        Case(lambda s, x: setattr(s, "seen", None) or setattr(s, "seen", x.mean()) or s.logits(x)),
        "changes its tensor 'seen'",
    ),
    "a counter in Python": (
        Case(
            lambda s, x: setattr(s, "step", s.step + 1) or s.logits(x),
            prepare=lambda m: setattr(m, "step", 0),
        ),
        "changes its attribute 'step' in each call",
    ),
    "a metric in a dict": (
        Case(
            lambda s, x: s.log.update(mean=float(x.sum())) or s.logits(x),
            prepare=lambda m: setattr(m, "log", {}),
        ),
        "changes its attribute 'log'",
    ),
    "a meter": (
        Case(
            lambda s, x: setattr(s.meter, "seen", s.meter.seen + len(x)) or s.logits(x),
            prepare=lambda m: setattr(m, "meter", SimpleNamespace(seen=0)),
        ),
        "changes its attribute 'meter'",
    ),
    "a hook on a gradient": (
        Case(lambda s, x: s.logits(scaled_to_one(x * s.position))),
        "registers a hook on a gradient",
    ),
    "a backward hook of a layer": (
        Case(Of.logits, prepare=lambda m: m.norm.register_full_backward_hook(lambda *_: None)),
        "norm has a backward hook",
    ),
    "a list of features": (
        Case(lambda s, x: s.logits(s.kept.__setitem__(0, x * s.position) or s.kept[0]), prepare=keeping),
        "keeps a result of MulBackward0 (1 x 4 x 6)",
    ),
    "a list of features beside the loss": (
        Case(
            lambda s, x: s.logits(s.kept.__setitem__(0, x * s.position) or s.kept[0]).square().mean(),
            loss=same,
            prepare=keeping,
        ),
        "keeps a result of MulBackward0",
    ),
    "a hook on a layer": (
        Case(
            Of.logits,
            prepare=lambda model: model.norm.register_forward_hook(
                lambda _, __, out, kept=[]: kept.append(out)
            ),
        ),
        "batch_slices: norm has a forward hook, ",
    ),
    "a generator out of sight": (
        Case(lambda s, x: s.logits(x) * torch.rand(5, generator=OUT_OF_SIGHT)),
        "test_batch_slices_refused.py:",
    ),
    "spectral norm": (
        Case(Of.logits, prepare=lambda model: nn.utils.parametrizations.spectral_norm(model.up)),
        "changes its tensor",
    ),
    "a number of samples": (
        Case(lambda s, x: (s.logits(x), len(x)), loss=lambda out: out[0].sum() / out[1]),
        "returns a number that depends on the samples: 2 for two, 1 for one",
    ),
    "a number of what the first two samples lack": (
        Case(lambda s, x, y: (s.logits(x), int(y.sum())), with_counts, lambda out: out[0].sum()),
        "returns a number that depends on the samples: 2 for two, 0 for one",
    ),
    "a loss that such a number multiplies": (
        Case(lambda s, x, y: s.logits(x).square().sum() * max(int(y.sum()), 1), with_counts, same),
        "multiplies or divides it by a Python number that it computes from the samples",
    ),
    "a loss that is divided by a root of such a number": (
        Case(lambda s, x, y: s.logits(x).square().sum() / max(int(y.sum()), 1) ** 0.5, with_counts, same),
        "cannot see what the number is for the batch",
    ),
    "a parameter": (
        Case(lambda s, x: (s.logits(x), s.position), loss=lambda out: out[0].sum() + out[1].square().sum()),
        "returns one of its parameters (1 x 4 x 6)",
    ),
    "a length of each slice": (
        Case(
            lambda s, x, n: nn.utils.rnn.pad_packed_sequence(
                s.rnn(nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False))[0],
                True,
            )[0],
            lambda n: (torch.randn(n, 4, WIDTH), torch.tensor([3, 3, 3, 4, 1, 2, 2][:n])),
            layers=lambda: {"rnn": nn.GRU(WIDTH, WIDTH, batch_first=True)},
        ),
        "pad_packed_sequence has total_length for that",
    ),
    "a fixed batch": (Case(lambda s, x: s.logits(x).view(7, 20)), "fails for a part of the batch"),
    "an object": (
        Case(lambda s, x: SimpleNamespace(logits=s.logits(x)), loss=lambda out: out.logits.mean()),
        "returns an object of type SimpleNamespace",
    ),
    "no tensor": (Case(lambda s, n: s.logits(torch.randn(n, 4, WIDTH)), lambda n: (n,)), "no tensor"),
    "a packed sequence": (
        Case(
            lambda s, x: s.rnn(x)[1],
            lambda n: (nn.utils.rnn.pack_sequence([torch.randn(3, WIDTH).double()] * n),),
            layers=lambda: {"rnn": nn.GRU(WIDTH, WIDTH)},
        ),
        "is passed a PackedSequence",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_slices_would_change_is_refused_before_a_gradient(name):
    case, message = REFUSED[name]
    with pytest.raises(UsageError, match=r"^batch_slices: ") as refused:
        trained(case, BatchSlices(3), torch.float64)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "loss", [Of.logits, lambda s, x: s.logits(x).square().mean()], ids=["outputs", "loss"]
)
def test_a_second_derivative_is_refused(loss):
    model = Of(loss)
    BatchSlices(2).apply(model)
    total = model(torch.randn(4, 4, WIDTH)).mean()
    with pytest.raises(UsageError, match="create_graph"):
        torch.autograd.grad(total, list(model.parameters()), create_graph=True, allow_unused=True)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_of_a_later_step_is_refused_too_and_one_of_a_library_is_not(register, monkeypatch):
    kept = []
    model = Of(Of.logits)
    BatchSlices(2).apply(model)
    x = torch.randn(4, 4, WIDTH)
    model(x).sum().backward()
    of_each_module = getattr(nn.modules.module, register.replace("_forward", "_module_forward"))
    for add, whose in ((getattr(model.head, register), "head"), (of_each_module, "each module")):
        added = add(functools.partial(lambda _, *of: kept.append(tree_leaves(of)[-1])))
        with pytest.raises(UsageError, match=f"{whose} has a forward hook, .*<lambda> at {__file__}:"):
            model(x)
        added.remove()
    monkeypatch.setattr(forward_side_effects, "is_user_file", lambda _: False)
    detaching = getattr(model.head, register)(lambda _, *of: kept.append(tree_leaves(of)[0].detach()))
    model(x).sum().backward()
    assert kept
    detaching.remove()
    getattr(model.head, register)(lambda _, *of: kept.append(tree_leaves(of)[-1]))
    getattr(model.norm, register)(lambda *_: None)
    with pytest.raises(UsageError, match="or a hook on a layer, keeps a result of"):
        model(x)


def test_a_view_elsewhere_whose_history_is_lost_does_not_end_the_training():
    base = torch.zeros(2, 2)
    with torch.no_grad():
        view = base[0]
    base.mul_(torch.ones(1, requires_grad=True))
    with pytest.raises(RuntimeError, match="created in no_grad mode"):
        _ = view.grad_fn
    model = Of(Of.logits)
    BatchSlices(2).apply(model)
    model(torch.randn(4, 4, WIDTH)).sum().backward()


def test_what_a_function_keeps_for_its_backward_is_not_refused():
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * ctx.x * gradient

    case = Case(lambda s, x: s.logits(Kept.apply(x * s.position)))
    expect_equal(trained(case, BatchSlices(3), torch.float64), trained(case, None, torch.float64), 1e-12)


def test_tokens_that_each_sample_drops_at_random_do_not_combine_samples():
    def kept(x):
        order = torch.rand(x.shape[:2]).argsort(1)[:, : x.shape[1] // 2]
        return x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))

    model = Of(lambda s, x: s.logits(kept(x)))
    BatchSlices(2).apply(model)
    assert model(torch.randn(4, 6, WIDTH)).shape[:2] == (4, 3)


@pytest.mark.parametrize("seed", range(4))
def test_layers_that_are_skipped_at_random_do_not_combine_samples(seed):
    model = Of(lambda s, x: F.dropout(s.logits(x if random.random() < 0.5 else -x)))  # noqa: S311
    BatchSlices(2).apply(model)
    random.seed(seed)
    model(torch.randn(4, 4, WIDTH)).sum().backward()


def test_a_number_that_the_loop_changes_multiplies_the_loss_and_is_returned():
    model, x = Of(lambda s, x: (s.logits(x).square().mean() * s.beta, s.beta)), torch.randn(4, 4, WIDTH)
    BatchSlices(2).apply(model)
    found = []
    for model.beta in (1, 2, 4):
        loss, beta = model(x)
        found.append(loss.item() / beta)
    assert found == pytest.approx([found[0]] * 3)


def test_an_argument_that_is_written_to_before_the_backward_is_named():
    model, x = Of(lambda s, x, *, shift: s.logits(x + shift)), torch.randn(4, 4, WIDTH)
    BatchSlices(2).apply(model)
    shift = torch.ones(4, 1, 1)
    loss = model(x, shift=shift).sum()
    shift.copy_(torch.zeros(4, 1, 1))
    with pytest.raises(UsageError, match="changes argument 'shift' of the model in place"):
        loss.backward()


def test_a_call_with_other_parameters_is_refused():
    model = Of(Of.logits)
    BatchSlices(2).apply(model)
    others = {name: each - 0.1 for name, each in model.named_parameters()}
    with pytest.raises(UsageError, match="called with another tensor as its parameter position"):
        torch.func.functional_call(model, others, (torch.randn(4, 4, WIDTH),))
