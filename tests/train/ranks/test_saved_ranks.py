"""Runs of several ranks, saved and resumed: on as many ranks bit for bit, and on others."""

from functools import partial

import pytest
import torch

import memfit
from support import saved_rank_cases

pytestmark = pytest.mark.process
MODES = ["ddp", "zero1", "fsdp2"]
EPOCHS = 2
"""Of 48 samples: six updates on two ranks with batches of 4."""


@pytest.fixture
def two(two_ranks):
    """Return ``two(case, *arguments)``, which runs a case on two ranks."""
    return partial(two_ranks.run, module="support.saved_rank_cases")


@pytest.fixture
def four(four_ranks):
    """Return the same for four ranks."""
    return partial(four_ranks.run, module="support.saved_rank_cases")


def assert_equal(one, other, names=None):
    """Assert that two runs' states are equal bit for bit; of each entry, or of these."""
    for name in names or one:
        if name == "tensors":
            assert one[name].keys() == other[name].keys()
            different = [key for key, each in one[name].items() if not torch.equal(each, other[name][key])]
            assert not different
        elif name == "forwards":
            assert torch.equal(one[name], other[name])
        elif name == "random":
            assert one[name][:2] == other[name][:2]
            assert torch.equal(one[name][2], other[name][2])
        else:
            assert one[name] == other[name], name


@pytest.mark.parametrize(
    "mode", [pytest.param(each, marks=[pytest.mark.slow] * (each != "zero1")) for each in MODES]
)
def test_a_run_resumes_bit_for_bit_inside_an_epoch_and_at_its_end(two, mode, tmp_path):
    plan = [memfit.Sharding(mode), memfit.Precision("fp16"), memfit.Accumulation(parts_per_batch=2)]
    whole = two("uninterrupted", plan, EPOCHS)
    assert not torch.equal(whole[0]["forwards"], torch.zeros(2))
    for at in (4, 6):
        two("saved", plan, tmp_path / "run", at, EPOCHS)
        resumed = two("resumed", plan, tmp_path / "run", EPOCHS)
        for rank in range(2):
            assert resumed[rank][0]["counters"][3] == at
            assert_equal(whole[rank], resumed[rank][1])
    assert whole[0]["random"][0] != whole[1]["random"][0]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_bit_for_bit_inside_a_window(two, mode, tmp_path):
    plan = [memfit.Sharding(mode), memfit.Accumulation(batches_per_update=3)]
    for at in (0, 3, 5):
        for whole, resumed in two("resumed_by_hand", plan, tmp_path / "run", at):
            assert_equal(whole, resumed)


def union(states):
    """Return the tensors of all ranks: with zero1, each has the optimizer's state of some parameters."""
    return {name: each for state in reversed(states) for name, each in state["tensors"].items()}


def assert_same_tensors(before, after):
    """Assert that model and optimizer are equal; buffers are compared with rank 0's."""
    one, other = union(before), union(after)
    assert one.keys() == other.keys()
    assert [name for name, each in one.items() if not torch.equal(each, other[name])] == []


def order(epoch=0):
    return torch.randperm(48, generator=torch.Generator().manual_seed(epoch)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "then"), [("ddp", "fsdp2"), ("zero1", "zero1"), ("fsdp2", "fsdp2")])
def test_two_ranks_continue_as_four_and_as_one_with_the_samples_that_are_left(
    two, four, mode, then, tmp_path
):
    plan, other = [memfit.Sharding(mode)], [memfit.Sharding(then)]
    before = two("saved", plan, tmp_path / "run", 4, EPOCHS)
    after = four("resumed", other, tmp_path / "run", 1)
    assert_same_tensors(before, [state for state, *_ in after])
    assert after[0][0]["counters"][1:4] == before[0]["counters"][1:4]
    left = [sample for _, _, seen in after for sample in seen[-4:]]
    assert sorted(left) == sorted(order()[32:])
    alone, ended, seen = saved_rank_cases.resumed(0, 1, [], tmp_path / "run", 1)
    assert_same_tensors(before, [alone])
    assert seen[-16:] == order()[32:]
    assert ended["counters"][3] == 4 + 4
    assert alone["random"][:2] == before[0]["random"][:2]


