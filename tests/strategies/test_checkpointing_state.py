"""The recomputation uses the buffers and the random numbers of the forward."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from memfit.errors import UsageError
from memfit.strategies.checkpointing import Checkpointing, Region
from memfit.strategies.mechanisms.buffer_snapshots import BufferTracker
from support.checkpointed_blocks import MODES, NORMS, DropoutBlock, Ema, Net, compare, net


@MODES
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("backwards", [1, 2])
def test_buffers_change_once(norm, use_reentrant, backwards):
    """Row 23. Cumulative statistics and power iterations are also read, so their old values are needed."""
    settings = Checkpointing("layers.*", use_reentrant=use_reentrant)
    compare(net(norm), settings=settings, steps=3, backwards=backwards)


def test_only_buffers_that_change_are_copied():
    model = net(Ema)
    Checkpointing("layers.*").apply(model)
    region = model.layers[0].forward
    model(torch.randn(4, 6)).sum().backward()
    copied = region.buffer_tracker.snapshot(model.layers[0]).copies
    assert {name for _, name in copied} == {"mean", "calls"}
    tracker = BufferTracker("the first")
    first = tracker.snapshot(model.layers[0])
    model(torch.randn(4, 6))
    tracker.record_changes(first)
    assert first.copies.keys() == copied.keys()


def test_changed_buffers_are_recorded_for_each_mode():
    """Statistics change in training mode but not in eval mode. Here the mode changes between a forward and
    its backward, so that the recomputation runs in another mode."""
    model = net(NORMS["BatchNorm"])
    model.layers[0].eval()

    def call(model, x):
        y = model(x)
        model.train()
        return y

    compare(model, call=call, steps=3)


def test_a_buffer_first_replaced_in_a_later_step_is_restored():
    class Late(Ema):
        def forward(self, x):
            self.never = self.never * 2 if self.calls > 1 else self.never
            return super().forward(x)

    compare(net(Late), steps=4)


def test_a_late_write_to_a_buffer_is_warned_about():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.register_buffer("count", torch.zeros(()))
            self.write = False

        def forward(self, x):
            if self.write:
                self.count += 1
            return self.inner(x) + self.count

    model = nn.Sequential(Late())
    Checkpointing("0").apply(model)
    model(torch.ones(2, 6)).sum().backward()
    model[0].write = True
    with pytest.warns(UserWarning, match=r"0: this forward was the first to change count"):
        model(torch.ones(2, 6)).sum().backward()
    assert model[0].count == 2, "counted twice, as the warning states"
    model(torch.ones(2, 6)).sum().backward()
    assert model[0].count == 3


@MODES
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_draws_are_warned_about_without_preserve_rng_state(use_reentrant, p):
    """Row 25."""
    model = net()
    for layer in model.layers:
        layer.dropout.p = p
    Checkpointing("layers.0", use_reentrant=use_reentrant, preserve_rng_state=False).apply(model)
    if p:
        with pytest.warns(UserWarning, match=r"layers\.0 draws random numbers \(in layers\.0\.dropout\)"):
            model(torch.randn(4, 6))
    model(torch.randn(4, 6)).sum().backward()  # once is enough


class Scaled(DropoutBlock):
    """A block that draws from a generator other than PyTorch's, as stochastic depth does."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.generator = torch.Generator().manual_seed(3)
        self.own = [random.Random(3), np.random.default_rng(3), np.random.RandomState(3)]  # noqa: S311 - no secrets

    def forward(self, x):
        return super().forward(x * (self.draw or self.draw_own)())

    def draw_own(self):
        mask = torch.rand(6, generator=self.generator).round()
        return mask * self.own[0].random() * self.own[1].random() * self.own[2].randn()


def uniform():
    return np.random.rand()  # noqa: NPY002 - the global one


def normal():
    return np.random.randn()  # noqa: NPY002 - caches a second number, as random.gauss does


