"""Every combination of strategies that promises equality, on a few of benchmarks/equality.py's networks."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from memfit.strategies.accumulation import Accumulation
from support.random_networks import Network, networks
from support.strategy_mixes import CLOSE, EXACT, LIMITS, Combination, differing, error, error_of_ranks

FEW_OR_MORE = pytest.mark.parametrize("examples", [3, pytest.param(8, marks=pytest.mark.slow)])


def for_networks(check, examples, **drawn):
    """Call the check with so many random networks."""
    sample = settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # drawn networks are small; shrinking one takes minutes
        suppress_health_check=list(HealthCheck),
    )
    sample(given(networks(**drawn))(check))()


@pytest.mark.filterwarnings("ignore:offload", "ignore:checkpointing", "ignore:.*BatchNorm layers")
@FEW_OR_MORE
def test_the_same_arithmetic_gives_the_same_bits(examples):
    def check(network):
        assert {name: found for name in EXACT if (found := differing(name, network))} == {}

    for_networks(check, examples)


@pytest.mark.filterwarnings("ignore:offload", "ignore:checkpointing", "ignore:.*BatchNorm layers")
@FEW_OR_MORE
@pytest.mark.parametrize(
    "dtype", [pytest.param(each, marks=[pytest.mark.slow] * bool(at)) for at, each in enumerate(LIMITS)]
)
def test_sums_in_another_order_are_equal_up_to_rounding(dtype, examples):
    def check(network):
        assert {name: off for name in CLOSE if (off := error(name, network, dtype)) > LIMITS[dtype]} == {}

    for_networks(check, examples, divisible=True)


@FEW_OR_MORE
@pytest.mark.parametrize("dtype", LIMITS)
def test_slices_of_ranks_are_equal_up_to_rounding(two_ranks, dtype, examples):
    def check(network):
        assert error_of_ranks(two_ranks, network, dtype) <= LIMITS[dtype]

    for_networks(check, examples, divisible=True)


def test_a_wrong_run_is_detected():
    """Two micro-batches do not equal three; and batch norms, for which nothing is claimed, see only parts."""
    network = Network("images", ("convolution", "batch norm"), (False, False), False, False, False, 8, 1)
    mismatched = Combination((Accumulation(parts_per_batch=2),), 3)
    ours, plain = mismatched.ours(network, torch.float32), mismatched.plain(network, torch.float32)
    assert not all(map(torch.equal, ours.gradients, plain.gradients))
    assert error("accumulation of 2 = whole batch", network, torch.float64) > 1e-3
