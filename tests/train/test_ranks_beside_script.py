"""The position in the data and the random numbers of a job that resumes on another number of ranks."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from memfit.errors import FileFormatError, UsageError
from memfit.random_state import get_random_state, set_random_state
from memfit.train.data.loader_order import batches_already_read, loader_order_of
from memfit.train.resume.saved_run_format import check_rank_run_file, check_shared_run_file
from memfit.train.resume.split_run_state import random_state_of_new_rank


def loader(ranks, rank=0, batch_size=2, samples=24, **options):
    sampler = DistributedSampler(range(samples), ranks, rank, **options)
    return DataLoader(range(samples), batch_size=batch_size, sampler=sampler)


SIZES = [(2, 2, 4, 1), (4, 1, 2, 2), (2, 3, 3, 2), (3, 2, 1, 6)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("there", "size", "here", "other"), SIZES)
def test_batches_done_are_the_samples_that_the_other_ranks_have_read(there, size, here, other, shuffle):
    read = {
        sample
        for rank in range(there)
        for batch in list(loader(there, rank, size, shuffle=shuffle))[:2]
        for sample in batch.tolist()
    }
    before = loader_order_of(loader(there, 0, size, shuffle=shuffle), there)
    done = batches_already_read(2, before, loader(here, 0, other, shuffle=shuffle), here)
    again = {
        sample
        for rank in range(here)
        for batch in list(loader(here, rank, other, shuffle=shuffle))[:done]
        for sample in batch.tolist()
    }
    assert again == read


def test_an_epoch_that_is_read_stays_read_if_its_last_batches_were_padded():
    """Ten samples on four ranks are twelve, two of them twice."""
    before = loader_order_of(loader(4, batch_size=3, samples=10), 4)
    assert batches_already_read(1, before, loader(2, batch_size=2, samples=10), 2) == 3


def test_one_rank_in_order_continues_as_several():
    alone = DataLoader(range(24), batch_size=4)
    assert batches_already_read(3, loader_order_of(alone, 1), loader(2, batch_size=2, shuffle=False), 2) == 3


@pytest.mark.parametrize(
    "unknown",
    [
        [1, 2],
        DataLoader(range(24), batch_size=2, shuffle=True),
        DataLoader(range(24), batch_sampler=[[0, 1], [2, 3]]),
        loader(3),
    ],
    ids=["a list", "shuffled", "a batch sampler of its own", "a sampler of other ranks"],
)
def test_an_order_that_memfit_does_not_know_is_refused(unknown):
    assert loader_order_of(unknown, 1) == {"ranks": 1}
    for before, now in ((loader_order_of(unknown, 1), loader(2)), (loader_order_of(loader(2), 2), unknown)):
        with pytest.raises(UsageError, match="only if both jobs use a DataLoader with a DistributedSampler"):
            batches_already_read(1, before, now, 1 if now is unknown else 2)


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (loader(4, samples=20), "24 samples in the dataset, and this one has 20"),
        (loader(4, seed=5), "0 as the sampler's seed, and this one has 5"),
        (loader(4, shuffle=False), "0 as the sampler's seed, and this one has None"),
        (
            loader(4, batch_size=2),
            "The 4 samples .* no whole number of batches of 2 on 4 .* divides 1",
        ),
    ],
)
def test_another_order_is_refused(now, reason):
    with pytest.raises(UsageError, match=f"2 ranks saved the state, and this job has 4.*{reason}"):
        batches_already_read(1, loader_order_of(loader(2), 2), now, 4)


def drawn():
    return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002, S311 - compared


def test_new_ranks_draw_other_numbers_than_rank_0_and_each_other_and_the_same_each_time():
    before = get_random_state()
    state = before | {"own": ["kept"]}
    found = []
    for rank in (2, 3, 2):
        new = random_state_of_new_rank(state, rank)
        assert new["own"] == ["kept"]
        set_random_state(new)
        found.append(drawn())
    set_random_state(before)
    assert found[0] == found[2]
    assert not {*found[0]} & {*found[1]}
    assert drawn() not in found


def shared(**changes):
    run = {"groups": [["a", "b"]], "optimizer": [{}]}
    return {"version": 1, "ranks": 2, "folder": "3-0123456789ab", "owners": [0, 1], "run": run} | changes


def test_a_common_file_is_checked():
    assert check_shared_run_file(shared())["ranks"] == 2
    for changes, reason in (
        ({"version": 2}, "version 2, but this memfit reads only version 1"),
        ({"folder": "../3-0123456789ab"}, "damaged"),
        ({"folder": 3}, "damaged"),
        ({"owners": [0]}, "1 owners of the optimizer's 2 parameters"),
        ({"owners": [0, 2]}, "up to rank 2 of 2"),
        ({"run": {}}, "damaged"),
    ):
        with pytest.raises(FileFormatError, match=reason):
            check_shared_run_file(shared(**changes))


def test_the_file_of_another_rank_is_refused():
    position = {"consumed": 0, "carried": 0, "began": None, "before": None, "batch_size": None}
    random_state = {"python": (), "torch": torch.zeros(1), "own": []}
    run = {"model": {}, "gradients": {}, "position": position, "random": random_state}
    file = {"version": 1, "rank": 1, "entries": {}, "run": run}
    assert check_rank_run_file(file, 1)["rank"] == 1
    with pytest.raises(FileFormatError, match="The file of rank 0 is that of rank 1"):
        check_rank_run_file(file, 0)
    with pytest.raises(FileFormatError, match="damaged"):
        check_rank_run_file(file | {"run": run | {"position": None}}, 1)
