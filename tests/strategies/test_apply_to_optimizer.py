"""``memfit.apply`` with an optimizer: the user's own loop trains the same, or is refused."""

import weakref

import pytest
import torch
from torch import nn

from memfit.errors import UsageError
from memfit.injection.hold_back_updates import HeldBackUpdates
from memfit.patching.installed_hooks import InstalledHooks
from memfit.strategies.apply import apply, revert
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.mechanisms.offloaded_optimizer_state import OffloadedOptimizerState
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.sharding import Sharding
from support import optimizer_loops
from support.late_stream import late_state_copies
from support.optimizer_loops import assert_equal_states, groups, halving, loss_of, same, train

IN_BACKWARD = OptimizerState(step_in_backward=True)
OFFLOADED = OptimizerState(offload=True)
BOTH = OptimizerState(step_in_backward=True, offload=True)


@pytest.fixture(autouse=True)
def streams():
    with late_state_copies() as made:
        yield made


def net():
    """Return the model of the loops, in blocks."""
    layers = optimizer_loops.net()
    return nn.Sequential(layers[:2], layers[2:4], layers[4])


def adam(model):
    return torch.optim.AdamW(groups(model), lr=0.05)


@pytest.mark.parametrize("plan", [IN_BACKWARD, OFFLOADED, BOTH, [BOTH, Checkpointing("0")]])
@pytest.mark.parametrize("scheduled", ["before", "after"])
def test_the_loop_trains_the_same_bit_for_bit(plan, scheduled, streams):
    ours, plain = net(), net()
    optimizer, reference = adam(ours), adam(plain)
    scheduler = halving(optimizer) if scheduled == "before" else None
    assert apply(ours, plan, optimizer=optimizer) is ours
    train(ours, optimizer, scheduler=scheduler or halving(optimizer))
    train(plain, reference, scheduler=halving(reference))
    assert same(ours, plain)
    assert not same(ours, net())
    assert_equal_states(optimizer.state_dict(), reference.state_dict())
    assert bool(streams) is (plan is not IN_BACKWARD)


@pytest.mark.parametrize("plan", [IN_BACKWARD, OFFLOADED])
def test_closures_are_evaluated_once_and_their_loss_is_returned(plan):
    def run(model, optimizer):
        losses = []
        for seed in range(4):

            def closure(seed=seed):
                optimizer.zero_grad()
                loss = loss_of(model, seed)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return losses

    ours, plain = net(), net()
    optimizer = adam(ours)
    apply(ours, plan, optimizer=optimizer)
    assert run(ours, optimizer) == run(plain, adam(plain))
    assert same(ours, plain)


def test_gradients_are_freed_in_the_backward_until_the_plan_is_reverted(monkeypatch):
    fetched, fetch_all = [], OffloadedOptimizerState.fetch_all
    monkeypatch.setattr(
        OffloadedOptimizerState, "fetch_all", lambda own: (fetched.append(own), fetch_all(own))
    )
    model = net()
    optimizer = adam(model)
    apply(model, BOTH, optimizer=optimizer)
    before = [each.detach().clone() for each in model.parameters()]
    loss_of(model, 0).backward()
    assert not any(map(torch.equal, before, model.parameters()))
    optimizer.step()
    assert all(each.grad is None for each in model.parameters())
    assert not fetched
    revert(model)
    assert len(fetched) == 1  # the device has the state again
    assert all(each.grad is None for each in model.parameters())
    plain = net()
    train(plain, reference := adam(plain), steps=1)
    train(model, optimizer, first=1)
    train(plain, reference, first=1)
    assert same(model, plain)


def clipped(model, _):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clipped_by_value(model, _):
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


def scaled(_, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)


def read(model, _):
    return [each.grad for each in model.parameters()]


def written(model, _):
    model[0][0].weight.grad = torch.zeros_like(model[0][0].weight)


def dropped(_, optimizer):
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (clipped, "clip_grad_norm_"),
        (clipped_by_value, "clip_grad_value_"),
        (scaled, "unscale_"),
        (read, ""),
        (written, ""),
        (dropped, "zero_grad"),
    ],
)
def test_a_loop_that_uses_gradients_after_the_backward_is_refused_by_name(use, name):
    model = net()
    optimizer = adam(model)
    apply(model, IN_BACKWARD, optimizer=optimizer)
    loss_of(model, 0).backward()
    line = use.__code__.co_firstlineno
    where = rf"test_apply_to_optimizer\.py:({line + 1}|{line + 3})"
    with pytest.raises(UsageError, match=rf"{name} \({where}\) uses" if name else rf"{where} uses"):
        use(model, optimizer)
    revert(model)
    loss_of(model, 1).backward()
    use(model, optimizer)


