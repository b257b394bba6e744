"""Offload changes no value: tensors come back as they were saved, and none is read too early."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.errors import UsageError
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.mechanisms.host_copies import HostCopier
from memfit.strategies.mechanisms.saved_tensor_offload import SavedTensorOffloader
from memfit.strategies.offload import Offload
from memfit.strategies.plan import Plan
from support.late_stream import LateStream


class GatedBlock(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(width), nn.Linear(width, 3 * width)
        self.register_buffer("mask", torch.randn(4, width))

    def forward(self, x):
        a, b, c = self.inner(self.norm(x)).chunk(3, dim=1)
        return x + (a.sigmoid() * b.tanh() * self.mask).exp_() * c.t().contiguous().t()


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(GatedBlock() for _ in range(4)))


def train(model, steps=3):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return {**model.state_dict(), **{f"grad {name}": p.grad for name, p in model.named_parameters()}}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def late(monkeypatch):
    """Have Offload move tensors on the CPU, by copies that are made late."""
    made = []

    def copies(self, device):
        made.append(LateStream() if self.prefetch else HostCopier(device, pin_memory=False))
        return made[-1]

    monkeypatch.setattr(Offload, "copies", copies)
    return made


@pytest.mark.parametrize("prefetch", [0, 1, 3, 100])
@pytest.mark.parametrize(
    "strategies",
    [
        [Offload(min_bytes=0)],
        [Offload("GatedBlock", min_bytes=0)],
        [Checkpointing("GatedBlock"), Offload(what="inputs", min_bytes=0)],
        [Checkpointing("GatedBlock", use_reentrant=True), Offload(what="inputs", min_bytes=0)],
        [Checkpointing("GatedBlock", every=2, save_ops="aten.addmm"), Offload(min_bytes=0)],
    ],
    ids=["whole", "blocks", "inputs", "inputs, reentrant", "with checkpointing"],
)
def test_results_are_those_of_plain_training(late, strategies, prefetch):
    model = net()
    plain = train(copy.deepcopy(model))
    *others, offload = strategies
    reverts = [strategy.apply(model) for strategy in others]
    reverts.append(Offload(offload.modules, offload.what, offload.min_bytes, prefetch=prefetch).apply(model))
    offloader = model.forward.around.offloader
    assert same(plain, train(model))
    assert offloader.count > 0
    for revert in reversed(reverts):
        revert()
    assert all("forward" not in module.__dict__ for module in model.modules())


def moved(late, forward, *, min_bytes=0, owner=None):
    """Run a forward that offloads; return the offloader, its stream and the loss."""
    offloader = SavedTensorOffloader(lambda _: late_stream, min_bytes, 1)
    late_stream = LateStream()
    offloader.begin_forward(owner or nn.Module())
    with offloader.hooks():
        loss = forward()
    return offloader, late_stream, loss


def test_a_storage_moves_once_and_parameters_stay(late):
    layer = nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    base = torch.randn(4, 16, requires_grad=True) * 1

    def forward():
        a, b = base.chunk(2, dim=1)  # one storage, three tensors on it
        return (layer(x[None]) * a * b * b).sum()

    offloader, stream, loss = moved(late, forward, owner=layer)
    # x, the base, and three products; not the weight, nor its transpose.
    assert offloader.count == 5
    loss.backward()
    assert stream.log.count("out") == 5
    assert offloader.count == 5


@pytest.mark.parametrize("min_bytes", [0, 2**20], ids=["moves", "stays"])
@pytest.mark.parametrize("others", [0, 3])
def test_a_write_after_saving_is_refused(late, min_bytes, others):
    """As in plain autograd, which leaves the check to the hooks. A copy could mix old and new values."""
    x = torch.rand(5, requires_grad=True)

    def run():
        y = x * 1
        z = y * y  # saves y
        y.add_(1)
        for _ in range(others):
            z = z.exp()
        return z.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run().backward()
    _, _, loss = moved(late, run, min_bytes=min_bytes)
    with pytest.raises(RuntimeError, match=r"of shape \[5\], has been modified by an inplace operation"):
        loss.backward()


def test_a_write_after_the_copy_is_allowed_and_the_new_value_is_copied_too(late):
    """Both values are right: the copy is complete before the write, and the later value is moved, too."""
    x = torch.rand(5, requires_grad=True)

    def run():
        y = x * 1
        z = (y * y).exp()  # saves y, then another tensor, so that the copy of y is complete
        y.mul_(2)
        return (z + y * y.detach()).sum()

    offloader, _, loss = moved(late, run)
    loss.backward()
    assert offloader.count == 3
    torch.testing.assert_close(x.grad, (2 * x * (x * x).exp() + 4 * x).detach())


def test_parts_that_are_not_views_are_moved_separately(late):
    """As recurrent layers split their gates: each part is written to and has its own version counter."""
    x = torch.rand(4, 6, requires_grad=True)

    def run():
        first, second = (x * 1).unsafe_chunk(2, dim=1)
        first = first.mul_(2).sigmoid_()
        y = first * first
        second = second.mul_(3).sigmoid_()
        return (y + second * second).sum()

    run().backward()
    plain, x.grad = x.grad, None
    offloader, _, loss = moved(late, run)
    loss.backward()
    assert torch.equal(x.grad, plain)
    assert offloader.count == 2, "each part is saved twice and moved once"


def test_a_second_backward_gives_the_same_gradients(late):
    x = torch.rand(5, requires_grad=True)
    _, stream, loss = moved(late, lambda: x.exp().exp().exp().sum())
    loss.backward(retain_graph=True)
    first, x.grad = x.grad, None
    loss.backward()
    assert torch.equal(x.grad, first)
    assert stream.log.count("back") == 4


def test_the_device_holds_only_storages_that_are_being_copied_or_used(late):
    """After the forward the last storage is still on the device; once the graph is freed, none is."""
    made = []

    def forward():
        y = torch.rand(100, requires_grad=True)
        for _ in range(6):
            y = y.exp()  # saves its result
            made.append(StorageWeakRef(y.untyped_storage()))
        return y.sum()

    def on_device():
        return [not storage.expired() for storage in made]

    _, stream, loss = moved(late, forward)
    assert on_device() == [False] * 5 + [True]
    loss.backward()
    del loss
    assert not any(on_device())
    # One copy is in flight while the next tensor is computed; in backward, while the previous one is used.
    assert stream.log == ["out", *["out", "wait"] * 5, *["back", "wait"] * 5]
    gc.disable()
    try:
        _, _, loss = moved(late, forward)
        del loss  # dropped without backward
        assert not any(on_device())
    finally:
        gc.enable()


def test_an_unused_prefetch_is_held_until_it_completes(late):
    def forward():
        y = torch.rand(100, requires_grad=True)
        z = y.exp().exp()
        return z.exp(), z

    offloader, _, (last, z) = moved(late, forward)
    assert last.grad_fn._saved_result is not None  # this read prefetches the storage before it
    lane = offloader._lanes[torch.device("cpu")]
    assert len(lane._arriving) == 1
    pending = weakref.ref(next(iter(lane._arriving)).fetched)
    del last, z
    assert pending() is not None
    offloader.begin_forward(nn.Module())
    assert pending() is None


def test_on_the_cpu_offload_warns_once():
    model = net()
    plain = train(copy.deepcopy(model))
    Offload().apply(model)
    with pytest.warns(UserWarning, match="does nothing here") as caught:
        assert same(plain, train(model))
    assert len(caught) == 1


def test_offload_warns_when_nothing_is_large_enough(late):
    model = net()
    Offload(min_bytes=2**20).apply(model)
    with pytest.warns(UserWarning, match=r"moved nothing to the host: .*min_bytes \(1,048,576 B\)") as caught:
        train(model)
    assert len(caught) == 1


def test_without_gradients_nothing_moves(late):
    model = net()
    Offload(min_bytes=0).apply(model)
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert model.forward.around.offloader.count == 0


def test_copies_and_pickles_have_their_own_offloader(late):
    model = net()
    plain = train(copy.deepcopy(model))
    Offload("GatedBlock", min_bytes=0).apply(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - pickled here
        offloaders = {id(block.forward.around.offloader) for block in copied}
        assert offloaders == {id(copied.forward.around.offloader)} != {id(model.forward.around.offloader)}
        assert same(plain, train(copied))


@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_models_are_offloaded(late, where):
    model = net()
    plain = train(copy.deepcopy(model))
    if where == "inside":
        for name, block in model.named_children():
            setattr(model, name, torch.compile(block, backend="aot_eager"))
    Offload("GatedBlock", min_bytes=0).apply(model)
    run = torch.compile(model, backend="aot_eager") if where == "around" else model
    found = {name.replace("_orig_mod.", ""): value for name, value in train(run).items()}
    assert same(plain, found)
    assert model.forward.around.offloader.count > 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Offload(what="all"), "must be one of activations, inputs, not 'all'"),
        (lambda: Offload(min_bytes=-1), "'min_bytes' must be an integer of at least 0, not -1"),
        (lambda: Offload(prefetch=True), "'prefetch' must be an integer, not True"),
        (lambda: Offload(pin_memory=False), "prefetch needs pin_memory"),
        (
            lambda: Offload("GatedBlok").apply(net()),
            "offload: no module of Sequential has the name or class 'GatedBlok'. Nearest: GatedBlock",
        ),
        (lambda: Offload(what="inputs").apply(net()), "none of the selected modules is checkpointed"),
        (lambda: Plan(offload=Offload(what="inputs")), "the plan has no checkpointing"),
    ],
)
def test_invalid_settings_are_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_modules_inside_a_checkpointed_one_cannot_be_offloaded():
    model = net()
    Checkpointing("GatedBlock").apply(model)
    with pytest.raises(UsageError, match=r"0\.inner, because it is inside the checkpointed module 0\."):
        Offload("**.inner").apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Offload("GatedBlock").apply(model)
