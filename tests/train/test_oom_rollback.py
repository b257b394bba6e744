"""A step begun again when memory ran out: its batch and buffers are what they were, or it is refused."""

from collections import OrderedDict, UserDict

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import UsageError
from memfit.train.oom_rollback import ReusedCopies, StepSnapshots
from support.checkpointed_blocks import OwnStatistics


def short_once(loss):
    """Return a loss that runs out of memory at its end, the first time that ``armed`` is set."""

    def of(model, data):
        found = loss(model, data)
        if of.armed:
            of.armed = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    of.armed = True
    return of


def engine(model, loss, *plan):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return memfit.Engine(model, plan, optimizer=optimizer, loss=loss)


def linear(kind=nn.Linear):
    torch.manual_seed(0)
    return kind(4, 1)


def square(model, data):
    return model(data).square().mean()


# ---- Batches ---------------------------------------------------------------------------------------------


def popped(model, data):
    """As Hugging Face's trainers do; without labels the loss is another."""
    labels = data.pop("labels", None)
    out = model(data["x"])
    return (out if labels is None else out - labels).square().mean()


@pytest.mark.parametrize("kind", [dict, UserDict, OrderedDict])
def test_a_batch_whose_entries_a_loss_removes_is_retried_with_them(kind):
    ours, plain = linear(), linear()
    data = kind({"x": torch.randn(8, 4), "labels": torch.randn(8, 1)})
    result = engine(ours, short_once(popped)).step(data)
    engine(plain, popped, memfit.Accumulation(2)).step(data)
    assert (result.updated, result.retried) == (True, 1)
    assert torch.equal(ours.weight, plain.weight)
    assert data.keys() == {"x", "labels"}


def test_a_batch_that_a_loss_takes_inner_entries_from_is_refused():
    def inner(model, data):
        return popped(model, data["inputs"])

    data = {"inputs": {"x": torch.randn(8, 4), "labels": torch.randn(8, 1)}}
    model = linear()
    before = model.weight.detach().clone()
    with pytest.raises(UsageError, match="the batch cannot be retried"):
        engine(model, short_once(inner)).step(data)
    assert torch.equal(model.weight, before)


class Odd:
    def __init__(self, x):
        self.x = x


def test_a_batch_of_an_unknown_type_raises_pytorchs_error():
    run = engine(linear(), short_once(lambda model, data: model(data.x).square().mean()))
    data = Odd(torch.randn(8, 4))
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as error:
        run.step(data)
    assert (
        "cannot be retried in smaller parts. Cannot determine the number of samples"
        in error.value.__notes__[0]
    )
    assert run.step(data).updated


def test_a_batch_without_samples_is_refused():
    run = engine(linear(), square, memfit.Accumulation(2))
    with pytest.raises(UsageError, match="The batch has no samples"):
        run.step(torch.ones(0, 4))
    assert run.step(torch.ones(8, 4)).updated


# ---- Buffers ---------------------------------------------------------------------------------------------


class Buffered(nn.Linear):
    """A mask that nothing writes to, a mean that each step writes to, and a count that only some write to."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("late", torch.zeros(()))
        self.register_buffer("lazy", None)
        self.counts = False

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        if self.counts:
            self.late += 1
        if self.lazy is None:
            self.lazy = x.detach().mean(0)
            x = x * 2
        return super().forward(x * self.mask - self.mean)


def test_after_the_first_step_only_buffers_that_steps_write_to_are_copied():
    model = linear(Buffered)
    snapshots = StepSnapshots(model)

    def copied():
        snapshot = snapshots.take()
        square(model, torch.randn(8, 4))
        snapshots.record_writes(snapshot)
        columns = zip(snapshot.slots, snapshot.contents, strict=True)
        return {name for (_, name, _), content in columns if content is not None}

    assert copied() == {"mask", "mean", "late"}
    assert copied() == {"mean"}
    model.counts = True
    assert copied() == {"mean"}, "the step in which it is learnt"
    assert copied() == {"mean", "late"}


def test_a_buffer_written_without_a_version_count_is_found_in_the_first_step():
    model = nn.Sequential(nn.Linear(4, 6), OwnStatistics())
    snapshots = StepSnapshots(model)
    for step in range(2):
        snapshot = snapshots.take()
        before = {name: value.clone() for name, value in model.named_buffers()}
        model(torch.randn(8, 4))
        assert snapshot.versions == [one._version for one in model.buffers()], f"counted in step {step}"
        snapshots.record_writes(snapshot)
    snapshot.restore()
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_statistics_of_batch_norms_are_copied_as_soon_as_they_are_trained():
    """Their kernels write without saying so; here they were frozen in the step that was looked at."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    snapshots = StepSnapshots(model)
    snapshots.record_writes(snapshots.take())
    assert not any(one is not None for one in snapshots.take().contents)
    model.train()
    snapshot = snapshots.take()
    before = {name: value.clone() for name, value in model[1].named_buffers()}
    model(torch.randn(8, 4))
    assert snapshot.lost == ""
    snapshot.restore()
    assert all(torch.equal(value, before[name]) for name, value in model[1].named_buffers())


def test_a_copy_that_fails_leaves_none_that_is_taken_for_whole():
    copies, one, other = ReusedCopies(), torch.zeros(2), torch.zeros(2)

    def fails():
        del other.clone
        raise torch.OutOfMemoryError("CUDA out of memory")

    other.clone = fails
    with pytest.raises(torch.OutOfMemoryError):
        copies.of([one, other])
    for value in (1.0, 2.0):
        one.fill_(value)
        other.fill_(value)
        assert [copied.tolist() for copied in copies.of([one, other])] == [[value] * 2] * 2


def test_a_batch_is_not_retried_after_a_late_write_to_a_buffer():
    model, loss = linear(Buffered), short_once(square)
    loss.armed = False
    run = engine(model, loss)
    run.step(torch.randn(8, 4))
    mean = model.mean.clone()
    loss.armed = model.counts = True
    with (
        pytest.warns(
            UserWarning,
            match="the buffers late, which keep the values",
        ),
        pytest.raises(torch.OutOfMemoryError) as error,
    ):
        run.step(torch.randn(8, 4))
    assert error.value.__notes__ == [
        (
            "The batch cannot be retried: the step wrote to the buffers late, and memfit has no copy of "
            "them, because no earlier step wrote to them."
        )
    ]
    assert (model.late, run.optimizer_step) == (1, 1)
    assert torch.equal(model.mean, mean)
    run.step(torch.randn(8, 4))  # says that it is written to
    loss.armed = True
    assert run.step(torch.randn(8, 4)).retried == 1
    # Once in each step that was made, once in each of the two parts, and once in what stayed.
    assert model.late == 1 + 1 + 2


def test_a_buffer_that_was_none_is_restored_to_none():
    def fails(model, data):
        square(model, data)
        raise ValueError("no loss")

    model = linear(Buffered)
    with pytest.raises(ValueError, match="no loss"):
        engine(model, fails).step(torch.randn(8, 4))
    assert model.lazy is None
    ours, plain, data = linear(Buffered), linear(Buffered), torch.randn(8, 4)
    assert engine(ours, short_once(square)).step(data).retried == 1
    engine(plain, square, memfit.Accumulation(2)).step(data)
    assert torch.equal(ours.weight, plain.weight)