@pytest.mark.parametrize("mode", [pytest.param("ddp", marks=pytest.mark.slow), *MODES[1:]])
def test_four_ranks_continue_as_two(two, four, mode, tmp_path):
    plan = [memfit.Sharding(mode)]
    before = four("saved", plan, tmp_path / "run", 2, EPOCHS)
    after = two("resumed", plan, tmp_path / "run", EPOCHS)
    assert_same_tensors(before, [state for state, *_ in after])
    for rank in range(2):
        assert after[rank][0]["random"][:2] == before[rank]["random"][:2]
    assert after[0][1]["counters"][3] == 2 + 2 + 6


@pytest.mark.parametrize("mode", MODES)
def test_a_file_of_one_process_continues_on_two_ranks(two, mode, tmp_path):
    before = saved_rank_cases.saved(0, 1, [], tmp_path / "run", 6, EPOCHS)
    assert not (tmp_path / "run.ranks").exists()
    after = two("resumed", [memfit.Sharding(mode)], tmp_path / "run", EPOCHS)
    assert_same_tensors([before], [state for state, *_ in after])
    assert after[0][0]["random"][:2] == before["random"][:2]
    assert after[1][0]["random"][:2] != before["random"][:2]
    assert sorted([*after[0][2][24:48], *after[1][2][24:48]]) == list(range(48))


def test_new_ranks_draw_the_same_numbers_each_time(two, four, tmp_path):
    plan = [memfit.Sharding("ddp")]
    two("saved", plan, tmp_path / "run", 4, EPOCHS)
    first, second = (four("resumed", plan, tmp_path / "run", 1) for _ in range(2))
    for rank in range(4):
        assert_equal(first[rank][0], second[rank][0])
    assert len({before["random"][0] for before, *_ in first}) == 4


def test_other_ranks_refuse_what_they_cannot_continue(two, tmp_path):
    """Inside a window, and after samples that are no whole number of batches."""
    plan = [memfit.Sharding("ddp"), memfit.Accumulation(batches_per_update=3)]
    two("saved_by_hand", plan, tmp_path / "window", 5)
    error, before, after = saved_rank_cases.refused(0, 1, [], tmp_path / "window")
    assert "saved inside an accumulation window, on 2 ranks, but this job has 1" in error
    assert_equal(before, after)
    two("saved", plan[:1], tmp_path / "run", 4, EPOCHS)
    error, *_ = saved_rank_cases.refused(0, 1, [], tmp_path / "run", batch_size=5)
    assert "The 32 samples read so far are no whole number of batches of 5 on 1 rank." in error
    assert "Choose a batch_size that divides 32" in error


def test_a_file_that_is_damaged_for_one_rank_is_loaded_by_none(two, tmp_path):
    plan = [memfit.Sharding("fsdp2")]
    two("saved", plan, tmp_path / "run", 4, EPOCHS)
    (folder,) = (tmp_path / "run.ranks").iterdir()
    (folder / "rank-1").write_bytes(b"nonsense")
    results = two("refused", plan, tmp_path / "run")
    assert results[0][0].startswith("RankFailedError: Rank 1 failed in engine.load")
    assert results[1][0].startswith(f"FileFormatError: Cannot resume from {folder / 'rank-1'}")
    for _, before, after in results:
        assert_equal(before, after)


def test_a_run_that_an_exception_ends_is_not_saved_again_by_the_ranks_that_are_left(two, tmp_path):
    """Saving takes all ranks: one alone would wait for the others."""
    plan = [memfit.Sharding("ddp")]
    assert two("interrupted", plan, tmp_path / "run") == [("RankFailedError", 2), ("ValueError", 2)]
