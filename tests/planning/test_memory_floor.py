"""What a script needs under every plan."""

from dataclasses import replace

import numpy as np
import pytest

from memfit.analysis.trial_result import TrialResult
from memfit.planning.memory_floor import MemoryFloors, memory_floor_of_updates
from memfit.planning.optimizer_state_changes import optimizer_state_changes
from memfit.planning.strategy_and_allocator_changes import PRECISIONS, AllowedChanges
from memfit.records import (
    Action,
    Category,
    Change,
    EventLabel,
    Figure,
    ModuleCall,
    Operation,
    Phase,
    Provenance,
    StepOperations,
    TensorInfo,
)
from support.planned_script import DEVICE, MIB, OUTSIDE
from support.traces import BASE, Event, freed, trace_of

UPDATE = EventLabel(Phase.OPTIMIZER, "", "Adam.step", -1)
HELD = {
    Category.PARAMETER: {"weight": 40, "bias": 2},
    Category.BUFFER: {"mean": 4},
    Category.WORKSPACE: {"cuBLAS workspace": 8},
    Category.GRADIENT: {"weight.grad": 40, "bias.grad": 2},
    Category.OPTIMIZER_STATE: {"weight.exp_avg": 40, "weight.exp_avg_sq": 40, "bias.exp_avg": 4},
    Category.INPUT: {"x": 100},
}
FIXED = {"CUDA context": 100, "parameters": 42, "buffers": 4, "cuBLAS workspaces": 8}
CHANGES = {each.words[0]: each for each in optimizer_state_changes(AllowedChanges(low_bit_state=True))}


def trained(temporaries=16):
    """Return a trace that ends after an update that needed temporaries, with so many MiB of each tensor."""
    history, tensors, owners = [], [], []
    at = BASE
    for category, named in HELD.items():
        for name, size in named.items():
            history += [
                (Action.SEGMENT_ALLOC, at, size * MIB),
                Event(Action.ALLOC, at, size * MIB, category=category),
            ]
            owners += [-1, len(tensors)]
            tensors.append(TensorInfo("fc", name, "float32", (size,)))
            at += size * MIB
    scratch = temporaries * MIB
    history += [Event(action, at, scratch, label=0) for action in (Action.SEGMENT_ALLOC, Action.ALLOC)]
    history += freed(at, scratch, label=0)
    owners += [-1] * 4
    trace = trace_of(history, device=DEVICE, labels=(UPDATE,), tensors=tuple(tensors))
    return replace(trace, events=replace(trace.events, tensor=np.array(owners, np.int32)))


def step(**operations):
    """Return a step of one module with operations that create and read so many MiB."""
    storages, forward = [], []
    for name, (made, read, moved) in operations.items():
        storages += [made * MIB, read * MIB]
        create, argument = len(storages) - 2, len(storages) - 1
        sizes = (0, moved * MIB, "float32", False, 0.0, 0)
        forward.append(Operation(f"aten.{name}.default", 0, -1, (argument,), (create,), (), *sizes))
    call = ModuleCall("fc", "Linear", -1, 0, len(forward), (), (), 0, 0, 0)
    return StepOperations(tuple(storages), (call,), tuple(forward), ())


def floor(plan=Change(), operations=None, parts=1):  # noqa: B008 - frozen
    found = MemoryFloors(TrialResult(trained(), operations=operations), parts).under(plan)
    terms = {term.name: term.figure.bytes // MIB for term in found.terms}
    assert sum(terms.values()) == found.needs.bytes // MIB
    assert terms.items() >= FIXED.items() or "precision" in plan.plan
    return {name: size for name, size in terms.items() if name not in FIXED}


def test_what_nccl_holds_is_named_beside_the_context():
    trace = trained()
    ranks = replace(trace.device, nccl=Figure(20 * MIB, Provenance.ASSUMED))
    found = MemoryFloors(TrialResult(replace(trace, device=ranks)), 1).under(Change())
    assert {term.name: term.figure.bytes // MIB for term in found.terms}["CUDA context and NCCL"] == 120


def test_what_an_update_holds_at_its_end_is_needed_but_for_what_a_plan_moves():
    assert floor() == {"gradients": 42, "optimizer state": 84}
    assert floor(CHANGES["step in backward"]) == {"the largest gradient": 40, "optimizer state": 84}
    assert floor(CHANGES["optimizer state offloaded"]) == {
        "gradients": 42,
        "the largest parameter's optimizer state": 80,
    }
    assert floor(CHANGES["optimizer state offloaded, step in backward"]) == {
        "gradient and optimizer state of fc.weight": 120
    }
    assert floor(CHANGES["8-bit optimizer state"]) == {"gradients": 42, "optimizer state": 21}


def test_in_16_bits_half_of_it_is_needed_and_under_autocast_all():
    half = MemoryFloors(TrialResult(trained()), 1).under(PRECISIONS["bf16"])
    assert half.needs.bytes == OUTSIDE + 8 * MIB + (42 + 4 + 42 + 84) * MIB // 2
    whole = MemoryFloors(TrialResult(trained()), 1).under(PRECISIONS["amp"])
    assert whole.needs == MemoryFloors(TrialResult(trained()), 1).under(Change()).needs


def test_the_largest_operation_counts_where_it_needs_more_than_an_update():
    operations = step(relu=(10, 10, 20), mm=(300, 300, 600))
    name = "aten.mm of fc, the largest operation"
    assert floor(operations=operations) == {"optimizer state": 84, name: 600}
    assert floor(operations=operations, parts=4) == {"optimizer state": 84, name: 150}
    assert floor(operations=operations, parts=64) == {"gradients": 42, "optimizer state": 84}
    both = CHANGES["optimizer state offloaded, step in backward"]
    assert floor(both, operations, parts=64) == {name: 600}  # batches stay whole
    assert floor(operations=replace(operations, compiled=True)) == floor()


def test_of_an_argument_only_what_is_read_counts():
    assert floor(operations=step(mm=(300, 900, 400)))["aten.mm of fc, the largest operation"] == 400


def test_an_update_that_ran_needs_its_temporaries_too_but_no_batch():
    found = memory_floor_of_updates(TrialResult(trained(temporaries=16)))
    assert found.needs.bytes == OUTSIDE + (42 + 4 + 8 + 42 + 84 + 16) * MIB
    names = {term.name: term.figure.bytes // MIB for term in found.terms}
    assert (names["temporaries"], names["gradients"], "inputs" in names) == (16, 42, False)


@pytest.mark.parametrize(
    "trace", [trace_of([]), replace(trained(), labels=(EventLabel(Phase.FORWARD, "", "", -1),))]
)
def test_a_run_without_an_update_has_no_floor_but_the_context(trace):
    trace = replace(trace, device=DEVICE)
    assert memory_floor_of_updates(TrialResult(trace)).needs.bytes == OUTSIDE
    assert MemoryFloors(TrialResult(trace), 1).under(Change()).needs.bytes == OUTSIDE
