"""``memfit.ChunkedHead``: losses and gradients of the plain head, without its logits."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from memfit import ChunkedHead
from memfit.errors import UsageError
from support.plain_head import (
    BATCH,
    CLASSES,
    FEATURES,
    LENGTH,
    POSITIONS,
    Addmm,
    Largest,
    case,
    error,
    factors,
    gradients_of,
    ignored,
    plain,
)

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def probabilities(dtype):
    torch.manual_seed(1)
    return torch.rand(BATCH, LENGTH, CLASSES, dtype=dtype).softmax(-1)


OPTIONS = {
    "default": lambda t, dtype: (t, {}),
    "sum": lambda t, dtype: (t, {"reduction": "sum"}),
    "some ignored": lambda t, dtype: (ignored(t), {}),
    "another class ignored": lambda t, dtype: (t % 4, {"ignore_index": 3}),
    "smoothed": lambda t, dtype: (ignored(t), {"label_smoothing": 0.1}),
    "class weights": lambda t, dtype: (ignored(t), {"weight": factors(CLASSES, dtype)}),
    "class weights, smoothed": lambda t, dtype: (
        ignored(t),
        {"weight": factors(CLASSES, dtype), "label_smoothing": 0.2},
    ),
    "class weights, a number far from any class ignored": lambda t, dtype: (
        torch.where(ignored(t) < 0, -1000, t),
        {"weight": factors(CLASSES, dtype), "ignore_index": -1000},
    ),
    "token weights": lambda t, dtype: (
        ignored(t),
        {"token_weights": factors(POSITIONS, dtype).view(BATCH, LENGTH)},
    ),
    "token and class weights, sum": lambda t, dtype: (
        ignored(t),
        {
            "token_weights": factors(POSITIONS, dtype).view(BATCH, LENGTH),
            "weight": factors(CLASSES, dtype),
            "reduction": "sum",
        },
    ),
    "token and class weights": lambda t, dtype: (
        ignored(t),
        {
            "token_weights": factors(POSITIONS, dtype).view(BATCH, LENGTH),
            "weight": factors(CLASSES, dtype),
        },
    ),
    "probabilities": lambda t, dtype: (probabilities(dtype), {}),
    "probabilities, class weights, smoothed": lambda t, dtype: (
        probabilities(dtype),
        {"weight": factors(CLASSES, dtype), "label_smoothing": 0.2},
    ),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_are_those_of_the_plain_head(name, bias, dtype):
    head, hidden, targets = case(dtype, bias)
    targets, options = OPTIONS[name](targets, dtype)
    expected = gradients_of(plain(head, hidden, targets, **options), head, hidden)
    for chunks in (1, 4, 7, POSITIONS, 1000):
        found = gradients_of(ChunkedHead(head, chunks)(hidden, targets, **options), head, hidden)
        assert error(found, expected) <= TOLERANCE[dtype], chunks
        if chunks == 1 and name in {"default", "sum", "some ignored", "another class ignored"}:
            assert all(map(torch.equal, found, expected))


def test_flat_positions_and_a_single_one_have_the_same_loss():
    head, hidden, targets = case()
    flat, wanted = hidden.flatten(0, 1), targets.flatten()
    whole = ChunkedHead(head, 4)(hidden, targets)
    assert torch.equal(ChunkedHead(head, 4)(flat, wanted), whole)
    one = ChunkedHead(head, 4)(flat[0], wanted[0])
    assert torch.allclose(one, cross_entropy(head(flat[0]), wanted[0]))
    shifted = ChunkedHead(head, 4)(hidden[:, :-1], targets[:, 1:])
    assert torch.allclose(shifted, plain(head, hidden[:, :-1], targets[:, 1:]))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}])
def test_where_all_is_ignored_the_loss_is_nan_and_gradients_are_zero_as_in_pytorch(options):
    head, hidden, targets = case()
    targets = torch.full_like(targets, -100)
    expected = gradients_of(plain(head, hidden, targets, **options), head, hidden)
    found = gradients_of(ChunkedHead(head, 4)(hidden, targets, **options), head, hidden)
    assert found[0].isnan()
    assert expected[0].isnan()
    assert [each.count_nonzero() for each in found[1:]] == [each.count_nonzero() for each in expected[1:]]
    assert not any(each.count_nonzero() for each in found[1:])


def test_without_positions_the_sum_is_zero():
    head, _, _ = case()
    hidden = torch.empty(0, FEATURES, dtype=torch.float64, requires_grad=True)
    targets = torch.empty(0, dtype=torch.int64)
    found = gradients_of(ChunkedHead(head)(hidden, targets, reduction="sum"), head, hidden)
    assert found[0] == 0
    assert [each.shape for each in found[1:]] == [hidden.shape, head.weight.shape, head.bias.shape]
    assert not any(each.count_nonzero() for each in found)


def test_no_logits_exist_whole_nothing_runs_twice_and_one_tensor_has_the_weight_s_size():
    torch.manual_seed(0)
    head = nn.Linear(8, 50)
    hidden, targets = torch.randn(96, 8, requires_grad=True), torch.randint(50, (96,))
    with Largest() as seen:
        ChunkedHead(head, 6)(hidden, targets).backward()
    aten = torch.ops.aten
    assert seen.calls[aten.addmm] == 6
    assert seen.calls[aten.mm] == 6 + 1  # the hidden states' gradients, and the weight's first
    assert seen.calls[aten.addmm_] == 6 - 1
    assert seen.calls[aten._log_softmax] == 6
    assert max(seen.sizes) == 96 // 6 * 50
    assert seen.sizes.count(head.weight.numel()) == 1


def test_tied_weights():
    torch.manual_seed(0)
    model = nn.ModuleDict({"tokens": nn.Embedding(50, 8), "head": nn.Linear(8, 50, bias=False)}).double()
    model["head"].weight = model["tokens"].weight
    tokens = torch.randint(50, (4, 9))
    losses = [
        loss(model["head"], model["tokens"](tokens)[:, :-1], tokens[:, 1:])
        for loss in (plain, lambda head, *rest: ChunkedHead(head, 3)(*rest))
    ]
    expected, found = (gradients_of(loss, model) for loss in losses)
    assert error(found, expected) <= 1e-12


@pytest.mark.parametrize("frozen", ["head", "weight", "bias", "hidden", "head and hidden"])
def test_frozen_parts_get_no_gradients(frozen):
    head, hidden, targets = case()
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(not (frozen.startswith("head") or frozen == name))
    hidden.requires_grad_("hidden" not in frozen)
    losses = [plain(head, hidden, targets), ChunkedHead(head, 4)(hidden, targets)]
    if frozen == "head and hidden":
        assert [each.requires_grad for each in losses] == [False, False]
        assert torch.allclose(*losses)
        return
    expected, found = (gradients_of(loss, head, hidden) for loss in losses)
    assert error(found, expected) <= 1e-12
    if frozen == "hidden":
        with Largest() as seen:
            ChunkedHead(head, 4)(hidden, targets)
        assert seen.calls[torch.ops.aten.mm] == 1, "the weight's gradient of the first slice"


def test_evaluation_makes_no_gradients():
    head, hidden, targets = case()
    for context in (torch.no_grad, torch.inference_mode):
        with context(), Largest() as seen:
            loss = ChunkedHead(head.eval(), 4)(hidden, targets)
        assert not loss.requires_grad
        assert torch.ops.aten.mm not in seen.calls
        assert torch.allclose(loss, plain(head, hidden, targets))


def test_used_twice_in_a_step_and_over_micro_batches():
    head, hidden, targets = case()
    chunked = ChunkedHead(head, 4)
    found, expected = (
        gradients_of(loss(hidden, targets) * 2 + loss(hidden.sin(), ignored(targets)) / 3, head, hidden)
        for loss in (chunked, lambda *rest: plain(head, *rest))
    )
    assert error(found, expected) <= 1e-12
    head.zero_grad()
    for part in (0, 1):
        (chunked(hidden[part::2], targets[part::2], reduction="sum") / POSITIONS).backward()
    assert error([head.weight.grad], gradients_of(plain(head, hidden, targets), head)[1:2]) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_several_backwards(dtype):
    head, hidden, targets = case(dtype)
    loss = ChunkedHead(head, 4)(hidden, targets)
    once = gradients_of(ChunkedHead(head, 4)(hidden, targets) * 3, head, hidden)
    head.zero_grad()
    hidden.grad = None
    (loss * 2).backward(retain_graph=True)
    (loss * 1).backward()
    found = [loss.detach() * 3, hidden.grad, head.weight.grad, head.bias.grad]
    assert error(found, once) <= torch.finfo(dtype).eps * 4
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    loss = ChunkedHead(head, 4)(hidden, targets)
    with pytest.raises(UsageError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_the_gradient_of_a_weight_is_the_sum_itself():
    """As in a plain backward, no second copy of it is made."""
    head, hidden, targets = case()
    with Largest() as seen:
        loss = ChunkedHead(head, 4)(hidden, targets)
        seen.sizes.clear()
        loss.backward()
    assert max(seen.sizes, default=0) <= 1


class Twice(nn.Module):
    """Uses a weight as that of a linear layer and otherwise."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, FEATURES) / 4)

    def forward(self, x):
        return nn.functional.linear(x, self.weight) + x @ self.weight.sin().T + self.weight.mean()


