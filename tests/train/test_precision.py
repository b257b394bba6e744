"""Low-precision models and the float32 copies that the optimizer updates."""

import copy

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import UsageError


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))


def batches(count=6, size=8):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 16, generator=generator) for _ in range(count)]


def loss(model, data):
    dtype = next(model.parameters()).dtype
    return model(data.to(dtype)).float().square().mean()


def pure(dtype="bf16", **options):
    return memfit.Precision(dtype, autocast=False, master_weights=True, **options)


def engine(net, *plan, optimizer=torch.optim.AdamW, **options):
    return memfit.Engine(net, plan, optimizer=optimizer(net.parameters(), lr=1e-3), loss=loss, **options)


@pytest.mark.parametrize("steps", [1, 4])
def test_master_weights_equal_those_of_a_handwritten_loop(steps):
    """Bit for bit: float32 sums of bf16 gradients, an optimizer on float32 copies, rounded once."""
    ours, plain = model(), model()
    run = engine(ours, pure(), memfit.Accumulation(parts_per_batch=steps))
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in plain.parameters()]
    plain.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    for data in batches():
        run.step(data)
        sums = [torch.zeros_like(master) for master in masters]
        for part in data.chunk(steps):
            plain.zero_grad()
            (loss(plain, part) / steps).backward()
            for total, parameter in zip(sums, plain.parameters(), strict=True):
                total.add_(parameter.grad)
        for master, total in zip(masters, sums, strict=True):
            master.grad = total
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(plain.parameters(), masters, strict=True):
                parameter.copy_(master)
    for left, right in zip(ours.parameters(), plain.parameters(), strict=True):
        assert left.dtype == torch.bfloat16
        assert torch.equal(left, right)