def test_an_optimizer_that_gets_a_scaled_loss_is_refused():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    apply(model, IN_BACKWARD, optimizer=optimizer)
    loss_of(model, 0).backward()
    optimizer.grad_scale = torch.ones(())  # as GradScaler does for fused optimizers
    with pytest.raises(UsageError, match="a GradScaler scales the loss"):
        optimizer.step()


def test_another_optimizer_of_the_same_parameters_is_refused():
    model = net()
    optimizer, other = adam(model), torch.optim.SGD(model.parameters())
    apply(model, IN_BACKWARD, optimizer=optimizer)
    train(model, optimizer, steps=1)
    loss_of(model, 1).backward()
    with pytest.raises(UsageError, match=r"step \(test_apply_to_optimizer"):
        other.step()


def test_a_backward_without_an_update_is_refused():
    model = net()
    optimizer = adam(model)
    apply(model, IN_BACKWARD, optimizer=optimizer)
    loss_of(model, 0).backward()
    with pytest.raises(UsageError, match="received its gradient in two parts"):
        loss_of(model, 1).backward()


@pytest.mark.parametrize(
    ("plan", "given", "why"),
    [
        (IN_BACKWARD, False, r"optimizer=optimizer\)"),
        ([OFFLOADED, Sharding("fsdp2")], True, "together with sharding"),
    ],
)
def test_an_optimizer_is_passed_where_the_plan_has_settings_for_it(plan, given, why):
    model = net()
    with pytest.raises(UsageError, match=why):
        apply(model, plan, optimizer=adam(model) if given else None)
    assert apply(model, Checkpointing("0")) is model  # nothing was applied


def test_a_plan_that_changes_no_optimizer_leaves_the_one_it_is_passed_alone():
    model = net()
    optimizer = adam(model)
    apply(model, Checkpointing("0"), optimizer=optimizer)
    assert "step" not in vars(optimizer)
    train(model, optimizer, steps=1)


def test_what_does_not_suit_the_optimizer_leaves_model_and_optimizer_as_they_were():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(UsageError, match="offload needs an optimizer that updates each"):
        apply(model, [OFFLOADED, Checkpointing("0")], optimizer=optimizer)
    assert "step" not in vars(optimizer)
    assert apply(model, Checkpointing("0")) is model
    tensors = [torch.zeros(2, requires_grad=True)]
    with pytest.raises(UsageError, match=r"no nn\.Parameter"):
        apply(net(), IN_BACKWARD, optimizer=torch.optim.SGD(tensors))


def test_a_step_that_the_user_replaced_is_refused():
    model = net()
    optimizer = adam(model)
    optimizer.step = lambda: None
    with pytest.raises(UsageError, match="was replaced by another function"):
        apply(model, OFFLOADED, optimizer=optimizer)


def test_updates_that_are_held_back_stay_so(monkeypatch):
    hooks, steps = InstalledHooks(), []
    original = OffloadedOptimizerState.step
    monkeypatch.setattr(
        OffloadedOptimizerState, "step", lambda *given: (steps.append(1), original(*given))[1]
    )
    HeldBackUpdates(2, pytest.fail).install(hooks)
    try:
        model = net()
        optimizer = adam(model)
        apply(model, OFFLOADED, optimizer=optimizer)
        train(model, optimizer, steps=4, scheduler=halving(optimizer))
    finally:
        hooks.remove()
    assert len(steps) == 2


@pytest.mark.parametrize("plan", [IN_BACKWARD, OFFLOADED, BOTH])
def test_model_and_optimizer_go_with_the_last_reference(plan):
    model = net()
    optimizer = adam(model)
    apply(model, plan, optimizer=optimizer)
    train(model, optimizer)
    parameter, itself = weakref.ref(model[0][0].weight), weakref.ref(optimizer)
    del model, optimizer
    assert (parameter(), itself()) == (None, None)
