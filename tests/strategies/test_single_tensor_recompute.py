"""Tensors that are recomputed one by one: those of plain training, and only while they are needed."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit.errors import UsageError
from memfit.recording.step_operations import StepOperationRecorder
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.mechanisms import single_tensor_recompute
from memfit.strategies.mechanisms.single_tensor_recompute import recompute_single_tensors
from support.checkpointed_blocks import NORMS, Shared, assert_same, compare, differentiated_twice, net, train

BIG = 1 << 14
"""Elements of a tensor that is not kept for being small."""


@pytest.fixture(autouse=True)
def _nothing_is_small(monkeypatch):
    monkeypatch.setattr(single_tensor_recompute, "LEAST_RECOMPUTED", 1)


def tensors(modules="layers.*", **settings):
    return Checkpointing(modules, recompute="tensors", **settings)


def whole(**settings):
    return Checkpointing(regions=(memfit.Region("", recompute="tensors", **settings),))


SETTINGS = pytest.mark.parametrize(
    "settings",
    [tensors(), tensors(save_ops="aten.addmm"), whole(), whole(save_ops="aten.relu_.default:1")],
    ids=["blocks", "products kept", "whole", "one result written in place kept"],
)


@SETTINGS
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_gradients_buffers_and_random_numbers_are_those_of_plain_training(norm, settings):
    compare(net(norm), settings=settings, steps=3, backwards=2)


@SETTINGS
def test_keywords_containers_and_a_frozen_first_layer(settings):
    def call(model, x):
        return model(x) if settings.regions else _layer_by_layer(model, x)

    model = net()
    model.layers[0].inner.requires_grad_(requires_grad=False)
    compare(model, settings=settings, call=call)


def _layer_by_layer(model, x):
    for layer in model.layers:
        x = layer(x, x, extra={"shift": x})
    return x


def test_a_block_called_twice_and_tied_weights():
    torch.manual_seed(1)
    compare(Shared(), settings=tensors("block"), steps=3)


def test_autocast_is_that_of_the_forward():
    def call(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float()

    compare(net(), settings=whole(), call=call)


def test_gradients_of_gradients():
    model = net()
    plain = differentiated_twice(copy.deepcopy(model))
    whole().apply(model)
    assert all(map(torch.equal, plain, differentiated_twice(model)))


class Writing(nn.Module):
    """Writes in place to what was read before: to a part, to its own copy, and to a buffer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        y = self.inner(x)
        first = (y + self.scale).sigmoid()
        self.scale.mul_(0.5)  # first was made with the scale before
        second = y * 2.0
        third = second + 1.0  # of what second was
        second[:, :3].mul_(third.detach()[:, :3])
        second.add_(second)
        joined = torch.cat([first, second, third], dim=1)
        left, right = joined.tanh().chunk(2, dim=1)
        return (left * right).sin()


def test_each_operation_reads_what_its_arguments_held_in_the_forward():
    torch.manual_seed(1)
    for settings in (whole(), whole(save_ops="aten.mul.Tensor:1"), whole(save_ops="aten.cat")):
        compare(Writing(), settings=settings, steps=2, backwards=2)


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_an_operation_runs_again_once_and_only_if_needed():
    x = torch.ones(BIG, requires_grad=True)
    y = recompute_single_tensors(
        lambda operation: "exp" in str(operation), lambda: (x.sin().exp() * x.cos()).sigmoid().tanh()
    )
    with Counting() as seen:
        y.sum().backward()
    again = [each for each in seen.names if each in ("sin", "exp", "cos", "sigmoid", "tanh")]
    # x.sin and x.cos are also what the derivatives of x.cos and x.sin consist of.
    assert again == ["cos", "sigmoid", "tanh", "sin", "cos"]


def test_an_operation_runs_again_in_the_grad_mode_of_the_forward():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.lstm = nn.Linear(6, 8), nn.LSTM(8, 6)  # oneDNN makes a workspace for backward

        def forward(self, x):
            return self.lstm(self.inside(x))[0]

    torch.manual_seed(1)
    compare(Last(), settings=whole(), steps=2)


def test_what_is_made_again_exists_only_until_it_has_been_used():
    """Sixteen layers, every fourth kept: backward holds three results that are not, and a gradient."""
    x = torch.zeros(1 << 18, requires_grad=True)
    model = nn.Sequential(*(nn.Sigmoid() for _ in range(16)))
    most = {}
    for kept in ((), tuple(f"aten.sigmoid.default:{number}" for number in (3, 7, 11, 15))):
        memfit.apply(model, whole(save_ops=kept))
        recorder = StepOperationRecorder(model)
        recorder.start()
        model(x).sum().backward()
        step = recorder.stop()
        most[len(kept)] = max(each.allocated for each in step.backward) >> 20
        memfit.revert(model)
        del recorder, step
    assert most == {0: 17, 4: 8}  # in MiB; four kept, three made again, and a gradient


def test_nothing_that_the_backward_does_not_need_stays_after_the_forward():
    x = torch.ones(BIG, requires_grad=True)
    gc.disable()
    try:
        ends = []

        def forward():
            middle = x * 2.0
            ends.append(torch.multiprocessing.reductions.StorageWeakRef(middle.untyped_storage()))
            return middle + 1.0

        result = recompute_single_tensors(lambda operation: "mul" in str(operation), forward)
        assert ends[0].expired()
        del result
    finally:
        gc.enable()


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_forward_without_a_backward_is_freed(is_kept):
    """As that of a generator whose images are detached."""
    x = torch.ones(BIG, requires_grad=True)
    gc.disable()
    try:
        result = recompute_single_tensors(lambda _: is_kept, lambda: (x * 2.0).relu().tanh())
        end = torch.multiprocessing.reductions.StorageWeakRef(result.untyped_storage())
        del result
        assert end.expired()
    finally:
        gc.enable()


