"""Settings under current and legacy names: the field that each sets; none is ignored silently."""

from dataclasses import fields

import hypothesis
import msgspec
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import memfit
from memfit.errors import MemfitError, UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.offload import Offload
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.plan import Plan
from memfit.strategies.precision import LossScale, Precision
from memfit.strategies.read_configuration import ALIASES, READERS, TABLES, Configuration, configure
from memfit.strategies.translate_other_frameworks_settings import _OF_CELLS, HOOKS

FP16 = Precision("fp16", loss_scale=LossScale("static", 512.0))
BACKBONE = Checkpointing(blocks="backbone")
CUMULATIVE = Accumulation(batches_per_update=4, remainder="carry")
DYNAMIC = Precision("fp16", loss_scale=LossScale("dynamic", 512.0))


def hook(kind, **settings):
    return {"optimizer_config": {"type": kind, **settings}}


@pytest.mark.parametrize(
    ("given", "plan"),
    [
        ({}, Plan()),
        ({"precision": "bf16"}, Plan(Precision("bf16"))),
        (
            {"precision": {"dtype": "bf16", "autocast": False}, "master_weights": True},
            Plan(Precision("bf16", autocast=False, master_weights=True)),
        ),
        ({"precision": "fp16", "loss_scale": "dynamic"}, Plan(Precision("fp16", loss_scale=LossScale()))),
        ({"precision": "fp16", "loss_scale": {"init_scale": 512, "mode": "dynamic"}}, Plan(DYNAMIC)),
        ({"fp16": True}, Plan(Precision("fp16"))),
        ({"bf16": True, "fp16": False}, Plan(Precision("bf16"))),
        # Frameworks' names for the batches of an update, and what each does with those that remain
        *(
            ({name: 4}, Plan(accumulation=Accumulation(batches_per_update=4, remainder=remainder)))
            for name, remainder in (
                ("gradient_accumulation_steps", "step"),
                ("accumulate_grad_batches", "step"),
                ("accumulative_counts", "carry"),
                ("mini_steps", "carry"),
                ("grad_accumulation_step", "carry"),
                ("accumulate_step", "carry"),
                ("iter_size", "carry"),
                ("batches_per_update", None),
            )
        ),
        (
            {"mini_steps": 4, "remainder": "drop"},
            Plan(accumulation=Accumulation(batches_per_update=4, remainder="drop")),
        ),
        ({"parts_per_batch": 4}, Plan(accumulation=Accumulation(parts_per_batch=4))),
        (
            {
                "micro_batch_size": 8,
                "global_batch_size": 32,
                "batches_per_update": 4,
                "remainder": "drop",
                "gradient_dtype": "float64",
            },
            Plan(
                accumulation=Accumulation(
                    batches_per_update=4,
                    micro_batch_size=8,
                    global_batch_size=32,
                    remainder="drop",
                    gradient_dtype="float64",
                )
            ),
        ),
        # MMCV
        ({"fp16": {"loss_scale": 512.0}}, Plan(FP16)),
        ({"fp16": {}}, Plan(FP16)),
        ({"fp16": {"loss_scale": "dynamic"}}, Plan(Precision("fp16"))),
        ({"fp16": {"loss_scale": {"init_scale": 512.0, "mode": "dynamic"}}}, Plan(DYNAMIC)),
        ({"fp16": None, "optimizer_config": {}}, Plan()),
        (hook("Fp16OptimizerHook"), Plan(FP16)),
        (
            hook("GradientCumulativeOptimizerHook", cumulative_iters=4),
            Plan(accumulation=CUMULATIVE),
        ),
        (
            hook("GradientCumulativeFp16OptimizerHook", cumulative_iters=4, loss_scale="dynamic"),
            Plan(Precision("fp16"), accumulation=CUMULATIVE),
        ),
        (
            {"fp16": {"loss_scale": "dynamic"}}
            | hook("GradientCumulativeFp16OptimizerHook", cumulative_iters=4),
            Plan(Precision("fp16"), accumulation=CUMULATIVE),
        ),
        ({"with_cp": True}, Plan(checkpointing=BACKBONE)),
        (
            {
                "model": {
                    "type": "RetinaNet",
                    "backbone": {"depth": 50, "with_cp": True},
                    "necks": [{"with_cp": False}],
                }
            },
            Plan(checkpointing=BACKBONE),
        ),
        ({"backbone": {"stages": [{"with_cp": True}]}}, Plan(checkpointing=BACKBONE)),
        ({"model": {"type": "RetinaNet"}, "with_cp": False}, Plan()),
        # The other strategies
        ({"activation_checkpointing": True}, Plan(checkpointing=Checkpointing())),
        ({"checkpointing": {}}, Plan(checkpointing=Checkpointing())),
        ({"gradient_checkpointing": "layers.*"}, Plan(checkpointing=Checkpointing("layers.*"))),
        (
            {"checkpointing": ["a", "b"], "with_cp": True},
            Plan(checkpointing=Checkpointing(("a", "b"), blocks="backbone")),
        ),
        ({"offload": True}, Plan(offload=Offload())),
        (
            {"offload": {"modules": ["a"], "what": "inputs"}, "with_cp": True},
            Plan(offload=Offload("a", "inputs"), checkpointing=BACKBONE),
        ),
        ({"optimizer_state": "fused"}, Plan(optimizer_state=OptimizerState("fused"))),
        ({"optimizer_state": {"bits": 8}}, Plan(optimizer_state=OptimizerState(bits=8))),
        ({"step_in_backward": True}, Plan(optimizer_state=OptimizerState(step_in_backward=True))),
    ],
)
def test_every_name_sets_its_field(given, plan):
    found = configure(given)
    assert found.plan == plan
    assert {setting.split("=")[0].split(".")[0] for setting, _ in found.echo} == set(given)
    assert msgspec.json.decode(msgspec.json.encode(found.plan), type=Plan) == plan


