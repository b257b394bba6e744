"""Stepping in backward: the same run bit for bit, without all gradients at once."""

import json
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.mechanisms.step_in_backward import StepInBackward
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.plan import Plan
from memfit.strategies.precision import Precision
from support.optimizer_loops import (
    OPTIMIZERS,
    assert_equal_states,
    groups,
    halving,
    loss_of,
    net,
    same,
    train,
)

IN_BACKWARD = OptimizerState(step_in_backward=True)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_stepping_in_backward_is_the_same_run_bit_for_bit(kind):
    ours, plain = net(), net()
    optimizer = getattr(torch.optim, kind)(list(ours.parameters()), **OPTIMIZERS[kind])
    reference = getattr(torch.optim, kind)(list(plain.parameters()), **OPTIMIZERS[kind])
    StepInBackward(optimizer)
    train(ours, optimizer, scheduler=halving(optimizer))
    train(plain, reference, scheduler=halving(reference))
    assert same(ours, plain)
    assert not same(ours, net())
    assert_equal_states(optimizer.state_dict(), reference.state_dict())


def test_no_two_gradients_are_alive_at_once_and_groups_keep_their_own_settings():
    ours, plain = net(), net()
    optimizer = torch.optim.AdamW(groups(ours))
    StepInBackward(optimizer)
    alive = []
    for parameter in ours.parameters():
        parameter.register_hook(
            lambda _: alive.append(sum(other.grad is not None for other in ours.parameters()))
        )
    reference = torch.optim.AdamW(groups(plain))
    loss_of(ours, 0).backward()
    assert alive == [0] * 6
    assert all(parameter.grad is None for parameter in ours.parameters())
    optimizer.step()
    train(plain, reference, steps=1)
    assert same(ours, plain)


def test_saving_and_loading_does_not_change_training():
    ours, plain = net(), net()
    reference = torch.optim.AdamW(plain.parameters())
    train(plain, reference, steps=6)
    first = torch.optim.AdamW(ours.parameters())
    stepping = StepInBackward(first)
    train(ours, first, steps=3)
    for hook in stepping.hooks():
        hook.remove()
    second = torch.optim.AdamW(ours.parameters())
    StepInBackward(second)
    second.load_state_dict(first.state_dict())
    train(ours, second, steps=3, first=3)
    assert same(ours, plain)
    assert_equal_states(second.state_dict(), reference.state_dict())


def test_tied_weights_are_updated_once():
    ours, plain = net(), net()
    for model in (ours, plain):
        model.insert(4, model[2])
    optimizer, reference = (
        torch.optim.SGD(ours.parameters(), lr=0.1),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    StepInBackward(optimizer)
    train(ours, optimizer, steps=2)
    train(plain, reference, steps=2)
    assert same(ours, plain)


def test_parameters_added_or_unfrozen_later_are_updated_by_step():
    ours, plain = net(), net()
    for model in (ours, plain):
        model[0].weight.requires_grad_(False)
    made = [torch.optim.AdamW(list(model[:4].parameters())) for model in (ours, plain)]
    StepInBackward(made[0])
    for model, optimizer in zip((ours, plain), made, strict=True):
        model[0].weight.requires_grad_(True)
        optimizer.add_param_group({"params": list(model[4:].parameters()), "lr": 0.1})
        train(model, optimizer, steps=3)
    assert same(ours, plain)


def test_after_its_removal_gradients_stay():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for hook in StepInBackward(optimizer).hooks():
        hook.remove()
    loss_of(model, 0).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert same(model, net())


def test_an_optimizer_with_a_set_implementation_is_freed_with_its_last_reference():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = halving(optimizer)
    OptimizerState(implementation="foreach").optimizer(optimizer, model)
    train(model, optimizer, steps=1, scheduler=scheduler)
    alive = weakref.ref(optimizer)
    del optimizer, scheduler
    assert alive() is None


def test_memory_is_freed_with_the_last_reference_to_the_optimizer():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    StepInBackward(optimizer)
    train(model, optimizer, steps=1)
    alive = [weakref.ref(tensor) for state in optimizer.state.values() for tensor in state.values()]
    alive += [weakref.ref(parameter) for parameter in model.parameters()]
    del optimizer
    loss_of(model, 0).backward()  # no longer updates anything
    assert all(parameter.grad is not None for parameter in model.parameters())
    del model
    assert len(alive) == 24
    assert not any(tensor() is not None for tensor in alive)


def test_step_hooks_see_one_step():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append("its"))
    everyone = register_optimizer_step_post_hook(lambda *_: steps.append("everyone's"))
    StepInBackward(optimizer)
    train(model, optimizer, steps=3)
    everyone.remove()
    assert steps == ["its", "everyone's"] * 3


