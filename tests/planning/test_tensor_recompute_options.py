"""Choices that recompute the tensors of a whole model, carried out in training steps on the CPU."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import memfit
from memfit.planning.choose_checkpointing import CheckpointChooser
from memfit.planning.step_memory_model import StepMemoryModel
from memfit.planning.tensor_recompute_options import tensor_recomputations
from memfit.recording.step_operations import StepOperationRecorder
from memfit.records import HostUnits
from support.planned_networks import NETWORKS, PlannedNetwork

ELEMENTS = 1 << 14
SIZE = 4 * ELEMENTS


def work(operation):
    return (operation.flops + operation.moved) / 1e9 if operation.creates or operation.flops else 0.0


def second(operation):
    return 1.0 if operation.creates else 0.0


def peak(step):
    return max(operation.allocated for operation in (*step.forward, *step.backward))


def carried_out(network, option, path=""):
    region = memfit.Region(path, save_ops=option.save_ops, recompute="tensors")
    memfit.apply(network.model, memfit.Checkpointing(regions=(region,)))
    found = peak(network.record()), network.gradients()
    memfit.revert(network.model)
    return found


@pytest.mark.parametrize("make", NETWORKS)
def test_a_step_holds_what_is_predicted_and_computes_the_same_bit_for_bit(make):
    torch.manual_seed(0)
    network = make()
    plain = network.gradients()
    step = network.record()
    options = tensor_recomputations(StepMemoryModel.of(step), work)
    assert options
    assert [each.peak for each in options] == sorted((each.peak for each in options), reverse=True)
    assert [each.seconds for each in options] == sorted(each.seconds for each in options)
    copies = sum(each.nbytes for each in network.model.buffers())  # of statistics, before they change
    for option in (options[0], options[len(options) // 2], options[-1]):
        held, gradients = carried_out(network, option)
        assert held <= option.peak + copies
        assert held >= 0.9 * option.peak
        assert all(_same(*each) for each in zip(plain, gradients, strict=True))


def chain(*functions):
    """Return a model of functions, one after another, and its step."""
    x = torch.zeros(ELEMENTS, requires_grad=True)

    class Chain(nn.Module):
        def forward(self, x):
            for function in functions:
                x = function(x)
            return x

    model = Chain()
    return PlannedNetwork(model, lambda: model(x).sum())


def test_what_is_made_again_is_freed_after_its_last_use_and_costs_one_run():
    network = chain(*[torch.sigmoid] * 8)
    options = tensor_recomputations(StepMemoryModel.of(network.record()), second)
    # Kept: some of eight results. The others are made again once, between one that is kept and the next.
    for option in options:
        assert option.seconds == 8 - len(option.save_ops)
        held, _ = carried_out(network, option)
        assert held == option.peak


def test_what_is_written_in_place_moves_and_is_copied_only_if_it_is_needed():
    moved = chain(torch.sin, lambda x: torch.relu_(x + 1.0), torch.sin)
    copied = chain(torch.sin, lambda x: (y := x.exp()) * torch.sigmoid_(y * 1.0), torch.sin)
    for network in (moved, copied):
        for option in tensor_recomputations(StepMemoryModel.of(network.record()), second):
            held, _ = carried_out(network, option)
            assert held == option.peak, option


def test_the_fastest_choice_is_one_of_tensors_where_modules_cost_more():
    """A block's results between layers that are no modules: modules could only run all of it again."""
    network = chain(*[lambda x: torch.sigmoid(x * 1.0 + 0.0)] * 8)
    step = network.record()
    chooser = CheckpointChooser(step, second)
    choice = chooser.choose(int(0.7 * chooser.plain_peak))
    (region,) = choice.regions
    assert (region.modules, region.recompute) == (("",), "tensors")
    assert choice.bound == choice.seconds
    assert carried_out(network, region)[0] <= choice.peak <= 0.7 * chooser.plain_peak
    assert chooser.smallest.peak <= choice.peak


def test_a_model_inside_of_another_is_named_and_one_that_is_called_twice_is_left_out():
    inside = chain(*[torch.sigmoid] * 8).model
    x = torch.zeros(ELEMENTS, requires_grad=True)
    found = []
    for calls in (1, 2):
        recorder = StepOperationRecorder(inside, "outer")
        recorder.start()
        sum(inside(x).sum() for _ in range(calls)).backward()
        chooser = CheckpointChooser(recorder.stop(), second)
        found.append([(each.modules, each.recompute) for each in chooser.smallest.regions])
    assert found == [[(("outer",), "tensors")], [(("outer",), "module")]]


def test_asking_about_each_operation_takes_time_and_making_a_tensor_again_does():
    network = chain(*[torch.sigmoid] * 8)
    memory = StepMemoryModel.of(network.record())
    again = [each.seconds for each in tensor_recomputations(memory, second)]  # operations: of a second each
    asked = tensor_recomputations(memory, second, host=HostUnits(watched_operations=0.5, replayed_tensors=2))
    assert [each.seconds for each in asked] == [0.5 * 8 + (1 + 0.5 + 2) * count for count in again]


def _same(first, second):
    return first is second if first is None or second is None else torch.equal(first, second)


def test_no_tensors_are_recomputed_where_a_forward_gathers_its_parameters():
    step = NETWORKS[0]().record()
    assert tensor_recomputations(StepMemoryModel.of(step), second)
    gather = replace(step.forward[0], name="fsdp.all_gather_copy_in.default")
    gathered = replace(step, forward=(gather, *step.forward[1:]))
    assert tensor_recomputations(StepMemoryModel.of(gathered), second) == []
