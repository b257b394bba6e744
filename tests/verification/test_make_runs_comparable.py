"""A first update on the CPU: dropout, clipping and loss scales are off, and CUDA devices are the CPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from memfit.patching.installed_hooks import InstalledHooks
from memfit.verification.make_runs_comparable import (
    CpuInsteadOfCuda,
    install_cpu_stand_in,
    switch_dropout_off,
    switch_gradient_changes_off,
)


@pytest.fixture
def hooks():
    installed = InstalledHooks()
    yield installed
    installed.remove()


@pytest.mark.parametrize("owner", [torch.nn.utils, torch.nn.utils.clip_grad])
def test_gradients_are_not_clipped_and_norms_are_still_returned(hooks, owner):
    switch_gradient_changes_off(hooks)
    weight = torch.zeros(2)
    weight.grad = torch.tensor([3.0, 4.0])
    assert owner.clip_grad_norm_([weight], 1.0).item() == 5.0
    assert owner.clip_grad_norm_(parameters=[weight], max_norm=1.0).item() == 5.0
    owner.clip_grad_value_([weight], 0.1)
    assert weight.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("make", [torch.amp.GradScaler, lambda *_, **more: torch.cuda.amp.GradScaler(**more)])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.cuda.amp
def test_losses_are_not_scaled(hooks, make):
    switch_gradient_changes_off(hooks)
    scaler = make("cpu", init_scale=8.0)
    assert not scaler.is_enabled()
    assert scaler.scale(torch.ones(())).item() == 1.0


@pytest.mark.parametrize(
    "drop",
    [
        nn.Dropout(0.5),
        nn.Dropout2d(0.5),
        nn.AlphaDropout(0.5),
        lambda x: functional.dropout(x, 0.5),
        lambda x: functional.dropout(x, 0.5, True),
        lambda x: functional.dropout(x, p=0.5, training=True),
    ],
)
def test_dropout_drops_nothing(hooks, drop):
    switch_dropout_off(hooks)
    x = torch.ones(1, 64, 8, 8)
    assert torch.equal(drop(x), x)


@pytest.mark.parametrize(
    "make", [lambda: nn.LSTM(8, 8, 2, dropout=0.5), lambda: nn.GRU(8, 8, 2, True, False, 0.5)]
)
def test_recurrent_layers_drop_nothing(hooks, make):
    switch_dropout_off(hooks)
    layer = make()
    x = torch.ones(3, 2, 8)
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_attention_drops_nothing(hooks):
    q = torch.linspace(0, 1, 2 * 16 * 8).reshape(1, 2, 16, 8)
    wanted = functional.scaled_dot_product_attention(q, q, q)
    switch_dropout_off(hooks)
    assert torch.equal(functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5), wanted)
    assert torch.equal(functional.scaled_dot_product_attention(q, q, q, None, 0.5), wanted)


@pytest.fixture
def on_cpu(hooks, monkeypatch):
    """Run code that names CUDA devices on the CPU."""
    monkeypatch.setattr(CpuInsteadOfCuda, "__enter__", lambda _: None)  # install_cpu_stand_in never leaves it
    install_cpu_stand_in(hooks)
    monkeypatch.undo()
    with CpuInsteadOfCuda():
        yield


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, device="cuda"),
        lambda: torch.ones(2, device="cuda:1"),
        lambda: torch.ones(2, device=torch.device("cuda", 0)),
        lambda: torch.ones(2, device=0),
        lambda: torch.ones(2).to("cuda"),
        lambda: torch.ones(2).to(0),
        lambda: torch.ones(2).to(torch.device("cuda"), torch.float64, non_blocking=True),
        lambda: torch.ones(2).cuda(),
        lambda: torch.ones(2).cuda(0, non_blocking=True),
        lambda: torch.ones(2).pin_memory(),
        lambda: nn.Linear(2, 2).to("cuda").weight,
        lambda: nn.Linear(2, 2).cuda().weight,
        lambda: nn.Linear(2, 2, device="cuda").weight,
        lambda: torch.tensor([1.0], device="cuda"),
    ],
)
def test_tensors_and_modules_are_on_the_cpu(make):
    assert make().device.type == "cpu"


@pytest.mark.usefixtures("on_cpu")
def test_a_device_context_is_the_cpu_s():
    with torch.device("cuda"):
        assert torch.ones(2).device.type == "cpu"


@pytest.mark.usefixtures("on_cpu")
def test_autocast_is_the_cpu_s():
    with torch.autocast("cuda"):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16


@pytest.mark.usefixtures("on_cpu")
def test_what_there_is_nothing_to_do_for_does_nothing():
    torch.cuda.synchronize()
    torch.cuda.set_device(0)
    assert torch.cuda.current_device() == 0
    assert not torch.cuda.is_available()
