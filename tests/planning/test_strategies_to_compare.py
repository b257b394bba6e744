"""The rows of a comparison, and how they are adapted to a script."""

import pytest

from memfit.devices import find_device
from memfit.planning.strategies_to_compare import strategies_to_compare, with_dimension_of_samples
from memfit.records import (
    Change,
    LoaderBatchSize,
    ShardingCalls,
    StepInputs,
    StepOperations,
    equality_of,
    traits_of_strategy,
)
from memfit.strategies.read_configuration import configure
from support.traces import trace_of

FSDP2 = ShardingCalls("FSDP2", "fully_shard", ("train.py:8",), ({"reshard_after_forward": False},))


def test_precision_slices_and_checkpointing_are_compared_in_all_eight_combinations():
    three = {"precision", "batch_slices", "checkpointing"}
    chosen = [{}, {"dtype": "bf16"}, {"count": 2}]
    found = [
        frozenset(one.change.plan)
        for one in strategies_to_compare(1)
        if one.change.plan.keys() <= three and all(each in chosen for each in one.change.plan.values())
    ]
    assert len(found) == len(set(found)) == 8


def test_no_row_is_there_twice_and_every_row_is_a_plan():
    rows = list(strategies_to_compare(8))
    assert len({one.name for one in rows}) == len(rows)
    assert all(one.change not in [each.change for each in rows[:number]] for number, one in enumerate(rows))
    assert all(configure(one.change.plan).plan.strategies() for one in rows)
    assert not any("," in one.name for one in rows)  # --rows has commas between names


@pytest.mark.parametrize(("gpu", "name"), [("A100", "bf16"), ("V100", "fp16"), ("GTX 1660", "fp16")])
def test_what_is_combined_is_a_precision_for_which_the_card_has_matrix_units(gpu, name):
    rows = list(strategies_to_compare(1, card=find_device(gpu)))
    combined = [one for one in rows if one.group == "combinations" and "precision" in one.change.plan]
    assert {one.name.partition(" + ")[0] for one in combined} == {name}
    assert {one.change.plan["precision"]["dtype"] for one in combined} == {name}


def test_a_script_with_a_sharding_of_its_own_is_compared_without_what_contradicts_it():
    names = [one.name for one in strategies_to_compare(8, distributed=True, own=[FSDP2])]
    assert "offload" not in names
    assert not [one for one in names if "step in backward" in one or one.startswith(("DDP", "ZeRO"))]


@pytest.mark.parametrize(
    ("shapes", "dim"), [([(), (35, 20)], 1), ([(20, 35)], 0), ([(20, 20)], 0), ([(7,)], 0)]
)
def test_slices_divide_the_dimension_that_has_as_many_entries_as_a_batch_has_samples(shapes, dim):
    trace = trace_of([], loader=LoaderBatchSize(20, "train.py:3"))
    step = StepOperations((), (), (), (), samples=StepInputs(shapes=tuple(shapes)))
    adapted = with_dimension_of_samples(Change({"batch_slices": {"count": 2}}), trace, step)
    assert adapted.plan["batch_slices"].get("dim", 0) == dim
    assert with_dimension_of_samples(Change({"offload": {}}), trace, step).plan == {"offload": {}}


def test_only_a_precision_that_casts_parameters_acts_before_a_model_is_called():
    assert traits_of_strategy("precision").is_late
    assert not Change({"precision": {"autocast": False}, "checkpointing": {}}).is_late
    assert {str(equality_of(one.change)) for one in strategies_to_compare(1)} == {
        *("bit for bit", "up to rounding", "other numerics")
    }