@pytest.mark.parametrize(
    ("given", "norm"),
    [
        ({"max_grad_norm": 1}, 1.0),
        ({"max_grad_norm": float("inf")}, float("inf")),  # the norm is reported, and nothing is clipped
        ({"max_grad_norm": None}, None),
        ({"optimizer_config": {"grad_clip": {"max_norm": 35, "norm_type": 2}}}, 35.0),
        ({"optimizer_config": {"grad_clip": None}}, None),
        ({"optimizer_config": {"grad_clip": {"max_norm": 35}}, "max_grad_norm": 35.0}, 35.0),
    ],
)
def test_clipping_is_not_a_strategy_but_is_configured_too(given, norm):
    assert configure(given).max_grad_norm == norm


def test_every_setting_is_echoed_with_the_field_it_became():
    given = {"fp16": {}, "optimizer_config": {"grad_clip": {"max_norm": 35}}, "mini_steps": 4, "bf16": False}
    assert str(configure(given)).splitlines() == [
        "fp16                                         ->  precision.dtype='fp16'",
        "fp16                                         ->  precision.loss_scale=512.0 (MMCV's default)",
        "optimizer_config.grad_clip={'max_norm': 35}  ->  max_grad_norm=35",
        f"{'mini_steps=4':43}  ->  accumulation.batches_per_update=4 ({_OF_CELLS})",
        f"{'mini_steps=4':43}  ->  accumulation.remainder='carry' (the way of MindSpore)",
        "bf16=False                                   ->  nothing to set: this is memfit's default",
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"precison": "bf16"},
            "'precison' is not a setting of memory or precision that memfit reads. Nearest: precision",
        ),
        ({"gradient_accumulation_step": 4}, "Nearest: gradient_accumulation_steps"),
        (
            {"accumulation": 4},
            "does not say which field it sets. .* parts_per_batch=4 or batches_per_update=4",
        ),
        ({"zzz": 1}, "Known: precision, .*mem_param"),
        ({"precision": {"dtyp": "bf16"}}, "'dtyp' is not a field of precision. Nearest: dtype"),
        (hook("GradientCumulativOptimizerHook"), "Nearest: GradientCumulativeOptimizerHook"),
        (
            {"optimizer_config": {"cumulative_iters": 4}},
            "is a setting of another hook: add type='GradientCumulativeOptimizerHook' or",
        ),
        (
            {"optimizer_config": {"grad_clip": {"norm": 3}}},
            "'norm' is not a field of optimizer_config.grad_clip",
        ),
        ({"fp16": {"loss_scal": 1.0}}, "Nearest: loss_scale"),
        ({"mem_param": {"optimise_train": True}}, "Nearest: optimize_train"),
        ({"arena": {"exclud": "fc1"}}, "'exclud' is not a field of arena. Nearest: exclude"),
        ({"aren": True}, "Nearest: arena"),
        ({"arena": "fc1"}, "does not say which field it sets"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(given, words):
    with pytest.raises(UsageError, match=words):
        configure(given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mini_steps": 4, "accumulative_counts": 2}, "mini_steps=4 and accumulative_counts=2 contradict"),
        ({"precision": "bf16", "fp16": True}, "precision='bf16' and fp16=True contradict"),
        ({"precision": "fp16", "fp16": False}, "fp16=False and precision='fp16' contradict"),
        (
            {"fp16": {"loss_scale": 512.0}, "loss_scale": "dynamic"},
            "contradict each other: both set precision.loss",
        ),
        ({"fp16": {"loss_scale": 128.0}} | hook("Fp16OptimizerHook", loss_scale=512.0), "contradict"),
        ({"with_cp": False, "activation_checkpointing": "layers.*"}, "with_cp=False and activation_check"),
        ({"checkpointing": False, "with_cp": True}, "checkpointing=False and with_cp=True contradict"),
        ({"max_grad_norm": 1.0, "optimizer_config": {"grad_clip": {"max_norm": 35}}}, "contradict"),
        ({"distributed": False, "sharding": "ddp"}, "distributed=False and sharding='ddp' contradict"),
        (
            hook("Fp16OptimizerHook", distributed=False) | {"sharding": "ddp"},
            "distributed=False and sharding",
        ),
        ({"parallel_mode": "stand_alone", "sharding": "ddp"}, "'stand_alone' and sharding='ddp' contradict"),
        ({"fp16_enabled": True, "bf16": True}, "fp16_enabled=True and bf16=True contradict"),
        (
            {"global_batch_size": 30, "micro_batch_size": 8},
            "not 30. The configuration sets global_batch",
        ),
        ({"mem_param": {"optimize_test": False}, "optimize_test": True}, "both set arena.optimize_test"),
        ({"mem_param": {"exclude_blob": "a"}, "arena": {"exclude": ["b"]}}, "both set arena.exclude"),
        ({"arena": False, "mem_param": {}}, "arena=False and mem_param contradict"),
        ({"step_in_backward": True, "mini_steps": 2}, "every micro-batch would cause its own update"),
    ],
)
def test_contradicting_names_are_refused(given, words):
    with pytest.raises(UsageError, match=words):
        configure(given)


