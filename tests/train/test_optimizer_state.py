"""Engines with another optimizer or one that steps in backward: the same run, or nothing changed."""

import pytest
import torch
from torch import nn

from memfit.errors import TornUpdateError, UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.precision import Precision
from memfit.train.engine import Engine

IN_BACKWARD = OptimizerState(step_in_backward=True)


def engine(plan, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
    torch.manual_seed(1)
    return Engine(
        model,
        plan,
        optimizer=optimizer,
        loss=loss,
        scheduler=scheduler,
        scheduler_interval="update",
        **options,
    )


def train(run, first=0, steps=4):
    for seed in range(first, first + steps):
        run.step(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)))


def same(first, second):
    left, right = ([*run.model.state_dict().values(), *tensors(run)] for run in (first, second))
    return len(left) == len(right) and all(torch.equal(*pair) for pair in zip(left, right, strict=True))


def tensors(run):
    states = run.optimizer.state_dict()["state"]  # in the order in which parameters were first updated
    return [value for _, state in sorted(states.items()) for value in state.values()]


@pytest.fixture
def plain():
    run = engine(None)
    train(run)
    return run


def test_stepping_in_backward_gives_the_same_run(plain):
    run = engine(IN_BACKWARD)
    train(run)
    assert same(run, plain)
    assert run.optimizer_step == 4
    assert run.scheduler.get_last_lr() == plain.scheduler.get_last_lr()


def test_stepping_in_backward_resumes_to_the_same_run(plain, tmp_path):
    first, second = engine(IN_BACKWARD), engine(IN_BACKWARD)
    train(first, steps=2)
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    train(second, first=2, steps=2)
    assert same(second, plain)


def test_the_chosen_implementation_is_used():
    run = engine(OptimizerState(implementation="fused"))
    train(run)
    assert all(group["fused"] for group in run.optimizer.param_groups)


def test_conflicts_are_refused_when_the_engine_is_created():
    """Row 29."""
    with pytest.raises(UsageError, match="step_in_backward and max_grad_norm cannot be combined"):
        engine(IN_BACKWARD, max_grad_norm=1.0)
    for other in (
        Accumulation(parts_per_batch=2),
        Precision("fp16"),
        Precision("bf16", autocast=False, master_weights=True),
    ):
        with pytest.raises(UsageError, match="step_in_backward"):
            engine([IN_BACKWARD, other])


def fail_at_the_first_layer(run):
    """Run out of memory when the last layer is updated and the first is not."""

    def fail(_):
        raise torch.OutOfMemoryError("injected")

    return run.model[0].weight.register_hook(fail)


@pytest.mark.parametrize("before", [0, 2])
def test_memory_that_runs_out_inside_backward_does_no_harm(plain, before):
    until = engine(None)
    train(until, steps=before)
    run = engine(IN_BACKWARD, protect="always")  # which also resets the random numbers
    train(run, steps=before)
    hook = fail_at_the_first_layer(run)
    with pytest.raises(torch.OutOfMemoryError):
        train(run, first=before, steps=1)
    assert same(run, until)
    hook.remove()
    train(run, first=before, steps=4 - before)
    assert same(run, plain)


def test_without_a_copy_the_run_is_torn_and_reports_it():
    run = engine(IN_BACKWARD, protect="never")
    fail_at_the_first_layer(run)
    with pytest.raises(TornUpdateError, match="protect='always'"):
        train(run)
    with pytest.raises(TornUpdateError, match="interrupted"):
        run.state_dict()


def test_the_first_step_is_protected_by_default():
    run, before = engine(IN_BACKWARD), engine(None)
    fail_at_the_first_layer(run)
    with pytest.raises(torch.OutOfMemoryError):
        train(run)
    assert same(run, before)


def test_a_state_of_another_optimizer_is_refused():
    pytest.importorskip("torchao.optim")
    saved, run = engine(None).state_dict(), engine(OptimizerState(bits=8, backend="torchao"))
    with pytest.raises(UsageError, match=r"used torch\.optim.*AdamW, but .* uses torchao\..*AdamW8bit"):
        run.load_state_dict(saved)
    with pytest.raises(UsageError, match=r"saved run used torchao"):
        engine(None).load_state_dict(run.state_dict())


@pytest.mark.parametrize(("bits", "backend"), [(8, "torchao"), (4, "torchao"), (8, "bitsandbytes")])
def test_fewer_bits_are_saved_resumed_and_restored(bits, backend, tmp_path):
    pytest.importorskip(f"{backend}.optim")

    def begin(**options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
        return Engine(
            model, OptimizerState(bits=bits, backend=backend), optimizer=optimizer, loss=loss, **options
        )

    with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps
        whole, first, second = begin(), begin(), begin(protect="always")
        train(whole)
        train(first, steps=2)
        first.save(tmp_path / "state")
        second.load(tmp_path / "state")

        def fail(*_):
            raise torch.OutOfMemoryError("injected")

        after = second.optimizer.register_step_post_hook(fail)  # after the update
        with pytest.raises(torch.OutOfMemoryError):
            train(second, first=2, steps=1)
        after.remove()
        train(second, first=2, steps=2)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])