def test_results_that_may_not_be_the_same_again_are_kept():
    x = torch.ones(BIG, requires_grad=True)

    def forward():
        drawn, _ = torch.native_dropout(x.sin(), 0.5, train=True)
        noise = torch.empty_like(x).bernoulli_(0.5)
        return functional.dropout(drawn * noise, 0.25).sin()

    results = []
    for run in (forward, lambda: recompute_single_tensors(lambda _: False, forward)):
        torch.manual_seed(4)
        x.grad = None
        run().sum().backward()
        results.append((x.grad, torch.get_rng_state()))
    assert all(map(torch.equal, *results))


def test_what_is_filled_past_the_dispatcher_is_kept():
    def forward():
        filled = torch.empty(BIG)
        filled.numpy()[:] = 3.0
        return x * filled

    x = torch.ones(BIG, requires_grad=True)
    recompute_single_tensors(lambda _: False, forward).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_what_a_triton_kernel_may_have_written_to_is_kept(monkeypatch):
    """As Liger's loss does, which writes the logits' gradient in place of them."""
    jit = pytest.importorskip("triton.runtime.jit")
    monkeypatch.setattr(jit.JITFunction, "run", lambda _kernel, tensor, **_: tensor.numpy().__imul__(2.0))
    kernel = object.__new__(jit.JITFunction)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            jit.JITFunction.run(kernel, y.detach(), warmup=False)
            ctx.save_for_backward(y)
            return y.sum()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    def forward():
        y = x * 3.0
        return (y + 1.0).sin().sum() + Doubled.apply(y)  # the sine needs what y held before

    made = []
    for run in (
        forward,
        lambda: recompute_single_tensors(lambda _: False, forward),
        lambda: recompute_single_tensors(kept, forward),
    ):
        x = torch.ones(BIG, requires_grad=True)
        run().backward()
        made.append(x.grad)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


def kept(operation):
    return "mul" in str(operation)


def test_what_is_written_to_in_place_is_not_lost_for_others():
    def forward():
        y = x * 1.0
        before = (y + 1.0).sin()
        y.mul_(2.0)
        return y.sin() + before  # the backward of the second sine begins

    x = torch.ones(BIG, requires_grad=True)
    recompute_single_tensors(lambda _: False, forward).sum().backward()
    made, x.grad = x.grad, None
    forward().sum().backward()
    assert torch.equal(made, x.grad)


def test_a_kept_tensor_that_changes_after_the_forward_is_noticed():
    x = torch.ones(BIG, requires_grad=True)
    for use in (torch.sin, lambda y: (y * y).sigmoid()):  # saved itself; read by what is made again
        y = x * 1.0
        result = recompute_single_tensors(lambda _: False, lambda use=use, y=y: use(y))
        with torch.no_grad():
            y.add_(1.0)
        with pytest.raises(RuntimeError, match="was changed in place after the forward used it"):
            result.sum().backward()


def test_a_parameter_whose_memory_was_freed_is_noticed():
    weight = torch.ones(BIG, requires_grad=True)
    result = recompute_single_tensors(lambda _: False, lambda: (weight * 2.0).sigmoid().sin())
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="as FSDP frees parameters"):
        result.sum().backward()


def test_many_operations_in_a_row():
    x = torch.ones(BIG // 4, requires_grad=True)

    def forward():
        y = x
        for _ in range(3000):
            y = y + 0.0
        return y.sin()

    recompute_single_tensors(lambda _: False, forward).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_small_results_are_kept(monkeypatch):
    monkeypatch.setattr(single_tensor_recompute, "LEAST_RECOMPUTED", 1 << 14)
    again = {}
    for elements in (1 << 12, 1 << 11):
        x = torch.ones(elements, requires_grad=True)
        result = recompute_single_tensors(lambda _: False, lambda x=x: x.sigmoid())
        with Counting() as seen:
            result.sum().backward()
        again[elements] = "sigmoid" in seen.names
    assert again == {1 << 12: True, 1 << 11: False}


def test_an_operation_that_is_not_there_is_named():
    model = net()
    memfit.apply(model, whole(save_ops="aten.addmm.default:7"))
    with pytest.warns(UserWarning, match="did not run 1 of the 1 operations"):
        train(model)


def test_equal_blocks_that_do_not_run_an_operation_are_warned_about_once():
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(3)))
    region = memfit.Region(("0", "1", "2"), save_ops=("aten.tanh.default:0",), recompute="tensors")
    memfit.apply(model, memfit.Checkpointing(regions=(region,)))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        model(torch.ones(2, 8))
    assert [str(each.message).partition(":")[2][:43] for each in shown] == [
        " Sequential did not run 1 of the 1 operatio"
    ]


def test_copies_of_a_model_are_recomputed_too():
    model = net()
    whole().apply(model)
    assert_same(train(copy.deepcopy(model)), train(model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_reentrant": True}, "Leave out use_reentrant and check"),
        ({"check": True}, "Leave out use_reentrant and check"),
        ({"split_at": "norm"}, "cannot be recomputed in parts"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        tensors(**settings)
    with pytest.raises(UsageError, match="regions name their own"):
        Checkpointing(regions=(memfit.Region("layers.0"),), recompute="tensors")