def test_updates_smaller_than_the_last_digit_add_up():
    """The purpose of master weights: in bf16, 1 + 2**-12 rounds to 1, however often it is added."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    run = memfit.Engine(
        net,
        pure(),
        optimizer=torch.optim.SGD(net.parameters(), lr=2**-12),
        loss=lambda model, data: -model(data.bfloat16()).float().sum(),
    )
    for _ in range(64):
        run.step(torch.ones(1, 1))
    assert net.weight.item() == 1 + 2**-6


def test_fp16_parameters_are_trained_with_a_scaled_loss():
    net = model()
    run = engine(net, pure("fp16", loss_scale=1024.0), max_grad_norm=1.0)
    before = loss(model(), batches()[0]).item()
    for _ in range(30):
        assert run.step(batches()[0]).updated
    assert net[0].weight.dtype == torch.float16
    assert run.step(batches()[0]).loss < 0.9 * before


def test_an_optimizer_that_has_state_keeps_it():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net(batches()[0]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    moments = [copy.deepcopy(optimizer.state[parameter]["exp_avg"]) for parameter in net.parameters()]
    run = memfit.Engine(net, pure(), optimizer=optimizer, loss=loss)
    kept = [state["exp_avg"] for state in run.optimizer.state.values()]
    assert all(torch.equal(left, right) for left, right in zip(moments, kept, strict=True))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (pure(), pure()),
        (pure(), memfit.Precision("bf16")),
        (memfit.Precision("fp32"), memfit.Precision("fp16")),
        (memfit.Precision("fp16"), memfit.Precision("fp32")),
        (memfit.Precision("fp32"), pure("fp16")),
    ],
    ids=lambda precision: f"{precision.dtype}{'' if precision.autocast else '-pure'}",
)
def test_a_run_resumes_in_another_precision_from_full_parameters(first, second, tmp_path):
    run = engine(model(), first)
    for data in batches(3):
        run.step(data)
    run.save(tmp_path / "run")
    full = run.state_dict()["model"]
    assert all(value.dtype == torch.float32 for value in full.values())
    resumed = engine(model(), second)
    resumed.load(tmp_path / "run")
    assert all(torch.equal(full[name], value) for name, value in resumed.state_dict()["model"].items())
    assert resumed.step(batches(1)[0]).optimizer_step == 4
    if first == second:
        run.step(batches(1)[0])
        assert torch.equal(resumed.model[0].weight, run.model[0].weight)


def test_neither_precision_nor_accumulation_may_change_inside_a_window():
    run = engine(model(), memfit.Precision("fp16"), memfit.Accumulation(batches_per_update=4))
    data = batches(1)[0]
    run.backward(loss(run.model, data))
    saved = run.state_dict()
    for plan, words in (
        (
            [memfit.Precision("fp16"), memfit.Accumulation(batches_per_update=2)],
            "inside an accumulation window of 4 micro-batches",
        ),
        ([memfit.Precision("bf16"), memfit.Accumulation(batches_per_update=4)], "the loss scale differs"),
    ):
        other = engine(model(), *plan)
        with pytest.raises(UsageError, match=words):
            other.load_state_dict(saved)
        assert other.micro_step == 0
    for data in batches(3):
        run.backward(loss(run.model, data))
    changed = engine(model(), memfit.Accumulation(parts_per_batch=2))
    changed.load_state_dict(run.state_dict())  # between windows: both may
    assert changed.step(data).optimizer_step == 2


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (nn.Sequential(nn.Linear(16, 32), nn.GELU()), "the saved model has '2.weight'"),
        (
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 5)),
            r"'2.weight' is .*shape \(5, 32\) in this model, but .*\(4, 32\) in",
        ),
        (nn.Sequential(*model(), nn.LayerNorm(4)), "this model has '3.weight'"),
    ],
)
def test_another_model_is_refused_and_unchanged(other, words):
    saved = engine(model()).state_dict()
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(UsageError, match=words):
        engine(other).load_state_dict(saved)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


def test_apply_changes_the_precision_and_revert_restores_it():
    net = model()
    assert memfit.apply(net, memfit.Precision("bf16")) is net
    assert net(batches()[0]).dtype == torch.bfloat16
    twin = copy.deepcopy(net)
    twin[0].weight.data.zero_()
    assert not torch.equal(twin(batches()[0]), net(batches()[0]))
    with pytest.raises(UsageError, match="already has a plan"):
        memfit.apply(net, memfit.Precision("bf16"))
    memfit.revert(net)
    assert net(batches()[0]).dtype == torch.float32
    assert "forward" not in vars(net)
    memfit.apply(net, memfit.Precision("bf16", autocast=False))
    assert memfit.revert(net)[0].weight.dtype == torch.float32
    with pytest.raises(UsageError, match="cannot use Accumulation, which applies to the training loop"):
        memfit.apply(net, memfit.Accumulation(parts_per_batch=2))


def test_revert_restores_the_float32_copies():
    """They can be trained further, with the same optimizer."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    run = memfit.Engine(net, pure(), optimizer=optimizer, loss=loss)
    for data in batches():
        run.step(data)
    full = {name: value.clone() for name, value in run.state_dict()["model"].items()}
    memfit.revert(net)
    assert all(torch.equal(full[name], value) for name, value in net.state_dict().items())
    net(batches()[0]).square().mean().backward()
    optimizer.step()
    assert not torch.equal(full["0.weight"], net[0].weight)
    assert optimizer.state[net[0].weight]["step"] == len(batches()) + 1


def test_fp16_works_with_an_empty_first_parameter_group():
    """As code that groups parameters by weight decay may leave it."""
    models = []
    for groups in (lambda net: [{"params": []}, {"params": net.parameters()}], lambda net: net.parameters()):
        net = model()
        optimizer = torch.optim.SGD(groups(net), lr=0.1)
        run = memfit.Engine(net, memfit.Precision("fp16"), optimizer=optimizer, loss=loss)
        assert run.step(batches(1)[0]).updated
        models.append(net)
    assert torch.equal(models[0][0].weight, models[1][0].weight)


def test_a_loss_scale_that_fell_to_zero_warns_once_and_can_be_loaded(tmp_path):
    def nothing(model, data):
        return loss(model, data) * float("nan")

    net = model()
    scale = memfit.LossScale(init_scale=2.0**-9, backoff_factor=2.0**-70)
    run = memfit.Engine(
        net,
        memfit.Precision("fp16", loss_scale=scale),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        loss=nothing,
    )
    data = batches(1)[0]
    with pytest.warns(UserWarning, match="Every update is skipped") as warned:
        assert [run.step(data).loss_scale for _ in range(4)] == [2.0**-9, 2.0**-79, 2.0**-149, 0.0]
    assert len(warned) == 1
    run.save(tmp_path / "run")
    run.load(tmp_path / "run")
    assert run.step(data).loss_scale == 0.0