def test_the_same_value_twice_is_not_a_contradiction():
    twice = {
        "fp16": {"loss_scale": 512},
        "loss_scale": {"mode": "static", "init_scale": 512.0},
        "precision": "fp16",
    }
    assert configure(twice).plan == Plan(FP16)
    arenas = {"mem_param": {"exclude_blob": ["a"]}, "arena": {"exclude": "a"}}
    assert configure(arenas).arena.exclude == ("a",)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mini_steps": 0}, "must be an integer of at least 1, not 0. The configuration sets mini_steps=0"),
        ({"mini_steps": True}, "must be an integer"),
        ({"accumulate_grad_batches": {"0": 4, "10": 8}}, "must be an integer"),
        ({"precision": "fp8"}, "must be one of bf16, fp16, fp32, not 'fp8'. The .* sets precision='fp8'"),
        ({"precision": ["bf16"]}, "must be one of bf16"),
        ({"optimizer_state": {"bits": 8.0}}, "'bits' must be .*not 8.0.*sets optimizer_state.bits=8.0"),
        ({"precision": {"autocast": "yes"}}, "must be True or False"),
        ({"fp16": {"loss_scale": {"init_scale": "x"}}}, "'init_scale' must be a number, not 'x'"),
        ({"fp16": {"loss_scale": -1.0}}, "'init_scale' must be finite and more than 0, not -1.0"),
        ({"fp16": "O1"}, "fp16 must be true, false or a dict .*, not 'O1'"),
        ({"bf16": 1}, "bf16 must be true or false, not 1"),
        ({"with_cp": "yes"}, "with_cp must be true or false, not 'yes'"),
        ({"model": {"with_cp": 1}}, "model.with_cp must be true or false, not 1"),
        ({"model": 3}, "must be the dict of a model"),
        ({"loss_scale": 512.0}, "loss_scale is for fp16"),
        ({"max_grad_norm": -1}, "must be a number above 0"),
        ({"max_grad_norm": True}, "must be a number above 0"),
        ({"max_grad_norm": float("nan")}, "must be a number above 0"),
        ({"optimizer_config": [1]}, "optimizer_config must be a dict"),
        ({"optimizer_config": {"grad_clip": {}}}, "needs max_norm"),
        ({"optimizer_config": {"grad_clip": {"max_norm": 1, "norm_type": 1}}}, "only by their 2-norm"),
        (
            hook("Fp16OptimizerHook", coalesce=True),
            "how MMCV exchanges gradients between ranks. Leave it out: memfit.Sharding",
        ),
        (hook("Fp16OptimizerHook", bucket_size_mb=25), "Leave it out: memfit.Sharding has bucket_cap_mb"),
        (hook("OptimizerHook", detect_anomalous_params=True), "memfit.Sharding.find_unused_parameters=True"),
        ({"model": {"neck": {"with_cp": True}}}, r"model.neck.with_cp=True.*checkpointing=\['neck\.\*'\]"),
        ({"model": {"necks": [{"with_cp": True}]}}, r"model.necks\[0\].with_cp=True.*\['necks\.\*'\]"),
        ({"gradients_mean": False}, "gradients_mean=False sums .* multiply the loss by their number"),
        ({"parallel_mode": "data_parallel"}, r"sharding='ddp' .*\(memfit.Sharding\)"),
        ({"parallel_mode": "auto_parallel"}, "is not read by memfit"),
        ({"mem_param": {"optimize_train": "yes"}}, "must be true or false"),
        ({"mem_param": {"exclude_blob": [1]}}, "must be the name of a blob, or a list"),
        ({"arena": {"exclude": ["a", 1]}}, "'exclude' must be a tuple of strings.*sets arena.exclude"),
        ({"optimize_train": "yes"}, "'optimize_train' must be True or False, not 'yes'"),
        ({"mem_param": 3}, "must be a dict, or a network in Caffe"),
        ({1: 2}, "the key 1 must be a string"),
        ({"precision": object()}, "a list or a dict, not object"),
        ({"precision": torch.ones(2)}, "a list or a dict, not Tensor"),
        ({"mini_steps": 10**5000}, "is an integer of 16610 bits"),
        (3, "Cannot read settings from 3"),
        ("no-such-file.toml", "No such file"),
        ("\0", "null byte"),
    ],
)
def test_invalid_values_are_refused_under_the_name_given(given, words):
    with pytest.raises(UsageError, match=words):
        configure(given)