@MODES
@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: random.gauss(0, 1), uniform, normal, None],
    ids=["random", "gauss", "rand", "randn", "own generators"],
)
def test_python_and_numpy_draw_the_same_in_the_recomputation(use_reentrant, draw):
    def seeded(model, x):
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002 - the global one
        other = draw or random.random
        other()  # the generator caches the second of two Gaussian numbers
        return model(x), other()

    model = Net([Scaled(draw) for _ in range(2)])
    after = []

    def call(model, x):
        result, drawn = seeded(model, x)
        after.append(drawn)
        return result

    compare(model, settings=Checkpointing("layers.*", use_reentrant=use_reentrant, check=True), call=call)
    assert len(set(after)) == 1, "later draws are the same"


@MODES
def test_attributes_are_those_of_the_forward_in_the_recomputation(use_reentrant):
    """A count, an attribute that the loop sets between two forwards, and a layer that the first one makes."""

    class Counting(DropoutBlock):
        count = 0

        def __init__(self):
            super().__init__()
            self.scale, self.is_built = 1.0, False

        def forward(self, x):
            self.count += 1
            if not self.is_built:
                self.head, self.is_built = nn.Linear(6, 6), True
            return self.head(super().forward(x)) * self.scale / self.count

    def call(model, x):
        results = []
        for scale in (1.0, 2.0):
            for layer in model.layers:
                layer.scale = scale
            results.append(model(x))
        assert model.layers[0].count in (2, 4)
        return torch.cat(results)

    torch.manual_seed(1)
    compare(
        Net([Counting(), Counting()]),
        settings=Checkpointing("layers.*", use_reentrant=use_reentrant),
        call=call,
    )


@MODES
def test_backward_leaves_the_state_of_pythons_generator_unchanged(use_reentrant):
    model = Net([Scaled(random.random)])
    Checkpointing("layers.*", use_reentrant=use_reentrant).apply(model)
    loss = model(torch.ones(2, 6)).sum()
    before = random.getstate()
    loss.backward()
    assert random.getstate() == before


@MODES
def test_draws_from_python_are_warned_about_without_preserve_rng_state(use_reentrant):
    model = Net([Scaled(random.random)])
    for layer in model.layers:
        layer.dropout.p = 0.0
    Checkpointing("layers.*", use_reentrant=use_reentrant, preserve_rng_state=False).apply(model)
    with pytest.warns(UserWarning, match=r"layers\.0 draws random numbers"):
        model(torch.randn(4, 6))


class Lazy(DropoutBlock):
    """A block that creates its statistics in the first forward, and uses them from the second on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x):
        y = self.inner(x)
        if self.mean is None:
            self.mean = y.detach().mean(0)
        else:
            y = y - self.mean
        return y.tanh()


@MODES
def test_a_buffer_that_was_none_is_none_in_the_recomputation(use_reentrant):
    torch.manual_seed(1)
    compare(
        Net([Lazy(), Lazy()]), settings=Checkpointing("layers.*", use_reentrant=use_reentrant, check=True)
    )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_tensor_that_is_passed_twice_is_one_tensor_in_the_recomputation_too(use_reentrant):
    """nn.MultiheadAttention computes otherwise if its query, key and value are three tensors."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 4, 16)
    model(x).square().mean().backward()
    plain = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    Checkpointing("self_attn", use_reentrant=use_reentrant).apply(model)
    model(x).square().mean().backward()
    assert all(map(torch.equal, plain, (each.grad for each in model.parameters())))


@pytest.mark.parametrize(
    "settings",
    [
        Checkpointing("1"),
        Checkpointing("1", use_reentrant=True),
        Checkpointing(regions=[Region("1", split_at=["2"])]),
    ],
)
def test_a_parameter_changed_between_forward_and_backward_is_refused(settings):
    """A plain backward would not notice: it reads no bias."""
    model = nn.Sequential(
        nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
    )
    settings.apply(model)
    for _ in range(2):  # a change between two steps is what optimizers do
        loss = model(torch.randn(4, 6)).sum()
        loss.backward()
        with torch.no_grad():
            model[1][0].bias += 1
    loss = model(torch.randn(4, 6)).sum()
    with torch.no_grad():
        model[1][0].bias += 1
    with pytest.raises(
        UsageError, match=r"1 cannot be checkpointed: .* changes its parameter 0\.bias in place"
    ):
        loss.backward()
