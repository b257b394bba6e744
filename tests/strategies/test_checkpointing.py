"""Checkpointing changes no result: outputs and gradients equal those of plain training."""

import copy
import gc
import inspect
import pickle
import warnings
import weakref
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import nn

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.mechanisms.recompute_forward import CheckpointedForward
from memfit.strategies.plan import Plan
from memfit.train.engine import Engine
from support.checkpointed_blocks import (
    MODES,
    NORMS,
    DropoutBlock,
    Net,
    Shared,
    assert_same,
    compare,
    net,
    train,
)


def counted(model, name):
    """Count the forwards of a submodule, recomputations included."""
    calls = []
    model.get_submodule(name).register_forward_hook(lambda *_: calls.append(1))
    return calls


@MODES
def test_a_first_layer_gets_gradients_and_is_recomputed(use_reentrant):
    """Row 20: an input without gradient."""
    model = net()
    calls = counted(model, "layers.0.inner")
    compare(model, settings=Checkpointing("layers.*", use_reentrant=use_reentrant))
    assert len(calls) == 2 + 2 * 2, "2 steps of the plain copy, then 2 steps with 2 forwards each"
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


@MODES
def test_arguments_by_keyword_and_in_containers_get_gradients(use_reentrant):
    def call(model, x, scale, shift):
        # The tensor in the dictionary gets a gradient, too.
        return model.layers[1](model.layers[0](x, scale=scale, extra={"shift": shift}), None)

    scale, shift = torch.rand(6), nn.Parameter(torch.rand(6))
    model = net()
    grads = []
    for settings in (None, Checkpointing("layers.*", use_reentrant=use_reentrant)):
        shift.grad = None
        copied = copy.deepcopy(model)
        if settings:
            settings.apply(copied)
        torch.manual_seed(0)
        call(copied, torch.ones(4, 6), scale, shift).square().sum().backward()
        grads.append((shift.grad, *[p.grad for p in copied.layers[0].parameters()]))
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