def test_a_recursive_dict_is_refused():
    model = {}
    model["neck"] = model
    with pytest.raises(UsageError, match="more than 32 levels deep"):
        configure({"model": model})


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["bf16", "dynamic", "x", *HOOKS]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "loss_scale", "grad_clip", "max_norm", "with_cp", "modules"]), inner
        )
    ),
    max_leaves=6,
)


@hypothesis.settings(max_examples=300, deadline=None)
@hypothesis.given(st.dictionaries(st.sampled_from([*ALIASES, *TABLES, *READERS]), VALUES, max_size=3))
def test_any_values_under_known_names_give_a_plan_or_a_memfit_error(given):
    try:
        found = configure(given)
    except MemfitError:
        return
    assert isinstance(found.plan, Plan)
    assert str(found).count("\n") + 1 >= len(found.echo)


def test_every_alias_is_the_name_of_a_field():
    known = set(TABLES) | {"max_grad_norm"}
    known |= {f"{name}.{field.name}" for name, kind in TABLES.items() for field in fields(kind)}
    assert set(ALIASES.values()) <= known
    assert not (ALIASES.keys() | TABLES.keys()) & READERS.keys()


def engine(plan, **options):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return memfit.Engine(model, plan, optimizer=optimizer, loss=lambda model, x: model(x).sum(), **options)


@pytest.mark.parametrize("wrap", [dict, configure])
def test_the_engine_accepts_a_configuration_as_its_plan(wrap):
    run = engine(wrap({"parts_per_batch": 2, "max_grad_norm": 0.5}))
    before = run.model.weight.detach().clone()
    result = run.step(torch.ones(4, 4))
    assert result.micro_step == 2
    assert result.grad_norm > 0.5
    assert (run.model.weight - before).norm() <= 0.5


def test_an_overridden_default_is_not_echoed():
    assert [effect for _, effect in configure({"fp16": {"loss_scale": "dynamic"}}).echo] == [
        "precision.dtype='fp16'",
        "precision.loss_scale='dynamic'",
    ]


def test_clipping_set_twice_must_agree():
    assert engine({"max_grad_norm": 0.5}, max_grad_norm=0.5).step(torch.ones(4, 4)).grad_norm > 0.5
    with pytest.raises(UsageError, match=r"max_grad_norm=1\.0.*0\.5"):
        engine({"max_grad_norm": 0.5}, max_grad_norm=1.0)


def test_apply_takes_a_configuration_and_refuses_settings_of_the_loop():
    model = nn.Linear(2, 2)
    memfit.apply(model, {"precision": {"dtype": "bf16", "autocast": False}})
    assert model.weight.dtype == torch.bfloat16
    with pytest.raises(UsageError, match="cannot use max_grad_norm, which applies to the training loop"):
        memfit.apply(nn.Linear(2, 2), {"max_grad_norm": 1.0})


@pytest.mark.parametrize("value", [3, [3], object(), [Precision("bf16"), "x"]])
def test_a_value_that_is_not_a_plan_is_refused(value):
    with pytest.raises(UsageError, match="A plan can contain only"):
        Configuration.of(value)


def test_other_forms_of_a_plan_pass_through():
    plan = Plan(Precision("bf16"))
    assert Configuration.of(plan).plan is plan
    assert Configuration.of([Precision("bf16")]).plan == plan
    assert Configuration.of(None).plan == Plan()
