"""``memfit.auto_checkpoint``: a live model is planned on the ghost, and checkpointed in place."""

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import UsageError

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("warm_scripts")]

BUDGET = int(1.2 * 2**30)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True) for _ in range(4))
    return nn.Sequential(*layers), torch.randn(64, 256, 128)


def gradients(model, inputs):
    torch.manual_seed(1)
    model.zero_grad()
    model(inputs).square().mean().backward()
    return [each.grad.clone() for each in model.parameters()]


def test_a_model_fits_the_budget_afterwards_and_computes_the_same(network):
    model, inputs = network
    small = inputs[:2, :16]
    plain = gradients(model, small)
    found = memfit.auto_checkpoint(model, inputs, BUDGET, optimizer=torch.optim.AdamW)
    try:
        assert found.chosen.needs.bytes <= BUDGET < found.as_written.needs.bytes
        assert found.chosen.change.allocator == ""
        assert str(found).startswith("PLAN FOUND   needs ")
        estimate = memfit.estimate(model, inputs, optimizer=torch.optim.AdamW)
        assert estimate.run.peak_allocated + found.device.context.bytes <= found.chosen.needs.bytes
        assert all(map(torch.equal, plain, gradients(model, small)))
    finally:
        memfit.revert(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "why"),
    [("530MiB", "Whatever a plan changes, there exist"), ("620MiB", r"The smallest needs .* MiB")],
)
def test_below_what_a_plan_reaches_the_model_is_unchanged_and_the_error_says_what_is_needed(
    network, budget, why
):
    model, inputs = network
    with pytest.raises(UsageError, match=rf"budget='{budget}': no plan fits\. {why}"):
        memfit.auto_checkpoint(model, inputs, budget)
    assert not any("forward" in vars(module) for module in model.modules())
