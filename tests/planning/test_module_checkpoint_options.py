"""What a module holds and costs if it is recomputed in parts."""

import pytest
import torch
from torch import nn

from memfit.planning.module_checkpoint_options import (
    bytes_recomputed_in_segments,
    module_call_splits_to_try,
    module_checkpoint_option,
    module_checkpoint_option_in_parts,
    parts_of_module_call,
)
from memfit.planning.step_memory_model import StepMemoryModel, module_calls_inside
from memfit.recording.step_operations import StepOperationRecorder

ROWS, NARROW, WIDE = 64, 16, 512
SMALL, LARGE = 4 * ROWS * NARROW, 4 * ROWS * WIDE


def second(operation):
    return 1.0 if operation.creates else 0.0


@pytest.fixture(scope="module")
def block():
    """Return a step's memory, the call of a block whose middle is wide, and the calls in it."""
    torch.manual_seed(0)
    block = nn.Sequential(
        nn.Linear(NARROW, WIDE),
        nn.Sigmoid(),
        nn.Linear(WIDE, NARROW),
        nn.Linear(NARROW, NARROW),
        nn.Sigmoid(),
    )
    model = nn.Sequential(nn.Linear(NARROW, NARROW), block)
    recorder = StepOperationRecorder(model)
    recorder.start()
    model(torch.ones(ROWS, NARROW)).sum().backward()
    step = recorder.stop()
    number = next(number for number, call in enumerate(step.calls) if call.module == "1")
    return StepMemoryModel.of(step), step.calls[number], module_calls_inside(step.calls)[number]


def held(block, *split_at):
    memory, call, inner = block
    found = bytes_recomputed_in_segments(
        memory, parts_of_module_call(memory.step, call, inner, split_at), frozenset(call.reads)
    )
    return [found[segment] for segment in memory.segments(call.first, call.end)]


def test_at_once_all_that_is_saved_is_there(block):
    # saved: the results of the two sigmoids, and the input of the second narrow layer
    assert held(block) == [0, LARGE, LARGE + SMALL, LARGE + SMALL, LARGE + 2 * SMALL]


def test_the_last_part_holds_what_it_saves_and_while_it_is_made_what_the_first_passes_on(block):
    # The result of the first part is the input of the second, which saves it. While it is made, the
    # results of the wide layer and of its sigmoid exist together.
    assert held(block, "3") == [0, LARGE, LARGE + SMALL, SMALL, 2 * LARGE]


def test_parts_that_begin_with_no_call_are_left_out(block):
    assert held(block, "7") == held(block)


def test_the_parts_before_run_again_for_each_part(block):
    memory, call, inner = block
    whole = module_checkpoint_option(memory.step, call, (), second)
    split = module_checkpoint_option_in_parts(memory.step, call, inner, ("2", "3"), second)
    assert split.keeps == whole.keeps
    # The second part is recomputed up to its product, whose arguments are all that is saved in it.
    assert (whole.seconds, split.seconds) == (5.0, 5.0 + 2.0 + 2.0)
    copied = module_checkpoint_option_in_parts(
        memory.step, call, inner, ("2", "3"), second, lambda size: 10.0 * (size > 0)
    )
    assert copied.seconds == split.seconds  # inputs below a MiB stay


def test_a_module_is_split_only_where_that_lowers_what_it_holds(block):
    memory, call, inner = block
    assert module_call_splits_to_try(memory, call, inner) == []
    # sixteen results, all alike: half of them are there at a time, then a third
    model = nn.Sequential(nn.Sequential(*(nn.Sequential(nn.Sigmoid()) for _ in range(15))))
    recorder = StepOperationRecorder(model)
    recorder.start()
    model(torch.ones(1 << 18, requires_grad=True)).sum().backward()
    step = recorder.stop()
    tried = module_call_splits_to_try(
        StepMemoryModel.of(step), step.calls[1], module_calls_inside(step.calls)[1]
    )
    assert [len(split_at) for split_at in tried] == [1, 2]
