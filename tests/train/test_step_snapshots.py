"""A step that ran out of memory: its batch and buffers are restored for the retry, or it is refused."""

from collections import OrderedDict, UserDict

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import UsageError
from memfit.train.step_snapshots import StepSnapshots
from support.checkpointed_blocks import OwnStatistics


def short_once(loss):
    """Return a loss function whose next call after ``armed`` is set runs out of memory at its end."""

    def short(model, data):
        found = loss(model, data)
        if short.armed:
            short.armed = False
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    short.armed = True
    return short


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
    """Pop the labels, as Hugging Face's trainers do; without labels the loss differs."""
    labels = data.pop("labels", None)
    out = model(data["x"])
    return (out if labels is None else out - labels).square().mean()


@pytest.mark.parametrize("kind", [dict, UserDict, OrderedDict])
def test_a_batch_whose_entries_a_loss_removes_is_retried_with_them(kind):
    ours, plain = linear(), linear()
    data = kind({"x": torch.randn(8, 4), "labels": torch.randn(8, 1)})
    result = engine(ours, short_once(popped)).step(data)
    engine(plain, popped, memfit.Accumulation(parts_per_batch=2)).step(data)
    assert (result.updated, result.retried) == (True, 1)
    assert torch.equal(ours.weight, plain.weight)
    assert data.keys() == {"x", "labels"}


def test_a_batch_whose_inner_entries_a_loss_removes_is_refused():
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
    run = engine(linear(), square, memfit.Accumulation(parts_per_batch=2))
    with pytest.raises(UsageError, match="The batch has no samples"):
        run.step(torch.ones(0, 4))
    assert run.step(torch.ones(8, 4)).updated


# ---- Buffers ---------------------------------------------------------------------------------------------


class Buffered(nn.Linear):
    """A layer with a constant mask, a mean that each step writes, and a count that only some steps write."""

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
        return {snapshot.slots[place][1] for place in snapshot.contents}

    assert copied() == {"mask", "mean", "late"}
    assert copied() == {"mean"}
    model.counts = True
    assert copied() == {"mean"}, "this step records the write"
    assert copied() == {"mean", "late"}


def test_a_write_that_no_version_counts_is_detected_in_the_first_step():
    model = nn.Sequential(nn.Linear(4, 6), OwnStatistics())
    snapshots = StepSnapshots(model)
    for step in range(2):
        snapshot = snapshots.take()
        before = {name: value.clone() for name, value in model.named_buffers()}
        versions = [buffer._version for buffer in model.buffers()]
        model(torch.randn(8, 4))
        assert [buffer._version for buffer in model.buffers()] == versions, f"counted in step {step}"
        snapshots.record_writes(snapshot)
    snapshot.restore()
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_statistics_of_batch_norms_are_copied_even_if_the_first_step_did_not_write_to_them():
    """Their kernels increment no version; here the statistics were frozen in the step that was recorded."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    snapshots = StepSnapshots(model)
    snapshots.record_writes(snapshots.take())
    model.train()
    snapshot = snapshots.take()
    before = {name: value.clone() for name, value in model[1].named_buffers()}
    model(torch.randn(8, 4))
    assert snapshot.lost == ""
    snapshot.restore()
    assert all(torch.equal(value, before[name]) for name, value in model[1].named_buffers())


@pytest.mark.parametrize("how", ["replaced", "added", "moved", "in a new dict", "behind PyTorch's back"])
def test_buffers_of_a_model_that_changes_between_steps_are_found_again(how):
    model, spare = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.BatchNorm1d(4)
    snapshots = StepSnapshots(model)
    snapshots.record_writes(snapshots.take())
    snapshots.take()
    if how == "replaced":
        model[1] = spare
    elif how == "added":
        model.append(spare)
    elif how == "moved":
        model.double()
    elif how == "in a new dict":
        spare.running_mean.fill_(7.0)
        model[1].__setstate__({**vars(model[1]), "_buffers": dict(spare._buffers)})
    else:
        model._modules["late"] = spare
    snapshot = snapshots.take()
    before = {name: value.clone() for name, value in model.named_buffers()}
    if how == "behind PyTorch's back":
        assert snapshot.lost == "running_mean, running_var, num_batches_tracked"
        return
    model(torch.randn(8, 4, dtype=model[0].weight.dtype))
    assert snapshot.lost == ""
    snapshot.restore()
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)  # dtypes, too
    assert {place for place, _ in enumerate(model.buffers())} == set(snapshot.contents)


@pytest.mark.parametrize("other", [torch.ones(4), torch.ones(6), torch.ones(4, dtype=torch.float64)])
def test_a_buffer_whose_data_are_replaced_between_steps_is_copied_as_it_is(other):
    model = nn.BatchNorm1d(4)
    snapshots = StepSnapshots(model)
    snapshots.record_writes(snapshots.take())
    snapshots.take()
    model.running_mean.data = other.clone()
    snapshot = snapshots.take()
    with torch.no_grad():
        model.running_mean.zero_()
    snapshot.restore()
    torch.testing.assert_close(model.running_mean, other, rtol=0, atol=0)


def test_buffers_that_require_gradients_are_copied_without_a_graph():
    model = nn.Module()
    model.register_buffer("mean", torch.ones(2, requires_grad=True))
    snapshots = StepSnapshots(model)
    for _ in range(3):
        snapshot = snapshots.take()
        with torch.no_grad():
            model.mean.add_(1)
        snapshots.record_writes(snapshot)
    (copied,) = snapshots.take().contents.values()
    assert (copied.tolist(), copied.requires_grad) == ([4.0, 4.0], False)


def test_a_first_step_is_undone_though_a_mask_is_expanded():
    """The first step's copies include all buffers, and an expanded one cannot be written to."""
    model = nn.BatchNorm1d(4)
    model.register_buffer("mask", torch.ones(1, 4).expand(3, 4))
    snapshot = StepSnapshots(model).take()
    model(torch.randn(8, 4))
    snapshot.restore()
    assert model.num_batches_tracked == 0


def test_a_failed_copy_leaves_no_copy_that_seems_complete():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    snapshots = StepSnapshots(model)
    snapshots.record_writes(snapshots.take())
    late = model[1].running_mean

    def fails():
        del late.detach
        raise torch.OutOfMemoryError("CUDA out of memory")

    late.detach = fails
    with pytest.raises(torch.OutOfMemoryError):
        snapshots.take()
    for value in (1.0, 2.0):
        for norm in model:
            norm.running_mean.fill_(value)
        snapshot = snapshots.take()
        for norm in model:
            norm.running_mean.zero_()
        snapshot.restore()
        assert [norm.running_mean.tolist() for norm in model] == [[value] * 2] * 2


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
            match="the buffers late. These keep the values",
        ),
        pytest.raises(torch.OutOfMemoryError) as error,
    ):
        run.step(torch.randn(8, 4))
    assert error.value.__notes__ == [
        (
            "The batch cannot be retried: the step changed the buffers late, which no earlier step had "
            "changed. memfit copies only buffers that earlier steps have changed, so it cannot restore these."
        )
    ]
    assert (model.late, run.optimizer_step) == (1, 1)
    assert torch.equal(model.mean, mean)
    run.step(torch.randn(8, 4))  # records the write
    loss.armed = True
    assert run.step(torch.randn(8, 4)).retried == 1
    # Once in the completed step, once in each of the two parts, and once in the failed step, which stayed.
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
    engine(plain, square, memfit.Accumulation(parts_per_batch=2)).step(data)
    assert torch.equal(ours.weight, plain.weight)
