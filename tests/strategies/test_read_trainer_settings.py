"""Settings of MMEngine, Lightning, HuggingFace and MindSpore, as their documentation writes them.

tests/support/originals/report.py trains with the originals themselves.
"""

import pytest

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.plan import Plan
from memfit.strategies.precision import LossScale, Precision
from memfit.strategies.read_configuration import configure
from memfit.strategies.sharding import Sharding

FOUR = Accumulation(batches_per_update=4, remainder="carry")
ADAMW = {"type": "AdamW", "lr": 1e-3}


@pytest.mark.parametrize(
    ("given", "plan", "norm"),
    [
        # MMEngine
        ({"optim_wrapper": {"type": "OptimWrapper", "optimizer": ADAMW}}, Plan(), None),
        (
            {
                "optim_wrapper": {
                    "type": "OptimWrapper",
                    "optimizer": ADAMW,
                    "accumulative_counts": 4,
                    "clip_grad": {"max_norm": 35, "norm_type": 2},
                }
            },
            Plan(accumulation=FOUR),
            35.0,
        ),
        ({"optim_wrapper": {"type": "AmpOptimWrapper"}}, Plan(Precision("fp16")), None),
        (
            {
                "optim_wrapper": {
                    "_delete_": True,
                    "type": "AmpOptimWrapper",
                    "loss_scale": 512.0,
                    "clip_grad": None,
                }
            },
            Plan(Precision("fp16", loss_scale=LossScale("static", 512.0))),
            None,
        ),
        (
            {"optim_wrapper": {"type": "AmpOptimWrapper", "dtype": "bfloat16", "accumulative_counts": 4}},
            Plan(Precision("bf16"), accumulation=FOUR),
            None,
        ),
        # MMCV
        (
            {"optimizer_config": {"_delete_": True, "type": "OptimizerHook", "grad_clip": None}},
            Plan(),
            None,
        ),
        (
            {
                "optimizer_config": {
                    "type": "Fp16OptimizerHook",
                    "loss_scale": "dynamic",
                    "distributed": False,
                }
            },
            Plan(Precision("fp16")),
            None,
        ),
        ({"fp16": {"loss_scale": "dynamic"}, "fp16_enabled": True}, Plan(Precision("fp16")), None),
        ({"fp16_enabled": True}, Plan(Precision("fp16")), None),
        ({"fp16_enabled": False, "distributed": True}, Plan(), None),
        ({"distributed": True, "sharding": "ddp"}, Plan(sharding=Sharding("ddp")), None),
        # Lightning
        ({"precision": "16-mixed"}, Plan(Precision("fp16")), None),
        ({"precision": "bf16-mixed", "gradient_clip_val": 0.5}, Plan(Precision("bf16")), 0.5),
        ({"precision": "bf16-true"}, Plan(Precision("bf16", autocast=False)), None),
        ({"precision": "32-true"}, Plan(Precision("fp32")), None),
        ({"gradient_clip_val": 0}, Plan(), None),
        ({"optim_wrapper": {"clip_grad": {"type": "norm", "max_norm": 2}}}, Plan(), 2.0),
        ({"cumulative_iters": 4}, Plan(accumulation=FOUR), None),
        ({"precision": 16, "gradient_clip_algorithm": "norm"}, Plan(Precision("fp16")), None),
        # HuggingFace
        (
            {
                "bf16": True,
                "fp16": False,
                "gradient_accumulation_steps": 4,
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"use_reentrant": False},
                "optim": "adamw_torch_fused",
                "max_grad_norm": 1.0,
                "torch_compile": False,
            },
            Plan(
                Precision("bf16"),
                OptimizerState("fused"),
                Checkpointing(),
                accumulation=Accumulation(batches_per_update=4, remainder="step"),
            ),
            1.0,
        ),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, Plan(), None),
        (
            {"bf16": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            Plan(Precision("bf16")),
            None,
        ),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            Plan(checkpointing=Checkpointing(use_reentrant=True)),
            None,
        ),
        (
            {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            Plan(),
            None,
        ),
        ({"max_grad_norm": 0.0}, Plan(), None),
        ({"optim": "adamw_torch"}, Plan(), None),
        ({"optim": "adamw_bnb_8bit"}, Plan(optimizer_state=OptimizerState(bits=8)), None),
        # Accelerate
        ({"mixed_precision": "bf16", "max_grad_norm": 0.5}, Plan(Precision("bf16")), 0.5),
        ({"mixed_precision": "fp16"}, Plan(Precision("fp16")), None),
        ({"mixed_precision": "no"}, Plan(), None),
        # MindSpore
        ({"accumulate_step": 4, "gradients_mean": True}, Plan(accumulation=FOUR), None),
        ({"gradients_mean": None, "parallel_mode": "stand_alone"}, Plan(), None),
    ],
)
def test_settings_are_read_as_their_origin_means_them(given, plan, norm):
    found = configure(given)
    assert (found.plan, found.max_grad_norm) == (plan, norm)
    assert {setting.split("=")[0].split(".")[0] for setting, _ in found.echo} == set(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optim_wrapper": {"type": "ApexOptimWrapper"}}, "Nearest: AmpOptimWrapper"),
        ({"optim_wrapper": {"accumulative_count": 4}}, "Nearest: accumulative_counts"),
        ({"optim_wrapper": {"dtype": "float16"}}, "'dtype' is not a field of optim_wrapper"),
        ({"optim_wrapper": {"type": "AmpOptimWrapper", "dtype": "int8"}}, "must be one of float16, bfloat16"),
        ({"precision": "64-true"}, "must be one of bf16, fp16, fp32, not '64-true'"),
        ({"precision": "16-true"}, "must be one of bf16, fp16, fp32, not '16-true'"),
        ({"gradient_clip_algorithm": "value"}, "memfit clips gradients only by their norm"),
        ({"gradient_checkpointing_kwargs": {"context_fn": 1}}, "'context_fn' is not a field of"),
        (
            {"accumulate_grad_batches": 2, "iter_size": 2},
            "contradict each other: both set accumulation.remainder",
        ),
        ({"optim_wrapper": {"clip_grad": {"type": "value", "clip_value": 1}}}, "'clip_value' is not a field"),
        ({"optim_wrapper": {"clip_grad": {"type": "value"}}}, "memfit clips by the norm only"),
        ({"optim": "lomo"}, "'lomo' is not an optimizer that memfit reads. Leave it out"),
        ({"gradient_clip_val": 0.5, "max_grad_norm": 1.0}, "contradict each other: both set max_grad_norm"),
        ({"gradient_clip_val": 0, "max_grad_norm": 1.0}, "contradict"),
        ({"gradient_clip_val": False}, "must be a number above 0"),
        ({"precision": "bf16-mixed", "fp16": True}, "contradict"),
        ({"mixed_precision": "no", "bf16": True}, "contradict"),
        ({"mixed_precision": "bf16", "fp16": True}, "contradict"),
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8' is not supported: memfit reads no, bf16, fp16"),
    ],
)
def test_what_cannot_be_read_is_refused(given, words):
    with pytest.raises(UsageError, match=words):
        configure(given)
