"""``memfit.checkpoint``: a checkpointed call of a function equals the plain call, bit for bit."""

import copy
import functools
import gc
import random
import weakref

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import UsageError

pytestmark = pytest.mark.filterwarnings("error")


def build():
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.ReLU(), nn.Linear(8, 4))
        for _ in range(3)
    )


SHARED = build()


class Trainer:
    """An object that holds a module, and a method that uses it."""

    def __init__(self, blocks):
        self.blocks = blocks

    def run(self, x):
        return self.blocks[0](x)


def through_globals(x):
    return SHARED[0](x)


def by_argument(block, x, *, scale=1.0):
    return block(x) * scale * random.random()  # noqa: S311 - any generator


WAYS = {
    "a closure": lambda blocks: (lambda x: blocks[0](x).sin(),),
    "an argument": lambda blocks: (by_argument, blocks[0]),
    "a partial": lambda blocks: (functools.partial(by_argument, blocks[0], scale=2.0),),
    "a module": lambda blocks: (blocks[0],),
    "a method of a module": lambda blocks: (blocks[0].forward,),
    "a method of an object": lambda blocks: (Trainer(blocks).run,),
    "a function in a closure": lambda blocks: (lambda x, run=(lambda y: blocks[0](y).cos()): run(x),),
}


def trained(blocks, call):
    """Return gradients, buffers and random numbers after two steps."""
    torch.manual_seed(1)
    random.seed(1)
    x = torch.randn(6, 4, requires_grad=True)
    for _ in range(2):
        for _ in range(2):
            call(x).square().sum().backward()
    found = [x.grad, *(each.grad for each in blocks[0].parameters()), *blocks[0].buffers()]
    return [*found, torch.rand(3), torch.tensor(random.random())]  # noqa: S311


@pytest.mark.parametrize("way", WAYS)
def test_gradients_buffers_and_random_numbers_equal_a_plain_call(way):
    plain, ours = build(), build()
    function, *args = WAYS[way](plain)
    expected = trained(plain, lambda x: function(*args, x))
    checkpointed, *others = WAYS[way](ours)
    found = trained(ours, lambda x: memfit.checkpoint(checkpointed, *others, x))
    assert all(map(torch.equal, found, expected))


def test_modules_among_the_globals_are_found():
    before = copy.deepcopy(SHARED)
    memfit.checkpoint(through_globals, torch.randn(6, 4, requires_grad=True)).sum().backward()
    assert int(SHARED[0][1].num_batches_tracked) == int(before[0][1].num_batches_tracked) + 1


def test_intermediate_results_are_dropped_and_computed_again():
    calls, kept = [], []

    def function(x, factor):
        calls.append(1)
        hidden = (x * factor).sin()
        kept.append(weakref.ref(hidden))
        return hidden.exp()

    result = memfit.checkpoint(function, torch.ones(3, requires_grad=True), factor=2.0)
    gc.collect()
    assert (len(calls), kept[0]()) == (1, None)
    result.sum().backward()
    assert len(calls) == 2


def test_selected_operations_are_kept():
    weight = torch.ones(3, 3, requires_grad=True)
    results = []
    for settings in (None, memfit.Checkpointing(save_ops="aten.mm"), memfit.Checkpointing(check=True)):
        x = torch.ones(2, 3, requires_grad=True)
        memfit.checkpoint(lambda x: (x @ weight).sin(), x, settings=settings).sum().backward()
        results.append(x.grad)
    assert all(torch.equal(results[0], each) for each in results)


def test_an_argument_that_is_changed_in_place_is_refused():
    with pytest.raises(UsageError, match=r"<lambda> cannot be checkpointed: its forward changes argument 0"):
        memfit.checkpoint(lambda x: x.mul_(2).sin(), torch.ones(3, requires_grad=True) * 1)


def test_a_module_with_buffers_that_is_not_found_is_refused():
    hidden = {"a": {"b": {"c": {"d": build()[0]}}}}
    x = torch.randn(6, 4, requires_grad=True)
    with pytest.raises(UsageError, match="uses a BatchNorm1d with buffers, which memfit did not find"):
        memfit.checkpoint(lambda x: hidden["a"]["b"]["c"]["d"](x).sin(), x)
    assert int(hidden["a"]["b"]["c"]["d"][1].num_batches_tracked) == 0


def test_settings_of_a_model_are_refused():
    with pytest.raises(UsageError, match=r"memfit\.checkpoint checkpoints one call"):
        memfit.checkpoint(torch.sin, torch.ones(3), settings=memfit.Checkpointing("layers.*"))


def test_without_gradients_the_function_is_called_once():
    with torch.no_grad():
        assert torch.equal(memfit.checkpoint(torch.sin, torch.ones(3)), torch.ones(3).sin())


def test_a_model_is_freed_when_it_is_dropped():
    block = build()[0]
    memfit.checkpoint(lambda x, block=block: block(x), torch.randn(6, 4, requires_grad=True)).sum().backward()
    gone = weakref.ref(block)
    del block
    assert gone() is None


@pytest.mark.parametrize("where", ["a closure", "an argument", "a keyword in a list"])
def test_numbers_of_a_generator_of_its_own_are_drawn_again(where):
    def noisy(x, generators):
        return (x * torch.rand(x.shape, generator=generators[0])).sin()

    def trained(call):
        own = torch.Generator().manual_seed(3)
        x = torch.ones(4, 4, requires_grad=True)
        for _ in range(2):
            if where == "a closure":
                call(lambda x: noisy(x, [own]), x).sum().backward()
            elif where == "an argument":
                call(lambda x, generator: noisy(x, [generator]), x, own).sum().backward()
            else:
                call(noisy, x, generators=[own]).sum().backward()
        return x.grad, own.get_state()

    ours, plain = (
        trained(memfit.checkpoint),
        trained(lambda function, *args, **kwargs: function(*args, **kwargs)),
    )
    assert all(map(torch.equal, ours, plain))
