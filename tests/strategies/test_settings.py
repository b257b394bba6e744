"""Settings of strategies: what follows from what, and what cannot be."""

import pytest

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.precision import LossScale, Precision


@pytest.mark.parametrize(
    ("given", "steps", "micro", "whole"),
    [
        ({"gradient_accumulation_steps": 4}, 4, None, None),
        ({"micro_batch_size": 8, "global_batch_size": 32}, 4, 8, 32),
        ({"gradient_accumulation_steps": 4, "global_batch_size": 32}, 4, 8, 32),
        ({"gradient_accumulation_steps": 4, "micro_batch_size": 8}, 4, 8, 32),
        ({"gradient_accumulation_steps": 4, "micro_batch_size": 8, "global_batch_size": 32}, 4, 8, 32),
    ],
)
def test_two_sizes_determine_the_third(given, steps, micro, whole):
    found = Accumulation(**given)
    assert found.gradient_accumulation_steps == steps
    assert (found.micro_batch_size, found.global_batch_size) == (micro, whole)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Accumulation(4, 8, 33), "is not micro_batch_size=8 times gradient_accumulation_steps=4"),
        (lambda: Accumulation(micro_batch_size=8, global_batch_size=30), "times a whole number"),
        (lambda: Accumulation(4, global_batch_size=30), "not a multiple of gradient_accumulation_steps=4"),
        (lambda: Accumulation(global_batch_size=30), "needs micro_batch_size or gradient_accumulation_steps"),
        (lambda: Accumulation(0), "gradient_accumulation_steps=0 must be"),
        (lambda: Accumulation(2.0), "gradient_accumulation_steps=2.0 must be"),
        (lambda: Accumulation(True), "gradient_accumulation_steps=True must be"),
        (lambda: Accumulation(2, partial_window="keep"), "'keep' is none of flush, carry, drop"),
        (lambda: LossScale.of("static"), "neither a number, 'dynamic' nor a dict"),
        (lambda: LossScale.of({"init_scal": 2.0}), r"no \['init_scal'\]; it has .*init_scale"),
        (lambda: LossScale.of(-1.0), "init_scale=-1.0 must be more than 0"),
        (lambda: LossScale(backoff_factor=1.0), "between 0 and 1"),
        (lambda: Precision("fp8"), "'fp8' is none of bf16, fp16, fp32"),
        (lambda: Precision("bf16", loss_scale=LossScale()), "loss_scale is for fp16"),
        (lambda: Precision("fp16", autocast=False), "fp16 parameters cannot be trained by themselves"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_loss_scales_as_people_write_them():
    assert LossScale.of(512) == LossScale("static", 512.0)
    assert LossScale.of("dynamic") == LossScale()
    assert LossScale.of({"init_scale": 512.0, "mode": "dynamic"}) == LossScale(init_scale=512.0)
    assert Precision("fp16").loss_scale == LossScale()
    assert Precision("fp16", loss_scale=512.0).loss_scale.mode == "static"
    assert Precision("bf16").loss_scale is None
