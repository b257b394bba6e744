"""A training step recorded operation by operation, on the CPU."""

import gc

import pytest
import torch
from torch import nn

from memfit.recording.step_operations import StepOperationRecorder


class Twice(nn.Module):
    """Calls a layer twice, the second time with a keyword."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x, *, scale):
        return self.layer(input=self.layer(x).relu() * scale)


@pytest.fixture
def recorded():
    model, x = Twice(), torch.randn(8, 16)
    recorder = StepOperationRecorder(model, "outer.twice")
    recorder.start()
    model(x, scale=torch.tensor(2.0)).sum().backward()
    return recorder.stop()


def test_modules_have_their_calls_and_operations(recorded):
    assert [(call.module, call.kind, call.parent) for call in recorded.calls] == [
        ("outer.twice", "Twice", -1),
        ("outer.twice.layer", "Linear", 0),
        ("outer.twice.layer", "Linear", 0),
    ]
    names = [operation.name for operation in recorded.forward]
    first = recorded.calls[1]
    assert names[first.first : first.end] == ["aten.t.default", "aten.addmm.default"]
    assert names[-2:] == ["aten.sum.default", "aten.ones_like.default"]  # the loss, and its gradient
    assert {operation.call for operation in recorded.forward[-2:]} == {-1}


def test_storages_are_those_that_the_step_allocates(recorded):
    result = 8 * 16 * 4
    made = {each for operation in recorded.forward for each in operation.creates}
    sizes = sorted(recorded.storages[each] for each in made)
    assert sizes == [4, 4, *[result] * 4]  # the loss and its gradient; two results, relu, product
    assert recorded.calls[0].reads
    assert all(recorded.storages[each] == 0 for each in recorded.calls[0].reads)  # the script's own inputs


def test_a_second_call_of_the_model_counts_what_the_first_allocated_and_not_its_own_inputs():
    model, x, scale = Twice(), torch.randn(8, 16), torch.tensor(2.0)
    recorder = StepOperationRecorder(model)
    recorder.start()
    later = torch.randn(8, 16)
    model(model(x, scale=scale) + later, scale=scale).sum().backward()
    step = recorder.stop()
    first, second = (call for call in step.calls if call.parent < 0)
    assert [step.storages[each] for each in first.reads] == [0, 0]
    assert [step.storages[each] for each in second.reads] == [8 * 16 * 4, 0]


def test_what_autograd_saves_belongs_to_the_module_in_which_it_is_saved(recorded):
    saved = [sum(recorded.storages[each] for each in call.saves) for call in recorded.calls]
    result = 8 * 16 * 4
    assert saved == [result, 0, result]  # relu's result; x is the script's; the product is the second's input
    last = recorded.calls[2]
    names = [operation.name for operation in recorded.forward[: last.last_saved]]
    assert names[-1] == "aten.t.default"  # the second product need not run again


def test_operations_of_the_backward_name_the_one_whose_gradient_they_compute(recorded):
    sources = [
        recorded.forward[operation.source].name
        for operation in recorded.backward
        if operation.name == "aten.mm.default" and operation.source >= 0
    ]
    assert sources == ["aten.addmm.default"] * 3  # two gradients of weights, one of the inner result


def test_memory_is_what_is_alive(recorded):
    result = 8 * 16 * 4
    highest = max(operation.allocated for operation in recorded.forward)
    assert 3 * result < highest <= 4 * result + 8


class Chain(nn.Module):
    """Drops each result when it has the next; the last keeps one more."""

    def forward(self, x):
        for _ in range(3):
            x = x.sin()
        kept, x = x, None
        return torch.cat([kept, kept.cos()])


def test_memory_after_each_operation_is_exactly_the_storages_alive_then():
    x = torch.randn(100)
    recorder = StepOperationRecorder(Chain())
    recorder.start()
    with torch.no_grad():
        result = Chain()(x)  # not the recorded module: its input counts
        del x
        result = result[:1].clone()
    numbers = [operation.allocated for operation in recorder.stop().forward]
    # The input is alive until its `del`, a sine until the next but one; a cosine's operands join it in a cat.
    assert numbers == [800, 1200, 1200, 1200, 2000, 800, 804]
    assert result.numel() == 1


def test_flops_are_counted_where_pytorch_has_a_formula(recorded):
    assert {operation.flops for operation in recorded.forward if operation.flops} == {2 * 8 * 16 * 16}


def test_recording_changes_no_gradient_and_leaves_no_hook():
    model, x = Twice(), torch.randn(8, 16)
    model(x, scale=2.0).sum().backward()
    plain = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    recorder = StepOperationRecorder(model)
    recorder.start()
    model(x, scale=2.0).sum().backward()
    recorder.stop()
    assert all(map(torch.equal, plain, (each.grad for each in model.parameters())))
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    recorded = len(recorder.stop().forward)
    model(x, scale=2.0).sum().backward()
    assert len(recorder.stop().forward) == recorded


def test_an_operation_is_random_if_it_draws():
    model = nn.Sequential(nn.Dropout(0.5))
    recorder = StepOperationRecorder(model)
    recorder.start()
    x = torch.ones(4, 4, requires_grad=True)
    model(x).sum().backward()
    torch.native_dropout(x, 0.0, train=False)
    step = recorder.stop()
    assert {each.name for each in step.forward if each.random} == {"aten.bernoulli_.float"}


def test_what_autograd_saves_is_recorded_with_the_operation_whose_backward_reads_it():
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Sigmoid())
    x = torch.randn(1, 2, 8)
    recorder = StepOperationRecorder(model)
    recorder.start()
    (model(x) * 2.0).pow(2).sum().backward()
    step = recorder.stop()
    names = [operation.name.split(".")[1] for operation in step.forward]
    found = [
        (names[by], at - by, storage in step.forward[by].creates)
        for storage, at, by in zip(step.saved, step.saved_at, step.saved_by, strict=True)
    ]
    # A convolution saves its arguments before it runs, sigmoid its result after it.
    assert found == [("convolution", 0, False)] * 2 + [("sigmoid", 1, True)]


def test_a_forward_without_a_backward_is_freed():
    """As that of a generator whose images are detached for the discriminator."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    recorder = StepOperationRecorder(model)
    gc.disable()
    try:
        recorder.start()
        images = model(torch.randn(8, 16))
        end = torch.multiprocessing.reductions.StorageWeakRef(images.untyped_storage())
        del images
        assert end.expired()
    finally:
        recorder.stop()
        gc.enable()
