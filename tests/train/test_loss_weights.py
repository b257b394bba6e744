"""Micro-batches that weigh more than planned: the engine rescales what it summed before."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import memfit

HEAVY_LATER = [1, 4000, 4000, 4000]


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


class Seen(memfit.Callback):
    """A callback that keeps the gradients that the optimizer sees."""

    def on_optimizer_step_begin(self, engine):
        groups = engine.optimizer.param_groups
        self.gradients = [parameter.grad.double() for group in groups for parameter in group["params"]]


def batches(weights):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 8, generator=generator), torch.randint(3, (size,), generator=generator))
        for size in weights
    ]


def mean_loss(model, data):
    dtype = next(model.parameters()).dtype
    return F.cross_entropy(model(data[0].to(dtype)).to(torch.promote_types(dtype, torch.float32)), data[1])


def whole_batch_gradients(weights):
    """Return loss and gradients of all samples at once, in float64."""
    model = net(torch.float64)
    x, y = (torch.cat(parts) for parts in zip(*batches(weights), strict=True))
    loss = mean_loss(model, (x, y))
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


def window_gradients(weights, *plan):
    seen, model = Seen(), net()
    run = memfit.Engine(
        model,
        [*plan, memfit.Accumulation(batches_per_update=len(weights))],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[seen],
    )
    for part, weight in zip(batches(weights), weights, strict=True):
        with run.autocast():
            loss = mean_loss(model, part)
        result = run.backward(loss, weight=weight)
    assert result.updated
    return result.loss, seen.gradients


def distance(found, expected):
    pairs = zip(found, expected, strict=True)
    return max(((left - right).norm() / right.norm()).item() for left, right in pairs)


PLANS = {
    "fp32": ((), 1e-5),
    "fp16, scaled by 16384": ((memfit.Precision("fp16", loss_scale=16384.0),), 1e-2),
    "bf16 summed in float32": ((memfit.Precision("bf16", autocast=False),), 3e-2),
    "bf16 with float32 masters": ((memfit.Precision("bf16", autocast=False, master_weights=True),), 3e-2),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("weights", [HEAVY_LATER, [4000, 1, 4000, 4000], [1, 30, 4000], [3, 5, 2]], ids=str)
def test_a_window_equals_the_whole_batch_whatever_its_first_part_weighs(weights, name):
    plan, tolerance = PLANS[name]
    loss, gradients = window_gradients(weights, *plan)
    expected_loss, expected = whole_batch_gradients(weights)
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert distance(gradients, expected) < tolerance


MASTERS = pytest.mark.parametrize("masters", [False, True])


@MASTERS
def test_float32_sums_are_corrected_by_the_weight_of_the_window(masters):
    """Bit for bit as in a handwritten loop: sums divided by 3 * 3 are corrected to 10 samples."""
    plain = net(torch.bfloat16)
    sums = [torch.zeros(parameter.shape) for parameter in plain.parameters()]
    for part, weight in zip(batches([3, 5, 2]), [3, 5, 2], strict=True):
        plain.zero_grad()
        (mean_loss(plain, part) / (9 / weight)).backward()
        for total, parameter in zip(sums, plain.parameters(), strict=True):
            total.add_(parameter.grad)
    corrected = [total * (9 / 10) for total in sums]
    _, found = window_gradients([3, 5, 2], memfit.Precision("bf16", autocast=False, master_weights=masters))
    for gradient, total in zip(found, corrected, strict=True):
        assert torch.equal(gradient, (total if masters else total.bfloat16()).double())


@MASTERS
def test_float32_sums_of_a_flushed_window_are_divided_by_its_own_parts(masters):
    """Four parts of eight: the correction is a factor of 2, which rounds nothing."""
    plan = memfit.Precision("bf16", autocast=False, master_weights=masters)
    flushed, full = (four_parts(steps, plan) for steps in (8, 4))
    assert all(map(torch.equal, flushed, full))


def four_parts(steps, plan):
    seen, model = Seen(), net()
    run = memfit.Engine(
        model,
        [plan, memfit.Accumulation(batches_per_update=steps)],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[seen],
    )
    for part in batches([4] * 4):
        run.backward(mean_loss(model, part))
    run.flush()
    return seen.gradients
