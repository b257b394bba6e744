"""Choices of what to recompute, carried out in training steps on the CPU."""

import itertools

import pytest
import torch

import memfit
from memfit.planning.choose_checkpointing import CheckpointChooser
from memfit.planning.module_checkpoint_options import save_ops_to_try
from memfit.planning.step_memory_model import StepMemoryModel
from memfit.records import Operation
from support.planned_networks import NETWORKS, convolutional, drawing, feed_forward, nested

BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def work(operation: Operation) -> float:
    """Return a time that depends on the operation only, so that choices do not depend on the machine."""
    return (operation.flops / 1e9 + operation.moved / 1e9) if operation.creates or operation.flops else 0.0


def peak(step) -> int:
    return max(operation.allocated for operation in (*step.forward, *step.backward))


def applied(network, choice):
    """Return the network with a choice carried out."""
    if choice.regions:
        regions = tuple(memfit.Region(**each.settings) for each in choice.regions)
        memfit.apply(network.model, memfit.Checkpointing(regions=regions))
    return network


@pytest.mark.parametrize("make", NETWORKS)
def test_a_step_holds_at_most_what_is_predicted_and_computes_the_same_bit_for_bit(make):
    network = make()
    plain = network.gradients()
    step = network.record()
    chooser = CheckpointChooser(step, work)
    assert chooser.plain_peak == peak(step)
    choices = {share: chooser.choose(int(share * chooser.plain_peak)) for share in BUDGETS}
    assert choices[0.8] is not None
    for share, choice in choices.items():
        if choice is None:
            continue
        assert choice.peak <= share * chooser.plain_peak * (1 + 1e-6)
        applied(network, choice)
        gradients = network.gradients()
        assert all(map(_same, plain, gradients)), share
        held = peak(network.record())
        copies = sum(each.nbytes for each in network.model.buffers())  # for the recomputation, not predicted
        assert held <= choice.peak + copies
        assert held >= 0.8 * choice.peak  # kept results that no backward reads are freed early
        memfit.revert(network.model)


def test_less_memory_never_costs_less_time_and_none_is_below_the_smallest():
    chooser = CheckpointChooser(feed_forward().record(), work)
    found = [chooser.choose(int(share * chooser.plain_peak)) for share in BUDGETS]
    seconds = [choice.seconds for choice in found if choice is not None]
    assert seconds == sorted(seconds)
    assert len(seconds) > 1
    smallest = chooser.smallest
    assert chooser.choose(int(0.99 * smallest.peak)) is None
    assert all(choice is None or choice.peak >= smallest.peak / 1.001 for choice in found)


def test_modules_are_split_where_checkpointing_them_at_once_is_not_enough():
    network = feed_forward()
    network.gradients()
    plain = network.gradients()
    step = network.record()
    chooser = CheckpointChooser(step, work)
    at_once = memfit.Checkpointing(("0", "1", "2", "3"))
    memfit.apply(network.model, at_once)
    least = peak(network.record())
    memfit.revert(network.model)
    choice = chooser.choose(least - (16 << 10))
    assert any(region.split_at for region in choice.regions)
    in_slices = CheckpointChooser(step, work, in_parts=False)
    assert not any(region.split_at for region in in_slices.smallest.regions)
    assert chooser.smallest.peak < in_slices.smallest.peak
    applied(network, choice)
    assert peak(network.record()) < least
    assert all(map(_same, plain, network.gradients()))


def test_the_whole_budget_leaves_the_step_as_it_is():
    chooser = CheckpointChooser(nested().record(), work)
    choice = chooser.choose(chooser.plain_peak)
    assert (choice.regions, choice.seconds, choice.bound) == ((), 0.0, 0.0)


def test_no_other_choice_under_the_budget_is_faster():
    """Ways to checkpoint three blocks, enumerated and carried out."""
    network = feed_forward()
    step = network.record()
    chooser = CheckpointChooser(step, work)
    modules = ("0", "1", "2")
    ways = {module: [None, *(way[0] for way in chooser._ways[module][::4])] for module in modules}
    held = []
    for some in itertools.product(*ways.values()):
        chosen = {module: way for module, way in zip(modules, some, strict=True) if way is not None}
        regions = tuple(memfit.Region(module, way.save_ops, way.split_at) for module, way in chosen.items())
        if regions:
            memfit.apply(network.model, memfit.Checkpointing(regions=regions))
        held.append((peak(network.record()), sum(way.seconds for way in chosen.values())))
        memfit.revert(network.model)
    for share in (0.9, 0.75, 0.6):
        budget = int(share * chooser.plain_peak)
        fastest = min((seconds for size, seconds in held if size <= budget), default=float("inf"))
        choice = chooser.choose(budget)
        assert choice.bound <= choice.seconds <= fastest * 1.02


def test_operations_that_draw_random_numbers_are_kept_all_or_none():
    step = drawing().record()
    assert dropouts_kept(step) == {0, 2}
    one_in_place = drawing(also_in_place=True).record()  # such a draw creates nothing that could be kept
    assert dropouts_kept(one_in_place) == {0}


def dropouts_kept(step):
    call = next(call for call in step.calls if call.module == "1")
    changed = frozenset(storage for operation in step.forward for storage in operation.writes)
    sets = save_ops_to_try(step, call, work, changed)
    return {sum(name.startswith("aten.native_dropout") for name in names) for names in sets}


def test_modules_that_change_their_arguments_in_place_are_left_out():
    step = convolutional().record()
    chooser = CheckpointChooser(step, work)
    assert not any(name.endswith("relu") for name in chooser._ways)
    assert {"1", "2", "3", "4"} <= chooser._ways.keys()  # blocks with such modules inside


def test_what_is_kept_is_counted_once_however_many_modules_keep_it():
    step = nested().record()
    memory = StepMemoryModel.of(step)
    saved = {storage for call in step.calls for storage in call.saves}
    kept = sum(step.storages[each] for each in saved if memory.segment_of[each] >= 0)
    held = max(operation.allocated for operation in step.forward)
    assert kept <= held


def _same(first, second):
    return first is second if first is None or second is None else torch.equal(first, second)
