"""Code that names CUDA devices runs on the CPU."""

import pytest
import torch
from torch import nn

from memfit.patching.installed_hooks import InstalledHooks
from memfit.verification.plain_gradients_on_cpu import CpuInsteadOfCuda, install_cpu_stand_in


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(CpuInsteadOfCuda, "__enter__", lambda _: None)  # stand_in never leaves it
    hooks = InstalledHooks()
    install_cpu_stand_in(hooks)
    monkeypatch.undo()
    with CpuInsteadOfCuda():
        yield
    hooks.remove()


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


def test_a_device_context_is_the_cpu_s():
    with torch.device("cuda"):
        assert torch.ones(2).device.type == "cpu"


def test_autocast_is_the_cpu_s():
    with torch.autocast("cuda"):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16


def test_what_there_is_nothing_to_do_for_does_nothing():
    torch.cuda.synchronize()
    torch.cuda.set_device(0)
    assert torch.cuda.current_device() == 0
    assert not torch.cuda.is_available()
