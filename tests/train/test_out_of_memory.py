"""Faults inside a step: the step is repeated in smaller parts, undone, or reported as torn.

A small sample of places. MEMFIT_TIMES=32 tries every place, in a quarter of an hour; a smaller number tries
as many times those of the slow tests, at equal distances.
"""

import copy
import os
import random
from pathlib import Path

import pytest
import torch

from memfit.devices import find_device
from memfit.errors import TornUpdateError, UsageError
from memfit.ghost.build.runtime_library import build_ghost
from memfit.ghost.ghost_device import GhostDevice
from support.fault_injection import CASES, FAULTS, Fault, Sweep, build, differing, picture
from support.fault_injection import mean_loss as loss_of
from support.fork_pool import ForkPool, PoolJob

SWEEP = Path(__file__).parents[1] / "support" / "ghost_oom_sweep.py"
EVERY = max(1, 32 // int(os.environ.get("MEMFIT_TIMES", "1")))
SITUATIONS = [(0, "always"), (0, "auto"), (1, "always"), (1, "auto")]
"""(step, protection). Step 0 creates the optimizer state."""


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


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:.*BatchNorm layers")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_undone_or_reported_wherever_it_is(case, fault):
    """After each fault, all that the engine has not reported as changed equals what was there before it."""
    for step, protect in SITUATIONS:
        sweep = Sweep(case, step, fault, protect)
        for at in range(0, sweep.places, EVERY):
            sweep.outcome(at)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES)
def test_memory_that_really_runs_out_does_no_harm_wherever_it_does(pool, case):
    for step, protect in SITUATIONS:
        settings = {"case": case, "step": step, "protect": protect, "every": EVERY}
        found = pool.run(PoolJob(f"{SWEEP}:sweep", settings))
        assert sum(found.values())


@pytest.mark.parametrize("case", ["AdamW, clipped", "bf16 with float32 masters", "accumulation, uneven"])
def test_a_hand_written_loop_gets_an_error_for_an_interrupted_window(case):
    """Partial gradients are neither counted, nor saved, nor corrected and clipped twice."""

    def window(engine, at=None):
        for batch in build(case, by_hand=True)[1][: CASES[case].get("steps", 1)]:
            with engine.autocast():
                loss = loss_of(engine.model, batch)
            with Fault(at) as fault:
                engine.backward(loss)
            at = None if at is None else at - fault.count
        return fault.count

    reference = build(case, by_hand=True)[0]
    window(reference)
    places = window(reference)
    for at in range(0, places, 17):
        engine = build(case, by_hand=True)[0]
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


def test_a_loss_scale_is_created_completely_or_not_at_all():
    """GradScaler creates two tensors on first use; if the second failed, it would never create it later."""
    engine, data = build("fp16 with a loss scale, clipped")
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError), Fault(1):
        engine._ledger.update.scaler.scaled(loss)
    assert engine.step(data[0]).updated


def test_every_failed_update_is_undone():
    """The engine copies the state before each attempt, not only before the first."""
    engine, data = build("AdamW, clipped", protect="auto")
    before, places = picture(engine), Sweep("AdamW, clipped", 0, "Ctrl-C at an operation", "auto").places
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError), Fault(places - 1):
            engine.step(data[0])
        assert not differing(picture(engine), before)


def test_a_gradient_that_an_interrupted_backward_left_on_a_cast_parameter_is_not_summed():
    """The optimizer knows only the float32 copies, and would not clear it."""
    engine, data = build("bf16 with float32 masters")
    reference = build("bf16 with float32 masters")[0]
    reference.step(data[0])
    first = next(engine.model.parameters())
    sums = engine._ledger.update.gradients.sums
    for handle in sums.hooks():
        handle.remove()

    def interrupted(_):
        hook.remove()
        raise KeyboardInterrupt

    hook = first.register_post_accumulate_grad_hook(interrupted)
    for parameter in sums._hooks:
        parameter.register_post_accumulate_grad_hook(sums.notice)
    with pytest.raises(KeyboardInterrupt):
        engine.step(data[0])
    engine.step(data[0])
    assert not differing(picture(engine), picture(reference))


@pytest.mark.process
@pytest.mark.parametrize(
    "case", ["AdamW, clipped", "bf16 with float32 masters", "AdamW, stepped in backward"]
)
def test_memory_that_really_runs_out_does_no_harm(pool, case):
    """On the ghost the real allocator fails; the engine releases all that the step allocated."""
    found = pool.run(PoolJob(f"{SWEEP}:sweep", {"case": case, "step": 0, "every": 5}))
    assert found.keys() <= {"recovered", "reported"}
    assert found["reported"] > 1


@pytest.mark.slow
@pytest.mark.process
def test_the_less_memory_the_smaller_the_parts(pool):
    """With a limit from the states alone up to the whole step: a reported failure, 4 retries, ..., none."""
    retries = [retried for _, retried in pool.run(PoolJob(f"{SWEEP}:capacities", {"points": 8}))]
    assert retries[0] is None
    assert retries[1:] == sorted(retries[1:], reverse=True)
    assert {0, 1, 2, 3} <= set(retries)


@pytest.mark.parametrize("protect", ["always", "auto"])
def test_an_update_interrupted_at_any_line_is_undone_with_its_loss_scale_or_torn(protect):
    sweep = Sweep("fp16 with a loss scale, clipped", 0, "Ctrl-C at a line of the engine's", protect)
    outcomes = {sweep.outcome(at) for at in range(sweep.update, sweep.places)}
    assert outcomes == {"reported", "torn, and says so", "made, and interrupted afterwards"}