class Exotic(nn.Module):
    """A module that returns a dictionary with None and numbers, and appends to a list argument."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x, seen):
        y = self.inner(x).tanh()
        seen.append(y.detach())
        return {"out": [y, None], "n": 3, "more": (y * 2,)}


@MODES
def test_results_in_containers_equal_those_of_the_forward(use_reentrant):
    def call(model, x):
        seen = []
        found = model(x, seen)
        assert found["n"] == 3
        assert found["out"][1] is None
        loss = found["out"][0] * found["more"][0]
        loss.square().mean().backward(retain_graph=True)
        assert len(seen) == 1, "the recomputation appended to the caller's list"
        return loss

    torch.manual_seed(3)
    model = nn.Sequential(Exotic())
    plain = train(copy.deepcopy(model[0]), call=call, steps=1)
    Checkpointing("Exotic", use_reentrant=use_reentrant).apply(model)
    assert_same(plain, train(model[0], call=call, steps=1))


@MODES
@pytest.mark.filterwarnings("ignore:Checkpointing .* saves no memory")
@pytest.mark.parametrize("norm", [None, *NORMS.values()], ids=["LayerNorm", *NORMS])
def test_nested_regions_train_as_without_checkpointing(use_reentrant, norm):
    """With check=True, too: the outer region ignores what an inner one does besides its forward."""
    inner = Checkpointing(("**.inner", "Dropout", "**.norm"), use_reentrant=use_reentrant)
    settings = Checkpointing("layers.*", use_reentrant=use_reentrant, check=True)
    # PyTorch refuses to keep results that are changed in place, as the spectral layer's result is.
    kept = [()] if use_reentrant or norm is NORMS["spectral"] else [(), ("aten.addmm",)]
    for outer_save_ops in kept:
        model = net(norm)
        inner.apply(model)
        compare(model, settings=replace(settings, save_ops=outer_save_ops))


@MODES
@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d(6, momentum=None)], ids=["LayerNorm", "BatchNorm"])
def test_modules_called_twice_train_as_without_checkpointing(use_reentrant, norm):
    torch.manual_seed(5)
    compare(Shared(norm), settings=Checkpointing("block", use_reentrant=use_reentrant))


@MODES
def test_the_recomputation_runs_under_the_same_autocast(use_reentrant):
    def call(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    compare(net(), call=call, settings=Checkpointing("layers.*", use_reentrant=use_reentrant, check=True))


@MODES
def test_without_gradients_nothing_is_recomputed(use_reentrant):
    model = net()
    calls = counted(model, "layers.0.inner")
    Checkpointing("layers.*", use_reentrant=use_reentrant).apply(model)
    with torch.no_grad():
        model(torch.randn(4, 6))
    assert not model.layers[0].forward.buffer_tracker._changed, "buffers are not even compared"
    model.layers[0].requires_grad_(False)
    model(torch.randn(4, 6)).sum().backward()
    assert len(calls) == 2
    compare(net(NORMS["BatchNorm"]).eval(), settings=Checkpointing("layers.*", use_reentrant=use_reentrant))


@MODES
def test_an_argument_changed_in_place_is_refused(use_reentrant):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x):
            return self.inner(x.relu_())

    model = nn.Sequential(nn.Linear(6, 6), Bare())
    Checkpointing("Bare", use_reentrant=use_reentrant).apply(model)
    with pytest.raises(UsageError, match=r"1 cannot be checkpointed: its forward changes argument 0 "):
        model(torch.randn(4, 6))


@MODES
def test_an_object_that_a_forward_changes_is_refused(use_reentrant):
    """Like the key-value caches that transformers passes to its layers."""

    class CachedLayer:
        keys = None

    class Cache:
        def __init__(self):
            self.layers = [CachedLayer()]

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x, cache, *, change=True):
            y = self.inner(x)
            if change:
                cache.layers[0].keys = y
            return y

    model = nn.Sequential(Attends())
    Checkpointing("0", use_reentrant=use_reentrant).apply(model)
    model[0](torch.randn(4, 6), Cache(), change=False).sum().backward()
    with pytest.raises(
        UsageError,
        match=r"0 cannot be checkpointed: .* changes an argument of type Cache\. .*use_cache=False",
    ):
        model[0](torch.randn(4, 6), Cache())


def test_kept_operations_are_not_recomputed():
    ran = []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    def addmms(settings):
        model = net()
        ran.clear()
        with Counting():
            compare(model, settings=settings, steps=1)
        return ran.count("aten.addmm.default")

    assert addmms(Checkpointing("layers.*")) == 3 + 6
    assert addmms(Checkpointing("layers.*", save_ops=("aten.addmm",))) == 3 + 3
    assert addmms(Checkpointing("layers.*", save_ops="aten.addmm.default", check=True)) == 3 + 3


def test_operations_that_a_module_does_not_run_are_named_once_and_recomputed():
    kept = ("aten.addmm.default:0", "aten.addmm.default:7", "aten.bmm.default:0")
    with pytest.warns(
        UserWarning, match=r"DropoutBlock .* 2 of the 3 .*addmm\.default:7, aten\.bmm"
    ) as warned:
        compare(net(), settings=Checkpointing("layers.0", save_ops=kept), steps=2)
    assert len(warned) == 1


# Dynamo reads .grad of non-leaf inputs, whatever wraps the module, and PyTorch warns about it.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("where", ["around", "inside", "in place", "before"])
@pytest.mark.parametrize("save_ops", [(), ("aten.addmm", "aten.mm")], ids=["all", "selective"])
def test_compiled_models_train_as_without_checkpointing(where, save_ops):
    model = net(NORMS["BatchNorm"])
    for layer in model.layers:
        layer.dropout.p = 0.0  # compiled code draws other random numbers
    plain = train(copy.deepcopy(model))
    compiled = model
    settings = Checkpointing("layers.*", save_ops=save_ops)
    if where == "before":
        compiled = torch.compile(model, backend="aot_eager")
        settings.apply(compiled)
    elif where == "around":
        settings.apply(model)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    elif where == "in place":
        settings.apply(model)
        model.compile(backend="aot_eager")
    else:
        for name, layer in model.layers.named_children():
            model.layers[int(name)] = torch.compile(layer, backend="aot_eager")
        settings.apply(model)
        # The compiled module holds the wrapper, so copies of that module have it, too.
        assert isinstance(model.layers[0]._orig_mod.forward, CheckpointedForward)
    found = train(compiled)
    assert_same(
        plain,
        {
            **found,
            **{k: {n.replace("_orig_mod.", ""): v for n, v in found[k].items()} for k in ("state", "grads")},
        },
    )


@pytest.mark.filterwarnings("ignore:.*BatchNorm layers")
def test_running_out_of_memory_in_a_recomputation_leaves_no_trace():
    """The engine repeats the batch in smaller parts, as if the recomputation had not begun."""

    class Short(DropoutBlock):
        left = (0,)

        def forward(self, x):
            if self.left[0]:
                self.left[0] -= 1
                if not self.left[0]:
                    raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x)

    def stepped(plan, *, left=0):
        torch.manual_seed(3)
        model = Net([Short(norm=nn.BatchNorm1d(6)) for _ in range(2)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = Engine(model, plan, optimizer=optimizer, loss=lambda m, x: m(x).square().mean())
        torch.manual_seed(4)
        x = torch.randn(8, 6)
        model.layers[0].left = [left]
        results = [engine.step(x) for _ in range(2)]
        assert results[0].retried == (left > 0)
        return {**model.state_dict(), "loss": torch.tensor([float(result.loss) for result in results])}

    settings = Checkpointing("Short")
    plan = Plan(accumulation=Accumulation(parts_per_batch=2), checkpointing=settings)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
    assert_equal(stepped(plan), stepped(Plan(accumulation=Accumulation(parts_per_batch=2))))
    # Plain training runs out of memory in the first forward, checkpointed training in its recomputation.
    assert_equal(stepped(Plan(checkpointing=settings), left=2), stepped(Plan(), left=1))


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def test_copies_and_pickles_are_checkpointed_too():
    model = net()
    plain = train(copy.deepcopy(model))
    Checkpointing("layers.*").apply(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - pickled here
        calls = counted(copied, "layers.1.inner")
        assert copied.layers[1].forward.module is copied.layers[1]
        assert_same(plain, train(copied))
        assert len(calls) == 4


def test_reverting_leaves_no_trace_and_models_are_freed_at_once():
    model = net()
    before = copy.deepcopy(model.state_dict())
    signature = inspect.signature(model.layers[0].forward)
    revert = Checkpointing().apply(model)
    assert all(isinstance(layer.forward, CheckpointedForward) for layer in model.layers)
    assert inspect.signature(model.layers[0].forward) == signature
    assert model.state_dict().keys() == before.keys()
    with pytest.raises(UsageError, match="is already checkpointed"):
        Checkpointing("layers.1").apply(model)
    revert()
    assert all("forward" not in layer.__dict__ for layer in model.layers)
    own = model.layers[1].forward
    model.layers[1].forward = own
    Checkpointing("layers.1").apply(model)()
    assert model.layers[1].__dict__["forward"] is own
    del model.layers[1].forward, own, revert
    Checkpointing().apply(model)
    model(torch.ones(4, 6)).sum().backward()
    alive = weakref.ref(model.layers[0])
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({}, [0, 1, 2, 3]),
        ({"every": 2}, [0, 2]),
        ({"modules": "layers.3"}, [3]),
        ({"modules": ["DropoutBlock"], "every": 3}, [0, 3]),
        ({"modules": ("layers.1", "layers.0")}, [0, 1]),
    ],
)
def test_modules_are_selected_by_pattern_and_interval(settings, chosen):
    model = net(layers=4)
    Checkpointing(**settings).apply(model)
    assert [
        n
        for n, layer in enumerate(model.layers)
        if isinstance(layer.__dict__.get("forward"), CheckpointedForward)
    ] == chosen


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Checkpointing("layer.*").apply(net()),
            r"no module of Net has the name or class 'layer\.\*'. Nearest: .*layers",
        ),
        (
            lambda: Checkpointing("layers").apply(net()),
            r"layers is a ModuleList, which has no forward; .*'layers\.\*'\?",
        ),
        (lambda: Checkpointing().apply(nn.Linear(2, 2)), "Linear has no list of repeated blocks"),
        (lambda: Checkpointing(every=0), "'every' must be an integer of at least 1, not 0"),
        (
            lambda: Checkpointing(save_ops=("aten.mn",)),
            "'aten.mn' is not a PyTorch operation. Nearest: aten[.]m",
        ),
        (lambda: Checkpointing(save_ops=("mm",)), "'mm' is not a PyTorch operation"),
        (
            lambda: Checkpointing(save_ops=("aten.mm",), use_reentrant=True),
            "save_ops needs use_reentrant=False",
        ),
    ],
)
def test_invalid_settings_are_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_checkpointing_that_saves_nothing_warns():
    class Straight(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))

    with pytest.warns(UserWarning, match=r"blocks\.0, .*, blocks\.3 saves no memory: a single Conv2d"):
        Checkpointing("blocks.*").apply(Straight())
    with warnings.catch_warnings(action="error"):
        Checkpointing("layers.*").apply(net())
        Checkpointing("lstm").apply(nn.ModuleDict({"lstm": nn.LSTM(2, 2)}))
