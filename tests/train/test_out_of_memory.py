"""Faults inside a step: it is made in smaller parts, or undone, or says that it is torn.

A small sample; ``benchmarks/oom_everywhere.py`` goes through every place.
"""

import copy
import random
from pathlib import Path

import pytest
import torch

from memfit.devices import find_device
from memfit.errors import TornUpdateError, UsageError
from memfit.ghost.build.runtime_library import build as build_ghost
from memfit.ghost.device import GhostDevice
from memfit.ghost.fork_pool import ForkPool, PoolJob
from support.fault_injection import CASES, FAULTS, Fault, Sweep, build, differing, picture
from support.fault_injection import mean_loss as loss_of

SWEEP = Path(__file__).parents[1] / "support" / "ghost_oom_sweep.py"


@pytest.fixture(scope="module")
def pool():
    with ForkPool(build_ghost(), GhostDevice.of(find_device("A100-80GB"))) as pool:
        yield pool


@pytest.mark.filterwarnings("ignore:.*BatchNorm layers")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("step", "protect"), [(0, "always"), (1, "auto")])
def test_a_fault_is_undone_or_reported(case, step, protect, fault):
    sweep = Sweep(case, step, fault, protect)
    dice = random.Random(f"{case} {step} {protect} {fault}")  # noqa: S311 - the same sample each time
    before, inside = dice.randrange(sweep.update), dice.randrange(sweep.update, sweep.places)
    places = [before, inside, sweep.places - 1]
    outcomes = [sweep.outcome(at) for at in places]
    if fault in list(FAULTS)[:2]:
        assert set(outcomes[1:]) == {"reported" if protect == "always" else "torn, and says so"}


@pytest.mark.parametrize("case", ["AdamW, clipped", "bf16 with float32 masters", "accumulation, uneven"])
def test_a_hand_written_loop_gets_an_error_for_an_interrupted_window(case):
    """Partial gradients are neither counted, nor saved, nor corrected and clipped twice."""

    def window(engine, at=None):
        for batch in build(case)[1][: CASES[case].get("steps", 1)]:
            with engine.autocast():
                loss = loss_of(engine.model, batch)
            with Fault(at) as fault:
                engine.backward(loss)
            at = None if at is None else at - fault.count
        return fault.count

    reference = build(case)[0]
    window(reference)
    places = window(reference)
    for at in range(0, places, 17):
        engine = build(case)[0]
        window(engine)
        saved = copy.deepcopy(engine.state_dict())
        with pytest.raises(torch.OutOfMemoryError):
            window(engine, at)
        for refused in (engine.flush, engine.state_dict, lambda: window(engine)):  # noqa: B023
            with pytest.raises((UsageError, TornUpdateError), match="was interrupted"):
                refused()
        engine.load_state_dict(saved)
        window(engine)
        assert not differing(picture(engine), picture(reference))


def test_a_loss_scale_is_made_whole_or_not_at_all():
    """GradScaler makes two tensors when it is first used; with one alone it would never make the other."""
    engine, data = build("fp16 with a loss scale, clipped")
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError), Fault(1):
        engine._ledger.update.scaler.scaled(loss)
    assert engine.step(data[0]).updated


def test_an_update_that_failed_once_may_fail_again():
    """The copy that undid the first failure is made for the second attempt, too."""
    engine, data = build("AdamW, clipped", protect="auto")
    before, places = picture(engine), Sweep("AdamW, clipped", 0, "Ctrl-C at an operation", "auto").places
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError), Fault(places - 1):
            engine.step(data[0])
        assert not differing(picture(engine), before)


def test_what_an_interrupted_backward_left_on_a_cast_parameter_is_not_summed():
    """The optimizer knows only the float32 copies, and would not clear it."""
    engine, data = build("bf16 with float32 masters")
    reference = build("bf16 with float32 masters")[0]
    reference.step(data[0])
    first = next(engine.model.parameters())
    sums = engine._ledger.update.sums
    for taken in sums.hooks():
        taken.remove()

    def interrupted(_):
        hook.remove()
        raise KeyboardInterrupt

    hook = first.register_post_accumulate_grad_hook(interrupted)
    for parameter in sums._hooks:
        parameter.register_post_accumulate_grad_hook(sums.take)
    with pytest.raises(KeyboardInterrupt):
        engine.step(data[0])
    engine.step(data[0])
    assert not differing(picture(engine), picture(reference))


@pytest.mark.process
@pytest.mark.parametrize(
    "case", ["AdamW, clipped", "bf16 with float32 masters", "AdamW, stepped in backward"]
)
def test_memory_that_really_runs_out_does_no_harm(pool, case):
    """On the ghost the real allocator refuses; all that was allocated meanwhile is given back."""
    found = pool.run(PoolJob(f"{SWEEP}:sweep", {"case": case, "step": 0, "every": 5}))
    assert found.keys() <= {"recovered", "reported"}
    assert found["reported"] > 1


@pytest.mark.process
def test_the_less_memory_the_smaller_the_parts(pool):
    """From what only the states need to what the step takes unhindered: reported, 4 times begun again, ...
    0."""
    begun_again = [retried for _, retried in pool.run(PoolJob(f"{SWEEP}:capacities", {"points": 8}))]
    assert begun_again[0] is None
    assert begun_again[1:] == sorted(begun_again[1:], reverse=True)
    assert {0, 1, 2, 3} <= set(begun_again)


@pytest.mark.parametrize("protect", ["always", "auto"])
def test_an_update_that_is_interrupted_at_any_line_takes_its_loss_scale_along(protect):
    sweep = Sweep("fp16 with a loss scale, clipped", 0, "Ctrl-C at a line of the engine's", protect)
    outcomes = {sweep.outcome(at) for at in range(sweep.update, sweep.places)}
    assert outcomes == {"reported", "torn, and says so", "made, and interrupted afterwards"}
