"""Two and four gloo ranks against one process that trains on the concatenated data.

The rows are those of "Bugs that other frameworks shipped" in docs/training.md.
"""

import pytest
import torch

import memfit
from support import rank_cases

TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
MODES = ["ddp", "zero1", "fsdp2"]


def assert_alike(ranks, alone, dtype="float32"):
    for rank in ranks:
        for mine, theirs in [
            (rank["parameters"], alone["parameters"]),
            *zip(rank["gradients"], alone["gradients"], strict=True),
        ]:
            assert mine.keys() == theirs.keys()
            for name in mine:
                assert (mine[name] - theirs[name]).abs().max() <= TOLERANCE[dtype], name
        assert rank["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE[dtype])
        assert rank["losses"] == ranks[0]["losses"]
        assert rank["norms"] == ranks[0]["norms"]


def steps(pool, mode, dtype, loss, micro_batch_size):
    """Train on a pool and alone, with clipped gradients; return what both found."""
    sizes = [[3, 5, 2, 4][: pool.ranks], [6, 1, 1, 2][: pool.ranks]] * 2
    plan = [memfit.Sharding(mode), memfit.Accumulation(micro_batch_size=micro_batch_size)]
    options = {"max_grad_norm": 0.5}
    ranks = pool.run("steps", plan, sizes, dtype, loss, options)
    return ranks, rank_cases.steps(0, 1, None, sizes, dtype, loss, options)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mode", MODES)
def test_rows_01_and_13_ranks_with_different_numbers_of_tokens_clip_once(two_ranks, mode, dtype):
    ranks, alone = steps(two_ranks, mode, dtype, "token_loss", 2)
    assert_alike(ranks, alone, dtype)
    assert min(alone["norms"]) > 0.5  # each update was clipped
    for rank in ranks:
        assert rank["norms"] == pytest.approx(alone["norms"], abs=TOLERANCE[dtype])


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_weighs_by_its_samples(two_ranks, mode):
    assert_alike(*steps(two_ranks, mode, "float32", "mean_loss", 10))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_four_ranks_train_as_one(four_ranks, mode):
    assert_alike(*steps(four_ranks, mode, "float64", "token_loss", 2), "float64")


@pytest.mark.parametrize("loop", ["fit", "windows", "backward"])
@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_rows_04_and_31_ranks_with_different_numbers_of_micro_batches(two_ranks, mode, loop):
    counts = [[3, 3], [3, 2], [2, 0]]
    plan = [memfit.Sharding(mode), memfit.Accumulation(batches_per_update=3)]
    ranks = two_ranks.run("in_windows", plan, counts, loop)
    alone = rank_cases.in_windows(0, 1, None, counts, loop)
    assert_alike(ranks, alone)
    assert [rank["steps"][-1] for rank in ranks] == [(8, 3, 0), (5, 3, 0)]


def test_row_31_fully_sharded_ranks_run_equally_many_micro_batches(two_ranks):
    counts = [[3, 3], [3, 2], [2, 0]]
    plan = [memfit.Sharding("fsdp2"), memfit.Accumulation(batches_per_update=3)]
    ranks = two_ranks.run("in_windows", plan, counts, "fit", "token_loss")
    assert_alike(ranks, rank_cases.in_windows(0, 1, None, counts, "fit", "token_loss"))


def test_a_rank_that_repeats_a_micro_batch_for_others_keeps_its_random_numbers_and_buffers(two_ranks):
    assert two_ranks.run("padded") == [(True, True)] * 2


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_without_tokens_counts_for_nothing_though_its_mean_loss_is_not_a_number(
    two_ranks, mode
):
    ranks = two_ranks.run("without_tokens", mode)
    assert_alike(ranks, rank_cases.without_tokens(0, 1, mode))


@pytest.mark.parametrize("mode", MODES)
def test_no_loss_is_multiplied_by_more_than_one_which_could_overflow_float16(two_ranks, mode):
    assert two_ranks.run("growing_weights", mode) == [True, True]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("infinite", [(1, 2), (0, 3)])
def test_rows_16_and_17_one_infinite_micro_batch_of_one_rank_skips_its_window_on_all(
    two_ranks, mode, infinite
):
    ranks = two_ranks.run("overflow", mode, infinite)
    for rank in ranks:
        assert rank["updated"] == [True, False, True]
        assert rank["scales"] == [64.0, 64.0, 32.0]
        assert rank["scaler"] == ranks[0]["scaler"]
        assert len(rank["gradients"]) == 2
    undisturbed = two_ranks.run("overflow", mode, (-1, -1))
    # The second window changed nothing: the third begins where the first ended.
    alone = rank_cases.overflow(0, 1, mode, (0, 2))
    assert [rank["updated"] for rank in undisturbed] == [[True] * 3] * 2
    for rank in ranks:
        for name, gradient in rank["gradients"][1].items():
            torch.testing.assert_close(gradient, alone["gradients"][1][name], rtol=2e-2, atol=2e-3)
        for name, gradient in rank["gradients"][0].items():
            assert torch.equal(gradient, undisturbed[0]["gradients"][0][name])


def test_rows_18_and_19_gradients_are_reduced_once_per_window(two_ranks):
    reduced, buckets = 4, 1
    assert two_ranks.run("reductions", 3, 4) == [(reduced, buckets)] * 2


def test_parameters_that_no_rank_used_get_no_gradient(two_ranks):
    sizes = [[2, 2], [4, 2], [1, 3], [2, 2]]
    ranks = two_ranks.run("unused", sizes)
    alone = rank_cases.unused(0, 1, sizes)
    used = [any(name.startswith("sometimes") for name in each) for each in alone["gradients"]]
    assert used == [False, True, True, False]
    for rank in ranks:
        for mine, theirs in zip(rank["gradients"], alone["gradients"], strict=True):
            assert mine.keys() == theirs.keys()
        for name, parameter in rank["parameters"].items():
            assert (parameter - alone["parameters"][name]).abs().max() <= 1e-6, name


@pytest.mark.parametrize("master_weights", [False, True])
def test_gradients_summed_in_float32_are_reduced_in_float32(two_ranks, master_weights):
    ranks = two_ranks.run("sums", master_weights)
    alone = rank_cases.sums(0, 1, master_weights)
    assert ranks[0]["dtypes"] == ({"torch.float32"} if master_weights else {"torch.bfloat16"})
    for rank in ranks:
        for mine, theirs in zip(rank["gradients"][0], alone["gradients"][0], strict=True):
            # bf16 micro-batches are the same on one process and on two: only their sums are rounded anew.
            torch.testing.assert_close(mine, theirs, rtol=1e-6 if master_weights else 8e-3, atol=1e-7)


def test_the_engine_trains_bit_for_bit_as_a_loop_with_no_sync(two_ranks):
    ranks = two_ranks.run("by_hand")
    assert [equal for equal, *_ in ranks] == [True, True]
    (_, by_hand, engines), (*_, second) = ranks
    for buffers in (engines, second):  # those of rank 0, as DistributedDataParallel has them in its forward
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(by_hand, buffers, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_a_model_may_be_sharded_before(two_ranks, mode):
    sizes = [[3, 5], [4, 1]]
    ranks = two_ranks.run("sharded_before", mode, sizes)
    assert_alike(ranks, rank_cases.steps(0, 1, None, sizes))


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "float64"])
def test_lenet_on_two_ranks_with_three_micro_batches_as_on_one_process_with_six(two_ranks, dtype):
    ranks = two_ranks.run("lenet", dtype, 8)
    alone = rank_cases.lenet(0, 1, dtype, 8)
    assert_alike(ranks, alone, dtype)
    assert alone["steps"][-1] == (48, 8, 0)
    assert [rank["steps"][-1] for rank in ranks] == [(24, 8, 0)] * 2