class Detached(nn.Linear):
    """Has no gradient of its input."""

    def __init__(self):
        super().__init__(FEATURES, CLASSES)

    def forward(self, x):
        return super().forward(x.detach())


HEADS = {
    "norm and linear": lambda: nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, CLASSES)),
    "two layers": lambda: nn.Sequential(nn.Linear(FEATURES, 9), nn.GELU(), nn.Linear(9, CLASSES)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, CLASSES)),
    "addmm": Addmm,
    "a weight used twice": Twice,
    "an unused parameter": lambda: nn.ModuleDict({"used": Addmm(), "unused": nn.Linear(2, 2)}),
    "a detached input": Detached,
    "batch norm in evaluation mode": lambda: nn.Sequential(
        nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES)
    ).eval(),
}


class Used(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        return self.parts["used"](x)


@pytest.mark.parametrize("name", HEADS)
def test_other_heads(name):
    _, hidden, targets = case()
    torch.manual_seed(0)
    head = HEADS[name]()
    head = (Used(head) if isinstance(head, nn.ModuleDict) else head).double()
    flat, wanted = hidden.flatten(0, 1), targets.flatten()
    expected = gradients_of(cross_entropy(head(flat), wanted) + 0 * hidden.sum(), head, hidden)
    found = gradients_of(ChunkedHead(head, 4)(hidden, targets), head, hidden)
    assert error(found, expected) <= 1e-12


def test_hooks_of_the_head_run_in_each_slice():
    head, hidden, targets = case()
    shapes = []
    head.register_forward_hook(lambda module, args, result: shapes.append(tuple(result.shape)))
    ChunkedHead(head, 4)(hidden, targets).backward()
    assert shapes == [(9, CLASSES), (10, CLASSES), (10, CLASSES), (10, CLASSES)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_head_with_dropout_is_differentiated_with_the_numbers_of_its_forward(dtype):
    _, hidden, targets = case(dtype)
    torch.manual_seed(0)
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(FEATURES, CLASSES)).to(dtype)
    flat, wanted = hidden.flatten(0, 1), targets.flatten()
    torch.manual_seed(5)
    parts = zip(flat.tensor_split([9, 19, 29]), wanted.tensor_split([9, 19, 29]), strict=True)
    losses = [
        cross_entropy(head(x).to(max(dtype, torch.float32, key=lambda d: d.itemsize)), y, reduction="sum")
        for x, y in parts
    ]
    after = torch.rand(2)
    expected = gradients_of(sum(losses) / POSITIONS * 64, head, hidden)
    torch.manual_seed(5)
    loss = ChunkedHead(head, 4)(hidden, targets)
    assert torch.equal(torch.rand(2), after)
    state = torch.get_rng_state()
    found = gradients_of(loss * 64, head, hidden)
    assert torch.equal(torch.get_rng_state(), state)
    assert error(found, expected) <= torch.finfo(dtype).eps * 4
