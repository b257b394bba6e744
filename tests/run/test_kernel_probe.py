"""Kernels that `memfit doctor --time` times: each runs, on the CPU in place of a card, with a false clock."""

import pytest
import torch

from memfit.devices import find_device
from memfit.records import KernelMeasurement
from memfit.run.kernel_probe import operations_of, seconds_of_run, time_kernels
from memfit.run.kernels_to_time import Kernels
from memfit.timing.saved_kernel_factors import kernel_factors

ON_CPU = Kernels(torch.device("cpu"), (torch.bfloat16,), tf32=True, shrink=4096)


class FalseClock:
    """Says that each run takes as long; runs nothing."""

    def __init__(self, *seconds):
        self.seconds, self.asked = [*seconds], []

    def __call__(self, run, runs):
        self.asked.append(runs)
        return self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]


@pytest.fixture(scope="module")
def timed():
    return time_kernels(ON_CPU, FalseClock(1e-3), warm_up=0)


def test_every_kind_is_timed(timed):
    found, skipped = timed
    factors = kernel_factors(KernelMeasurement("", "", "", "", "", tuple(found)), find_device("H100"))
    both = ("convolution", "layer_norm", "softmax", "batch_norm", "flash")
    precise = {
        "product": ("16 bits", "tf32", "float32"),
        "flash": ("16 bits",),
        "convolution": ("16 bits", "tf32"),
    }
    kinds = {
        *both,
        *(f"{kind}_backward" for kind in both),
        "product",
        "pointwise",
        "reduction",
        "copy",
        "fill",
    }
    kinds |= {"transpose", "gather", "embedding_backward", "optimizer"}
    assert factors.keys() == {
        key
        for kind in kinds
        for key in (
            [f"{kind}, {each}" for each in precise[kind.removesuffix("_backward")]]
            if kind.removesuffix("_backward") in precise
            else [kind]
        )
    }
    assert all(factor.kernels >= 2 for factor in factors.values())
    assert all(
        name.startswith(("attention by EFFICIENT", "attention by CUDNN")) for name in skipped
    )  # not here
    assert len(skipped) == 12


def test_what_runs_is_recorded(timed):
    operations = {each.what: [operation.name for operation in each.operations] for each in timed[0]}
    assert operations["product of 4096 x 4096 x 4096, tf32"] == ["aten.mm.default"]
    assert operations["AdamW of 16 x 4096 x 1024, fused"][-1] == "aten._fused_adamw_.default"
    assert "aten._foreach_addcdiv_.ScalarList" in operations["AdamW of 16 x 4096 x 1024, foreach"]


def test_what_runs_elsewhere_or_is_a_view_is_not_recorded():
    here, elsewhere = torch.ones(2, 2, device="meta"), torch.ones(2, 2)
    operations = operations_of(lambda: (here.t().exp(), elsewhere.sin()), here.device)
    assert [each.name for each in operations] == ["aten.exp.default"]


def test_after_some_seconds_nothing_more_is_timed():
    found, skipped = time_kernels(ON_CPU, FalseClock(1e-3), warm_up=0, most=-1)
    assert not found
    assert skipped[0] == "product of 4096 x 4096 x 4096, bfloat16: not reached in -1 s"


def test_short_kernels_run_often_and_long_ones_once():
    slow, fast = FalseClock(0.5, 0.2, 0.9, 0.3, 0.1, 0.4), FalseClock(1e-6)
    assert seconds_of_run(None, slow) == 0.3  # the median of those after the first
    assert slow.asked == [3, 1, 1, 1, 1, 1]
    seconds_of_run(None, fast)
    assert fast.asked == [3, *[20] * 5]
