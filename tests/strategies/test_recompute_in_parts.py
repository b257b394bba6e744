"""A block that is recomputed in parts computes the same, and holds less at a time."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

import memfit
from memfit.errors import UsageError
from memfit.recording.step_operations import StepOperationRecorder
from memfit.strategies.checkpointing import Checkpointing
from support.checkpointed_blocks import (
    NORMS,
    DropoutBlock,
    Shared,
    assert_same,
    compare,
    differentiated_twice,
    net,
    train,
)

SPLITS = pytest.mark.parametrize("split_at", ["norm", "dropout", ("norm", "dropout")])


def split(*names, modules="layers.*", **settings):
    return Checkpointing(modules, split_at=names, **settings)


@SPLITS
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_gradients_buffers_and_random_numbers_are_those_of_plain_training(norm, split_at):
    compare(net(norm), settings=Checkpointing("layers.*", split_at=split_at), steps=3, backwards=2)


def test_a_block_called_twice_and_tied_weights():
    torch.manual_seed(1)
    compare(Shared(), settings=split("norm", modules="block"), steps=3)


def test_keyword_arguments_containers_and_a_frozen_first_layer():
    def call(model, x):
        for layer in model.layers:
            x = layer(x, x, extra={"shift": x})
        return x

    model = net()
    model.layers[0].inner.requires_grad_(requires_grad=False)
    compare(model, settings=split("norm"), call=call)


def test_autocast_is_that_of_the_forward():
    def call(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    compare(net(), settings=split("norm"), call=call)


def test_gradients_of_gradients():
    model = net()
    plain = differentiated_twice(copy.deepcopy(model))
    split("norm").apply(model)
    for one, other in zip(plain, differentiated_twice(model), strict=True):
        assert torch.equal(one, other)


class Told(nn.Module):
    """Notes its calls, and saves its input."""

    def __init__(self, name, calls):
        super().__init__()
        self.name, self.calls = name, calls

    def forward(self, x):
        self.calls.append(self.name)
        return x.sin()


def told(names, *split_at):
    """Return a model with a block of modules that note their calls, and the list of these."""
    calls = []
    modules = {name: Told(name, calls) for name in names}
    model = nn.Sequential(nn.Sequential(*(modules[name] for name in names)))
    memfit.apply(model, split(*split_at, modules="0"))
    return model, calls


def test_a_part_is_run_once_and_those_before_it_again():
    model, calls = told("abc", "1", "2")
    model(torch.ones(2, requires_grad=True)).sum().backward()
    assert "".join(calls) == "abc" + "abc" + "ab" + "a"


def test_a_part_begins_with_the_first_call_of_a_submodule():
    model, calls = told("abcb", "1")
    model(torch.ones(2, requires_grad=True)).sum().backward()
    assert "".join(calls) == "abcb" + "abcb" + "a"


def test_nothing_that_was_recomputed_stays_for_a_second_backward():
    model, calls = told("abc", "2")
    loss = model(torch.ones(2, requires_grad=True)).sum()
    for _ in range(2):
        calls.clear()
        loss.backward(retain_graph=True)
        assert "".join(calls) == "abc" + "ab"


def test_what_other_parts_save_does_not_exist():
    """Sixteen layers of a MiB each: their backward holds four at a time, and what is on the way."""
    most = {}
    for split_at in ((), ("4", "8", "12")):
        block = nn.Sequential(*(nn.Sequential(nn.Sigmoid()) for _ in range(16)))
        model = nn.Sequential(block)
        memfit.apply(model, Checkpointing("0", split_at=split_at))
        x = torch.zeros(1 << 18, requires_grad=True)
        recorder = StepOperationRecorder(model)
        recorder.start()
        model(x).sum().backward()
        most[split_at] = max(each.allocated for each in recorder.stop().backward) >> 20
    assert most[()] == 17  # sixteen, and a gradient
    assert most["4", "8", "12"] == 6  # and the input of the first


def test_copies_of_a_model_are_split_too():
    model = net()
    split("norm").apply(model)
    assert_same(train(copy.deepcopy(model)), train(model))


def test_inputs_changed_in_place_afterwards_are_noticed():
    model = net(layers=1)
    split("norm").apply(model)
    x = torch.ones(2, 6)
    result = model(x)
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


class Fickle(DropoutBlock):
    """Computes something else when it is called again."""

    def __init__(self, change):
        super().__init__()
        self.change, self.calls = change, itertools.count(1)  # a number would be restored

    def forward(self, x):
        return self.change(next(self.calls), self.norm(self.inner(x)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda calls, x: x.double().sin() if calls > 1 else x.sin(),
            "a tensor of shape .*float32.* one of .*float64",
        ),
        (
            lambda calls, x: x.sin() if calls == 1 else x + 1,
            r"saved \d+ tensors for its backward, its recomputation",
        ),
    ],
)
def test_a_block_that_computes_something_else_is_refused(change, message):
    model = nn.Sequential(Fickle(change))
    memfit.apply(model, split("norm", modules="0"))
    with pytest.raises(CheckpointError, match=message):
        model(torch.ones(2, 6)).sum().backward()


def test_a_block_that_computes_gradients_in_its_forward_is_refused():
    def inner(_, x):
        (gradient,) = torch.autograd.grad(x.exp().sum(), x, retain_graph=True)
        return x.sin() * gradient

    model = nn.Sequential(Fickle(inner))
    memfit.apply(model, split("norm", modules="0"))
    with pytest.raises(CheckpointError, match="Leave out split_at"):
        model(torch.ones(2, 6)).sum().backward()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_reentrant": True}, "split_at needs use_reentrant=False"),
        ({"save_ops": "aten.addmm"}, r"\(save_ops\) cannot be recomputed in parts"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        split("norm", **settings)
    with pytest.raises(UsageError, match="regions name their own"):
        Checkpointing(regions=(memfit.Region("layers.0"),), split_at="norm")


def test_a_submodule_that_does_not_exist_is_named():
    with pytest.raises(
        UsageError, match=r"split_at='mlp': layers.0 has no such submodule. It has: dropout, "
    ):
        memfit.apply(net(), split("mlp"))


def test_tensors_that_the_forward_creates_are_on_its_default_device():
    model = nn.Sequential(Fickle(lambda _, x: (x + torch.zeros(6)).sin()))
    memfit.apply(model, split("norm", modules="0"))
    with torch.device("meta"):
        x = torch.ones(2, 6)
        loss = model.to("meta")(x).sum()
    loss.backward()
    assert all(each.grad.is_meta for each in model[0].inner.parameters())
