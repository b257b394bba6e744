"""Sharding: settings, conflicts with other strategies, and two gloo ranks against one process."""

import pytest
import torch
from torch import nn

import memfit
from memfit import Accumulation, Checkpointing, Offload, OptimizerState, Plan, Precision, Sharding
from memfit.errors import UsageError
from memfit.strategies.read_configuration import configure
from support import sharding_rank_cases

PARAMETERS = 689
CASES = sharding_rank_cases.__name__
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}


@pytest.fixture(scope="module")
def trained(two_ranks):
    """Return each rank's measurements by case."""
    cases = {
        f"{plan}, {dtype}": two_ranks.run("compared", plan, dtype, module=CASES)
        for plan in sharding_rank_cases.PLANS
        for dtype in TOLERANCE
    }
    return [{case: ranks[rank] for case, ranks in cases.items()} for rank in range(2)]


def test_two_ranks_train_as_one_process_with_both_batches(trained):
    assert len(trained[0]) == 22
    for rank in trained:
        for case, found in rank.items():
            tolerance = TOLERANCE[case.rpartition(", ")[2]]
            assert found["gradients"] <= tolerance, case
            assert found["parameters"] <= tolerance, case


def test_ranks_hold_what_the_mode_says(trained):
    def held(case, what):
        return [rank[f"{case}, float32"][what] for rank in trained]

    for case in ("ddp", "zero1", "fsdp2, replicated"):
        assert held(case, "held") == [PARAMETERS] * 2
    assert held("ddp", "state") == [PARAMETERS] * 2
    assert sum(held("zero1", "state")) == PARAMETERS
    assert max(held("zero1", "state")) < 0.51 * PARAMETERS  # whole parameters are dealt out
    for case in ("fsdp2", "fsdp2, checkpointed", "fsdp2, offloaded"):
        assert held(case, "held") == held(case, "state")
        assert sum(held(case, "held")) == PARAMETERS
        assert max(held(case, "held")) < 0.57 * PARAMETERS  # each first dimension is rounded up


def test_fsdp2_keeps_the_names_of_parameters_and_ddp_those_of_its_wrapper(trained):
    names = {case: set(found["names"]) for case, found in trained[0].items()}
    assert names["ddp, float32"] == {f"module.{name}" for name in names["fsdp2, checkpointed, float32"]}


def test_options_reach_pytorch(two_ranks):
    others, _ = two_ranks.run("options", module=CASES)
    assert others["storages"] == 1  # gradients are views of one bucket
    assert others["gathered"] == [0, 0, 3]  # whole blocks after forward with reshard_after_forward=False
    inside_and_result = ["bfloat16", "bfloat16", "float32"]
    shards_and_gradients = ["float32", "float32"]
    assert others["kinds"] == inside_and_result + shards_and_gradients


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("again", "already sharded"),
        ("container", r"did you mean 'layers.*'?"),
        ("indivisible", "does not divide the 2 ranks"),
        ("created before", "create the optimizer after memfit.apply"),
        ("offload of fsdp2", "It would copy gathered parameters"),
    ],
)
def test_what_cannot_be_sharded_is_refused(two_ranks, case, says):
    for refused in two_ranks.run("refusals", module=CASES):
        assert says in refused[case]


def test_a_model_is_sharded_only_in_a_process_group():
    with pytest.raises(UsageError, match="torchrun --nproc-per-node N"):
        memfit.apply(nn.Linear(2, 2), Sharding("fsdp2"))


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ([Sharding("ddp"), OptimizerState(step_in_backward=True)], "before their gradients are reduced"),
        ([Sharding("zero1"), OptimizerState(step_in_backward=True)], "choose fsdp2"),
        ([Sharding("ddp", static_graph=True), Accumulation(parts_per_batch=2)], "under no_sync"),
        ([Sharding("ddp"), Checkpointing(use_reentrant=True)], "Leave out use_reentrant"),
        ([Sharding("fsdp2"), Offload()], "gathered parameters"),
        (
            [Sharding("fsdp2"), Precision("bf16", autocast=False, master_weights=True)],
            "its sharded parameters are the master weights",
        ),
        ([Sharding("fsdp2", param_dtype="bf16"), Precision("bf16")], "both choose"),
        ([Sharding("fsdp2", offload=True), OptimizerState(offload=True)], "so is their state"),
        ([Sharding("fsdp2", offload=True), OptimizerState(step_in_backward=True)], "may be incomplete"),
        ([Sharding("zero1"), OptimizerState(offload=True)], "makes the optimizers of its shards"),
        ([Sharding("zero1"), OptimizerState(bits=8)], r"OptimizerState\(bits=8\)"),
    ],
)
def test_conflicts_with_other_strategies_are_refused(others, says):
    with pytest.raises(UsageError, match=says):
        Plan.of(others)


@pytest.mark.parametrize(
    "others",
    [
        [Sharding("fsdp2"), OptimizerState(step_in_backward=True)],
        [Sharding("ddp"), Accumulation(parts_per_batch=2)],
        [Sharding("fsdp2", param_dtype="bf16"), Precision("fp32")],
        [Sharding("fsdp2"), Checkpointing(), Offload(what="inputs"), Precision("bf16")],
        [Sharding("ddp", static_graph=True), Accumulation(parts_per_batch=1)],
        [Sharding("fsdp2"), OptimizerState(bits=8, offload=True)],
    ],
)
def test_what_works_together_is_accepted(others):
    assert Plan.of(others).sharding == others[0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mode": "zero3"}, "must be one of ddp, zero1, fsdp2"),
        ({"mode": "ddp", "offload": True}, "offload is a setting of fsdp2, not of ddp"),
        ({"mode": "zero1", "modules": "layers"}, "modules is a setting of fsdp2, not of zero1"),
        ({"mode": "fsdp2", "static_graph": True}, "static_graph is a setting of ddp and zero1, not of fsdp2"),
        ({"mode": "fsdp2", "dp_replicate": 0}, "at least 1, not 0"),
        ({"mode": "ddp", "bucket_cap_mb": 0}, "at least 1, not 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, says):
    with pytest.raises(UsageError, match=says):
        Sharding(**settings)


def test_settings_can_be_read_from_a_dict():
    plan = configure({"sharding": {"mode": "fsdp2", "modules": ["layers.*"], "offload": True}}).plan
    assert plan.sharding == Sharding("fsdp2", modules="layers.*", offload=True)
    assert configure({"sharding": "zero1"}).plan.sharding == Sharding("zero1")


def test_without_a_process_group_a_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="none is initialised"):
        memfit.apply(model, [Precision("bf16", autocast=False), Sharding("fsdp2")])
    assert model[0].weight.dtype.is_floating_point
    assert str(model[0].weight.dtype) == "torch.float32"


def test_an_engine_that_shards_asks_for_a_process_group():
    with pytest.raises(UsageError, match="none is initialised"):
        memfit.Engine(nn.Linear(2, 2), Sharding("ddp"), optimizer=torch.optim.SGD)
