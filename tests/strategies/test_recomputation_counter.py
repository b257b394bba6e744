"""How many operations a step runs, recomputes, and recomputes in spite of a plan."""

import copy
import io
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from memfit import Checkpointing, Region
from memfit.patching.installed_hooks import InstalledHooks
from memfit.records import OperationCounts
from memfit.strategies.mechanisms.recomputation_counter import OperationCounter
from memfit.strategies.mechanisms.selective_checkpointing import KeptResults
from support.torch_release import RELEASE

BLOCK = 3  # its operations: a transposed weight, a product, a GELU; the last one need not run again


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def count():
    """Return a function that makes a counter, and the list of what it counts."""
    hooks = InstalledHooks()

    def make(model, *, in_backward=False):
        found = []
        counter = OperationCounter(
            lambda counts, again, _: found.append((counts, again)), in_backward=in_backward
        )
        counter.install(hooks)
        counter.watch(model)
        return found

    yield make
    hooks.remove()


def step(model, optimizer=None, inputs=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters())
    inputs = torch.ones(256, 64) if inputs is None else inputs
    model(inputs).sin().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_model_that_compiles_a_part_in_its_first_call_is_not_counted(count):
    """Inductor's graphs dispatch nothing. Before PyTorch 2.14, nothing is compiled in the first step."""
    model = Net()
    model.blocks[0].compile(backend="eager")
    found = count(model)
    for _ in range(2):
        step(model)
    assert [counts.forward for counts, _ in found] == ([] if RELEASE >= (2, 14) else [4 * BLOCK])


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_backward_in_another_thread_is_counted(count, in_backward):
    model = Net()
    Checkpointing(save_ops="aten.addmm").apply(model)
    found = count(model, in_backward=in_backward)
    loss = model(torch.ones(256, 64)).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    torch.optim.SGD(model.parameters()).step()
    ((counts, again),) = found
    assert (counts.recomputed, again) == (4 * (BLOCK - 2), {})


@pytest.mark.parametrize(
    ("settings", "recomputed"),
    [
        (None, 0),
        (Checkpointing(), 4 * (BLOCK - 1)),
        (Checkpointing(save_ops="aten.addmm"), 4 * (BLOCK - 2)),
        (Checkpointing(use_reentrant=True), 4 * BLOCK),
        (Checkpointing(regions=[Region(("blocks.0", "blocks.2"))]), 2 * (BLOCK - 1)),
        # The second part, up to what it saves, and the first one.
        (Checkpointing(regions=[Region(("blocks.0",), split_at=("1",))]), (BLOCK - 1) + 1),
        (Checkpointing(regions=[Region(("",), save_ops=("aten.addmm",), recompute="tensors")]), 3),
    ],
)
def test_the_first_step_is_counted(count, settings, recomputed):
    model = Net()
    if settings is not None:
        settings.apply(model)
    found = count(model)
    for _ in range(2):
        step(model)
    assert found == [(OperationCounts(4 * BLOCK, recomputed), {})]


def test_where_generators_are_is_read_without_operations(count):
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout())
    Checkpointing(regions=[Region(("",), recompute="tensors")]).apply(model)
    found = count(model)
    step(model)
    assert found[0][0].forward == 5  # a transposed weight, a product, and a dropout's three


def test_the_backward_s_operations_are_those_of_plain_training(count):
    plain, model = Net(), Net()
    Checkpointing().apply(model)
    first, second = count(plain, in_backward=True), count(model, in_backward=True)
    step(plain)
    step(model)
    (one, _), (other, _) = *first, *second
    assert one.recomputed == 0
    assert other == OperationCounts(one.forward, 4 * (BLOCK - 1), one.backward)
    assert one.backward > one.forward


def test_kept_results_that_run_again_are_named(count, monkeypatch):
    monkeypatch.setattr(KeptResults, "recomputation", lambda _: nullcontext())
    model = Net()
    Checkpointing(save_ops="aten.addmm.default:0").apply(model)
    found = count(model)
    step(model)
    assert found == [(OperationCounts(4 * BLOCK, 4 * (BLOCK - 1)), {"aten.addmm.default": 4})]


def test_results_that_the_forward_did_not_keep_are_named(count, monkeypatch):
    monkeypatch.setattr(KeptResults, "_keep", lambda _, operation, args, kwargs: operation(*args, **kwargs))
    model = Net()
    Checkpointing(save_ops="aten.addmm").apply(model)
    found = count(model)
    step(model)
    assert found[0][1] == {"aten.addmm.default": 4}


def test_micro_batches_before_an_update_are_counted_together(count):
    model = Net()
    Checkpointing().apply(model)
    found = count(model)
    for _ in range(2):
        model(torch.ones(8, 64)).sum().backward()
    torch.optim.SGD(model.parameters()).step()
    assert found == [(OperationCounts(2 * 4 * BLOCK, 2 * 4 * (BLOCK - 1)), {})]


def test_an_update_of_another_model_ends_nothing(count):
    """A discriminator learns from what the generator makes, before the generator learns."""
    model, other = Net(), nn.Linear(64, 64)
    Checkpointing().apply(model)
    found = count(model)
    made = model(torch.ones(8, 64))
    optimizer = torch.optim.SGD(other.parameters())
    other(made.detach()).sum().backward()
    optimizer.step()
    assert not found
    other(made).sum().backward()
    torch.optim.SGD(model.parameters()).step()
    assert found == [(OperationCounts(4 * BLOCK, 4 * (BLOCK - 1)), {})]


def test_what_runs_without_gradients_or_outside_of_the_model_is_not_counted(count):
    model = Net()
    found = count(model)
    with torch.no_grad():
        model(torch.ones(8, 64))
    torch.ones(8).exp()
    step(model, inputs=torch.ones(8, 64).exp())
    assert found[0][0].forward == 4 * BLOCK


def test_copies_and_pickles_are_of_the_model_alone(count):
    model = Net()
    found = count(model)
    step(copy.deepcopy(model))
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    step(torch.load(stored, weights_only=False))
    assert not found
    step(model)
    assert len(found) == 1


def test_nothing_is_counted_where_a_model_is_compiled(count):
    model = Net()
    found = count(model)
    step(torch.compile(model, backend="aot_eager", fullgraph=True))
    step(model)
    assert not found


def test_only_recomputations_and_forwards_run_under_a_dispatch_mode(count):
    """Under one, autograd adds up gradients out of place: the peak would be another one."""
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, gradient):
            seen.append(torch._C._len_torch_dispatch_stack())
            return gradient

    for in_backward in (False, True):
        model = Net()
        Checkpointing(save_ops="aten.addmm").apply(model)
        count(model, in_backward=in_backward)
        Watched.apply(model(torch.ones(8, 64))).sum().backward()
        torch.optim.SGD(model.parameters()).step()
    assert seen == [0, 1]
