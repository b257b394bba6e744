"""Every combination of strategies that promises equality, on random networks: the sample of a benchmark."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from memfit.strategies.accumulation import Accumulation
from support.random_networks import Network, networks
from support.strategy_mixes import CLOSE, EXACT, LIMITS, Combination, differing, error

SAMPLE = settings(
    max_examples=8,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # networks are small as they are drawn; shrinking one takes minutes
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.filterwarnings("ignore:offload", "ignore:checkpointing", "ignore:.*BatchNorm layers")
@SAMPLE
@given(networks())
def test_the_same_arithmetic_gives_the_same_bits(network):
    assert {name: found for name in EXACT if (found := differing(name, network))} == {}


@pytest.mark.filterwarnings("ignore:offload", "ignore:checkpointing", "ignore:.*BatchNorm layers")
@SAMPLE
@given(networks(divisible=True))
@pytest.mark.parametrize("dtype", LIMITS)
def test_sums_in_another_order_are_equal_to_rounding(dtype, network):
    assert {name: off for name in CLOSE if (off := error(name, network, dtype)) > LIMITS[dtype]} == {}


def test_a_wrong_run_is_found():
    """Three micro-batches by hand are not two; and batch norms, which nothing is claimed of, see parts."""
    network = Network("images", ("convolution", "batch norm"), (False, False), False, False, False, 8, 1)
    wrong = Combination((Accumulation(2),), 3)
    ours, plain = wrong.ours(network, torch.float32), wrong.plain(network, torch.float32)
    assert not all(map(torch.equal, ours.gradients, plain.gradients))
    assert error("accumulation of 2 = whole batch", network, torch.float64) > 1e-3