def test_a_second_backward_before_the_step_is_refused():
    """Row 29: there would be two updates instead of one."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    StepInBackward(optimizer)
    loss_of(model, 0).backward()
    with pytest.raises(UsageError, match=r"two parts\. It was updated after the first part alone"):
        loss_of(model, 1).backward()


def test_gradients_that_arrive_in_two_parts_are_refused():
    """A module that two reentrant checkpoints share gets its gradient from two backward passes."""
    block = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    StepInBackward(optimizer)
    x = torch.ones(2, 4, requires_grad=True)
    y = checkpoint(block, checkpoint(block, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(UsageError, match="use_reentrant=False"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, "know whether .*LBFGS does so"),
        (
            type("Mine", (torch.optim.SGD,), {"step": id, "__module__": "mine"}),
            "know whether mine's Mine does so",
        ),
    ],
)
def test_optimizers_that_may_read_several_parameters_are_refused(make, words):
    with pytest.raises(UsageError, match=words):
        StepInBackward(make(net().parameters(), lr=0.1))


MEMORY = """
    import json, torch
    from memfit.strategies.mechanisms.step_in_backward import StepInBackward

    def plain(model):
        optimizer = torch.optim.Adam(model.parameters())
        return optimizer.step, optimizer.zero_grad

    def by_hand(model):
        optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}
        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        return (lambda: None,) * 2

    def ours(model):
        optimizer = torch.optim.Adam(model.parameters())
        StepInBackward(optimizer)
        return optimizer.step, optimizer.zero_grad

    def peaks(prepare):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
        step, zero_grad = prepare(model)
        found = []
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            model(torch.ones(16, 1024, device="cuda")).sum().backward()
            step()
            zero_grad()
            found += [torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before]
        return found

    warm_up = peaks(plain)  # allocates cuBLAS's workspace
    with open("peaks.json", "w") as file:
        json.dump({way.__name__: peaks(way) for way in (plain, by_hand, ours)}, file)
"""


def test_on_the_ghost_its_peaks_equal_those_of_a_handwritten_loop_to_the_byte(dry_run):
    ran = dry_run(MEMORY, options=("--steps", "1000"))
    found = json.loads((ran.folder / "peaks.json").read_text())
    assert found["ours"] == found["by_hand"]
    weights = 8 * 4 * 1024 * 1025
    gradients = found["plain"][2] - found["ours"][2]
    assert 0.5 * weights < gradients < 2 * weights


def test_hooks_that_need_gradients_are_refused():
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UsageError, match="would find no gradients"):
        StepInBackward(optimizer)


def test_distributed_data_parallel_is_refused():
    """Row 29: each rank would update before the ranks average their gradients."""

    class Replica(DistributedDataParallel):
        def __init__(self, module):  # no ranks here
            nn.Module.__init__(self)
            self.module = module

    model = nn.ModuleDict({"inner": Replica(net())})
    with pytest.raises(UsageError, match=r"DistributedDataParallel, which wraps inner"):
        IN_BACKWARD.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


@pytest.mark.parametrize(
    ("accumulation", "precision", "words"),
    [
        (Accumulation(parts_per_batch=2), None, "every micro-batch would cause"),
        (Accumulation(micro_batch_size=4), None, "every micro-batch would cause"),
        (None, Precision("fp16"), "Loss scaling"),
        (None, Precision("bf16", autocast=False, master_weights=True), "master_weights"),
    ],
)
def test_settings_that_need_all_gradients_at_once_are_refused(accumulation, precision, words):
    """Row 29."""
    with pytest.raises(UsageError, match=words):
        Plan(precision, IN_BACKWARD, accumulation=accumulation)


@pytest.mark.parametrize(
    ("accumulation", "precision"), [(None, None), (Accumulation(parts_per_batch=1), Precision("bf16"))]
)
def test_settings_that_need_one_gradient_at_a_time_are_accepted(accumulation, precision):
    assert Plan(precision, IN_BACKWARD, accumulation=accumulation).optimizer_state == IN_BACKWARD
