"""Settings of strategies: values derived from others, and refusals."""

import re

import pytest
import torch

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.offload import Offload
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.plan import Plan
from memfit.strategies.precision import LossScale, Precision


@pytest.mark.parametrize(
    ("given", "steps", "micro", "whole"),
    [
        ({"parts_per_batch": 4}, 4, None, None),
        ({"micro_batch_size": 8, "global_batch_size": 32}, 4, 8, 32),
        ({"parts_per_batch": 4, "global_batch_size": 32}, 4, 8, 32),
        ({"parts_per_batch": 4, "micro_batch_size": 8}, 4, 8, 32),
        ({"parts_per_batch": 4, "micro_batch_size": 8, "global_batch_size": 32}, 4, 8, 32),
    ],
)
def test_two_sizes_determine_the_third(given, steps, micro, whole):
    found = Accumulation(**given)
    assert found.parts_per_batch == steps
    assert (found.micro_batch_size, found.global_batch_size) == (micro, whole)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Accumulation(parts_per_batch=4, micro_batch_size=8, global_batch_size=33),
            "must be parts_per_batch=4 times micro_batch_size=8",
        ),
        (
            lambda: Accumulation(micro_batch_size=8, global_batch_size=30),
            "global_batch_size must be a multiple of micro_batch_size=8, not 30",
        ),
        (
            lambda: Accumulation(parts_per_batch=4, global_batch_size=30),
            "must be a multiple of parts_per_batch=4",
        ),
        (
            lambda: Accumulation(global_batch_size=30),
            "set micro_batch_size, parts_per_batch or batches_per_update too",
        ),
        (
            lambda: Accumulation(parts_per_batch=0),
            "'parts_per_batch' must be an integer of at least 1, not 0",
        ),
        (lambda: Accumulation(parts_per_batch=2.0), "'parts_per_batch' must be an integer or None, not 2.0"),
        (
            lambda: Accumulation(parts_per_batch=True),
            "'parts_per_batch' must be an integer or None, not True",
        ),
        (
            lambda: Accumulation(parts_per_batch=2, remainder="keep"),
            "must be one of step, carry, drop, not 'keep'",
        ),
        (lambda: LossScale.of("static"), "must be a number, 'dynamic' or a dict"),
        (lambda: LossScale.of({"init_scal": 2.0}), r"no field 'init_scal'. Its fields are .*init_scale"),
        (lambda: LossScale.of(-1.0), "'init_scale' must be finite and more than 0, not -1.0"),
        (lambda: LossScale(backoff_factor=1.0), "between 0 and 1"),
        (lambda: LossScale.of({"init_scale": "a"}), "loss_scale: 'init_scale' must be a number, not 'a'"),
        (lambda: LossScale(growth_interval=2.5), "'growth_interval' must be an integer, not 2.5"),
        (lambda: LossScale("fixed"), "'mode' must be one of dynamic, static, not 'fixed'"),
        (lambda: LossScale.of(float("inf")), "'init_scale' must be finite and more than 0, not inf"),
        (lambda: Precision("bf16", autocast="no"), "precision: 'autocast' must be True or False, not 'no'"),
        (
            lambda: Precision("bf16", autocast=False, master_weights=1),
            "'master_weights' must be True or False, not 1",
        ),
        (lambda: Precision(torch.bfloat16), "'dtype' must be one of bf16, fp16, fp32, not torch.bfloat16"),
        (lambda: Precision([]), r"'dtype' must be one of .*, not \[\]"),
        (lambda: Checkpointing(use_reentrant="no"), "'use_reentrant' must be True or False, not 'no'"),
        (lambda: Checkpointing(5), "'modules' must be a string or a tuple of strings, not 5"),
        (lambda: Checkpointing(("a", 5)), "must be a string or a tuple of strings"),
        (lambda: Checkpointing(every="2"), "'every' must be an integer, not '2'"),
        (lambda: Checkpointing(check=1), "'check' must be True or False, not 1"),
        (lambda: Offload(pin_memory="yes"), "offload: 'pin_memory' must be True or False, not 'yes'"),
        (lambda: Offload(min_bytes=1.5), "'min_bytes' must be an integer, not 1.5"),
        (lambda: Offload(what="all"), "'what' must be one of activations, inputs, not 'all'"),
        (lambda: OptimizerState(bits=8.0), "'bits' must be one of 32, 8, 4, not 8.0"),
        (lambda: OptimizerState(bits=True), "'bits' must be one of 32, 8, 4, not True"),
        (
            lambda: OptimizerState("best"),
            "must be one of foreach, fused, for-loop, not 'best'",
        ),
        (
            lambda: Accumulation(parts_per_batch=2, gradient_dtype=torch.float32),
            "'gradient_dtype' must be a string or None, not torch.float32",
        ),
        (lambda: Accumulation(parts_per_batch="4"), "'parts_per_batch' must be an integer or None, not '4'"),
        (lambda: LossScale.of(10**400), "'init_scale' must be .*not 1000"),
        (lambda: LossScale.of({1: 2, "a": 3}), r"no field '1', 'a'"),
        (lambda: Plan(precision="bf16"), r"plan: 'precision' must be Precision\(...\) or None, not 'bf16'"),
        (lambda: Plan(checkpointing=True), r"'checkpointing' must be Checkpointing\(...\) or None, not True"),
        (lambda: Plan(accumulation=Precision()), r"must be Accumulation\(...\) or None"),
        (lambda: Precision("fp8"), "'dtype' must be one of bf16, fp16, fp32, not 'fp8'"),
        (lambda: Precision("bf16", loss_scale=LossScale()), "loss_scale is for fp16"),
        (lambda: Precision("fp16", autocast=False), "pure fp16 parameters cannot be trained"),
    ],
)
def test_invalid_settings_are_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()


@pytest.mark.parametrize(
    ("region", "said"),
    [
        ({"modules": ["0"], "offlod": True}, "there is no setting 'offlod'. There are modules, save_ops,"),
        ({"save_ops": ["aten.mm"]}, "'modules' is missing"),
        (
            {"modules": ["0"], "recompute": "tensor"},
            "'recompute' must be one of module, tensors, not 'tensor'",
        ),
    ],
)
def test_a_region_that_is_written_wrong_is_refused_by_name(region, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        Checkpointing(regions=(region,))


def test_every_common_form_of_a_loss_scale_is_accepted():
    assert LossScale.of(512) == LossScale("static", 512.0)
    assert LossScale.of("dynamic") == LossScale()
    assert LossScale.of({"init_scale": 512.0, "mode": "dynamic"}) == LossScale(init_scale=512.0)
    assert Precision("fp16").loss_scale == LossScale()
    assert Precision("fp16", loss_scale=512.0).loss_scale.mode == "static"
    assert Precision("bf16").loss_scale is None


def test_settings_have_the_types_that_json_decodes_to():
    assert type(LossScale(init_scale=512).init_scale) is float
    assert Checkpointing(["a", "b"]).modules == ("a", "b")
    assert Offload("a").modules == ("a",)
