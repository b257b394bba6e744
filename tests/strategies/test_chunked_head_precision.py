"""``memfit.ChunkedHead`` in low precision: autocast, GradScaler, weights in bfloat16 and float16."""

import copy

import pytest
import torch
from torch import nn

from memfit import ChunkedHead
from support.plain_head import CLASSES, FEATURES, Addmm, Largest, case, error, gradients_of, plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_autocast(dtype, bias):
    head, hidden, targets = case(torch.float32, bias)
    with torch.autocast("cpu", dtype):
        loss = plain(head, hidden, targets)
    expected = gradients_of(loss * 1024, head, hidden)
    for chunks in (1, 4):
        with torch.autocast("cpu", dtype):
            loss = ChunkedHead(head, chunks)(hidden, targets)
        assert loss.dtype is torch.float32
        found = gradients_of(loss * 1024, head, hidden)
        assert [each.dtype for each in found] == [torch.float32] * len(found)
        assert torch.equal(found[1], expected[1]), "rows are independent of each other"
        assert error(found, expected) <= torch.finfo(dtype).eps
        assert chunks > 1 or all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear, Addmm])
def test_a_weight_is_cast_by_autocast_once_and_may_be_used_again(kind, dtype, frozen):
    head, hidden, targets = case(torch.float32)
    head = kind(FEATURES, CLASSES)
    hidden.requires_grad_(not frozen)
    other = hidden.detach().sin()
    found = []
    for loss in (plain, lambda head, *rest: ChunkedHead(head, 4)(*rest)):
        with torch.autocast("cpu", dtype):
            total = loss(head, hidden, targets) + plain(head, other, targets)
        found.append(gradients_of(total * 1024, head, *([] if frozen else [hidden])))
    assert error(found[1], found[0]) <= 2 * torch.finfo(dtype).eps
    if kind is nn.Linear:
        with torch.autocast("cpu", dtype), torch.no_grad(), Largest() as seen:
            ChunkedHead(head, 4)(hidden, targets)
        assert seen.sizes.count(head.weight.numel()) == 1, "its cast"


def test_autocast_leaves_float64_as_it_is():
    head, hidden, targets = case()
    expected = gradients_of(plain(head, hidden, targets), head, hidden)
    with torch.autocast("cpu", torch.bfloat16):
        loss = ChunkedHead(head, 4)(hidden, targets)
    assert error(gradients_of(loss, head, hidden), expected) <= 1e-12


class Island(nn.Linear):
    """Computes in float32 inside of autocast."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return x @ self.weight.T + self.bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_that_leaves_autocast(dtype):
    _, hidden, targets = case(torch.float32)
    head = Island(FEATURES, CLASSES)
    found = []
    for loss in (plain, lambda head, *rest: ChunkedHead(head, 1)(*rest)):
        with torch.autocast("cpu", dtype):
            value = loss(head, hidden, targets)
        found.append(gradients_of(value, head, hidden))
    assert error(found[1], found[0]) <= 1e-6


def test_other_devices_without_autocast():
    head, hidden, targets = (each.to("meta") for each in case())
    hidden = hidden.detach().requires_grad_()
    ChunkedHead(head, 4)(hidden, targets).backward()
    assert hidden.grad.shape == hidden.shape
    assert head.weight.grad.device.type == "meta"


def test_gradients_in_float16_are_those_of_the_scaled_loss():
    """Those of the plain loss are below float16's smallest number."""
    torch.manual_seed(0)
    head = nn.Linear(4, 5000)
    hidden, targets = torch.randn(512, 4, requires_grad=True), torch.randint(5000, (512,))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    losses = [plain, lambda head, *rest: ChunkedHead(head, 8)(*rest)]
    found = []
    for loss in losses:
        with torch.autocast("cpu", torch.float16):
            value = loss(head, hidden, targets)
        found.append([each / 2**16 for each in gradients_of(scaler.scale(value), head, hidden)])
    exact = gradients_of(plain(head, hidden, targets), head, hidden)
    assert torch.equal(found[0][1], found[1][1])
    assert error(found[0], exact) < 5e-3
    assert error(found[1], exact) < 5e-3
    assert found[1][2].count_nonzero() == found[1][2].numel()


def test_weights_in_float16_without_autocast():
    head, hidden, targets = case(torch.float32)
    half, low = copy.deepcopy(head).half(), hidden.detach().half().requires_grad_()
    expected = gradients_of(plain(half, low, targets) * 2**16, half, low)
    found = gradients_of(ChunkedHead(half, 4)(low, targets) * 2**16, half, low)
    assert torch.equal(found[1], expected[1])
    assert error(found, expected) <= torch.finfo(torch.float16).eps
    assert {each.dtype for each in found[1:]} == {torch.float16}


def test_gradients_of_bfloat16_weights_are_summed_in_float32_or_as_asked():
    torch.manual_seed(0)
    head = nn.Linear(8, 20)
    hidden, targets = torch.randn(4096, 8), torch.randint(20, (4096,))
    exact = gradients_of(plain(head, hidden, targets), head)
    low, hidden = head.bfloat16(), hidden.bfloat16()
    errors = {
        dtype: error(
            [each.double() for each in gradients_of(ChunkedHead(low, 512, dtype)(hidden, targets), low)],
            [each.double() for each in exact],
        )
        for dtype in (None, "float32", "bfloat16")
    }
    assert errors[None] == errors["float32"] < 0.02 < errors["bfloat16"]
