"""What is switched off in runs whose gradients are compared."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from memfit.patching.installed_hooks import InstalledHooks
from memfit.random_state import seed_generators
from memfit.verification.plain_gradients_on_cpu import switch_dropout_off, switch_gradient_changes_off


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


def test_attention_drops_nothing(hooks):
    q = torch.linspace(0, 1, 2 * 16 * 8).reshape(1, 2, 16, 8)
    wanted = functional.scaled_dot_product_attention(q, q, q)
    switch_dropout_off(hooks)
    assert torch.equal(functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5), wanted)
    assert torch.equal(functional.scaled_dot_product_attention(q, q, q, None, 0.5), wanted)


def test_every_global_generator_is_seeded():
    states = []
    for _ in range(2):
        random.seed()
        np.random.seed()  # noqa: NPY002 - the global generator
        torch.seed()
        seed_generators()
        numbers = np.random.get_state()[1].tolist()  # noqa: NPY002
        states.append((random.getstate(), numbers, torch.get_rng_state().tolist()))
    assert states[0] == states[1]
