"""Loaders whose passes end early: what comes, their lengths, and the script's own data."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from memfit.recording.loader_shortener import LoaderShortener
from memfit.recording.script_loaders import ScriptLoaders
from memfit.records import Shortened
from support.endless_loader import Endless, KeepsWorkers

NUMBERS = TensorDataset(torch.arange(40))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(40))


class MeasuredStream(Stream):
    def __len__(self):
        return 40


class Recording(Dataset):
    """Counts the samples that are read."""

    read = 0

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.read += 1
        return index


@pytest.fixture
def short():
    followed = ScriptLoaders()
    loaders = LoaderShortener(3, followed)
    loaders.install()
    followed.install()
    yield loaders
    followed._hooks.remove()
    loaders._hooks.remove()


def test_a_pass_has_as_many_batches_as_the_loader_is_long(short):
    loader = DataLoader(NUMBERS, 4)
    for _ in range(2):
        assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert (len(loader), len(loader.dataset), len(loader.sampler), len(loader.batch_sampler)) == (
        3,
        40,
        40,
        10,
    )
    assert [(each.to, each.of) for each in short.shortened] == [(3, 10)]


def test_a_shorter_loader_stays_as_it_is(short):
    loader = DataLoader(NUMBERS, 20)
    assert (len(loader), len(list(loader))) == (2, 2)
    assert short.shortened == ()


def test_the_batches_are_those_that_the_script_would_have_drawn_first(short):
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    (found,) = zip(*DataLoader(NUMBERS, 4, shuffle=True, generator=generators[0]), strict=True)
    order = torch.randperm(40, generator=_after_the_seed(generators[1]))
    assert torch.cat(found).tolist() == order[:12].tolist()


def _after_the_seed(generator):
    torch.empty((), dtype=torch.int64).random_(generator=generator)  # of the workers
    return generator


def test_no_samples_are_read_that_are_not_passed_on(short):
    data = Recording()
    assert len(list(DataLoader(data, 4))) == 3
    assert data.read == 12


@pytest.mark.process
@pytest.mark.parametrize("keywords", [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_workers_make_the_same_batches(short, keywords):
    loader = DataLoader(NUMBERS, 4, **keywords)
    assert [[batch[0].tolist() for batch in loader] for _ in range(2)] == 2 * [
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    ]


@pytest.mark.parametrize(("batch_size", "first"), [(4, [0, 1, 2, 3]), (None, 0)])
def test_streams_end_as_well(short, batch_size, first):
    batches = list(DataLoader(Stream(), batch_size))
    assert (len(batches), torch.as_tensor(batches[0]).tolist()) == (3, first)
    assert [(each.to, each.of) for each in short.shortened] == [(3, None)]


def test_a_stream_that_knows_its_length_is_as_long_as_its_pass(short):
    loader = DataLoader(MeasuredStream(), 4)
    assert (len(loader), len(list(loader))) == (3, 3)


def test_a_loader_that_counts_its_batches_is_shorter_and_goes_on_where_it_was(short):
    loader = KeepsWorkers(NUMBERS, 4)
    assert [[batch[0].tolist()[0] for batch in loader] for _ in range(2)] == [[0, 4, 8], [12, 16, 20]]
    assert len(loader) == 3
    assert [(each.to, each.of) for each in short.shortened] == [(3, 10)]


class Delegates(DataLoader):
    """As loaders do that move batches to a device."""

    def __len__(self):
        return super().__len__()

    def __iter__(self):
        return (batch[0] for batch in super().__iter__())


def test_a_loader_that_passes_another_ones_batches_on_is_shorter(short):
    loader = Delegates(NUMBERS, 4)
    assert (len(loader), len(list(loader))) == (3, 3)


def test_a_sampler_without_an_end_is_left_to_the_script_that_counts(short):
    batches = iter(DataLoader(NUMBERS, batch_sampler=Endless(DataLoader(NUMBERS, 4).batch_sampler)))
    assert [next(batches)[0].tolist()[0] for _ in range(12)] == [*range(0, 40, 4), 0, 4]


def test_each_is_reported_once_with_its_line(short):
    for _ in range(3):
        list(DataLoader(NUMBERS, 4))
    (each,) = short.shortened
    assert each == Shortened(each.where, 3, 10)
    assert each.where.startswith(f"{__file__}:")


def test_a_script_that_counts_on_the_length_finds_as_many_batches(short):
    loader = DataLoader(NUMBERS, 4)
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize(("batch_size", "last"), [(3, 3), (16, 8)])
def test_accelerate_gathers_the_whole_last_batch(short, batch_size, last):
    """Of 40 numbers, the last batch of a pass in full has 1, or 8."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(NUMBERS, batch_size))
    gathered = [accelerator.gather_for_metrics(batch) for (batch,) in loader]
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert [len(batch) for batch in gathered] == [batch_size, batch_size, last]
