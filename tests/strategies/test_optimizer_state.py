"""Optimizer implementations and quantised state: the promised result, or a refusal with its reason."""

import sys
import warnings

import pytest
import torch
from torch import nn

from memfit.errors import UsageError
from memfit.strategies.optimizer_state import OptimizerState
from support.optimizer_loops import groups, halving, net, same, train


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"implementation": "for_loop"}, "must be one of foreach, fused, for-loop, not 'for_loop'"),
        ({"bits": 16}, "'bits' must be one of 32, 8, 4, not 16"),
        ({"bits": "8"}, "'bits' must be one of 32, 8, 4, not '8'"),
        ({"bits": 8, "backend": "apex"}, "must be one of torchao, bitsandbytes, not 'apex'"),
        ({"backend": "torchao"}, "Set bits=8 too"),
        ({"bits": 4, "backend": "bitsandbytes"}, "bitsandbytes has no 4-bit optimizer"),
        ({"bits": 8, "implementation": "fused"}, "Set only one of the two"),
        ({"step_in_backward": 1}, "'step_in_backward' must be True or False, not 1"),
    ],
)
def test_invalid_settings_are_refused(given, words):
    with pytest.raises(UsageError, match=words):
        OptimizerState(**given)


# ---- foreach, fused, for-loop ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("implementation", ["foreach", "fused", "for-loop"])
def test_an_implementation_acts_as_if_the_optimizer_had_been_created_with_it(kind, implementation):
    ours, plain = net(), net()
    optimizer = kind(groups(ours), lr=0.1)
    scheduler = halving(optimizer)
    hooked = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    assert OptimizerState(implementation=implementation).optimizer(optimizer, ours) is optimizer
    flags = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    reference = kind(groups(plain), lr=0.1, **flags)
    train(ours, optimizer, scheduler=scheduler)
    train(plain, reference, scheduler=halving(reference))
    assert [(group["foreach"], group["fused"]) for group in optimizer.param_groups] == [
        tuple(flags.values())
    ] * 2
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.0025]
    assert same(ours, plain)
    assert len(hooked) == 5


def test_this_runs_implementation_overrides_a_saved_one():
    model = net()
    saved = torch.optim.AdamW(model.parameters(), foreach=True)
    train(model, saved)
    optimizer = OptimizerState(implementation="fused").optimizer(torch.optim.AdamW(model.parameters()), model)
    optimizer.load_state_dict(saved.state_dict())
    assert (optimizer.param_groups[0]["foreach"], optimizer.param_groups[0]["fused"]) == (False, True)
    train(model, optimizer)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.optim.NAdam(net().parameters()), "torch's NAdam has no fused implementation"),
        (
            lambda: torch.optim.AdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))]),
            "cannot use the fused implementation: .*floating point",
        ),
        (
            lambda: torch.optim.SGD(net().parameters(), differentiable=True),
            "cannot use the fused implementation: .*different",
        ),
    ],
)
def test_an_implementation_that_pytorch_lacks_is_refused_with_its_reason(make, words):
    with pytest.raises(UsageError, match=words):
        OptimizerState(implementation="fused").optimizer(make(), net())


# ---- Fewer bits -----------------------------------------------------------------------------------------


@pytest.fixture
def eager():
    """Keep torchao from compiling its steps: the same arithmetic without seconds of compilation."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.compile with fullgraph=True found no")  # PyTorch 2.12 warns
        yield


def fewer(kind, bits, backend):
    return getattr(pytest.importorskip(f"{backend}.optim"), f"{kind}{bits}bit")


WIDE = 64
"""Wide enough for weights of 4096 elements: both packages keep smaller tensors in 32 bits."""


@pytest.mark.parametrize(
    ("kind", "bits", "backend", "state"),
    [
        ("AdamW", 8, "torchao", 2),
        ("Adam", 8, "torchao", 2),
        ("AdamW", 4, "torchao", 1),
        ("AdamW", 8, "bitsandbytes", 2),
    ],
)
def test_fewer_bits_use_the_packages_optimizer_with_groups_hooks_and_scheduler(
    kind, bits, backend, state, eager
):
    made = fewer(kind, bits, backend)
    ours, plain = net(WIDE), net(WIDE)
    optimizer = getattr(torch.optim, kind)(groups(ours), lr=0.1, betas=(0.8, 0.9), eps=1e-6)
    scheduler = halving(optimizer)
    hooked = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    assert OptimizerState(bits=bits, backend=backend).optimizer(optimizer, ours) is optimizer
    assert type(optimizer) is made
    reference = made(groups(plain), lr=0.1, betas=(0.8, 0.9), eps=1e-6)
    train(ours, optimizer, scheduler=scheduler)
    train(plain, reference, scheduler=halving(reference))
    assert same(ours, plain)
    assert not same(ours, net(WIDE))
    assert len(hooked) == 5
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.025, 0.0025])
    kept = optimizer.state[ours[2].weight]
    assert 1 <= size(kept) / ours[2].weight.numel() / state < 1.2


class Sizes(nn.Module):
    """Parameters on both sides of the packages' size limits."""

    def __init__(self):
        super().__init__()
        self.all = nn.ParameterList([torch.ones(size) for size in (4095, 4096, 4224, 4352, 4353)])
        self.all.append(nn.Parameter(torch.ones(8192), requires_grad=False))


@pytest.mark.parametrize(
    ("bits", "backend", "quantised"),
    [
        (8, "torchao", 4096 + 4352),
        (4, "torchao", 4096 + 4224 + 4352),
        (8, "bitsandbytes", 4096 + 4224 + 4352 + 4353),
    ],
)
def test_the_note_reports_which_tensors_are_quantised(bits, backend, quantised, eager):
    fewer("AdamW", bits, backend)
    model, settings = Sizes(), OptimizerState(bits=bits, backend=backend)
    optimizer = settings.optimizer(torch.optim.AdamW(model.parameters()), model)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    found = sum(
        parameter.numel()
        for parameter, state in optimizer.state.items()
        if size(state) < 4 * parameter.numel()  # 8 bytes a parameter in 32 bits
    )
    assert found == quantised
    assert settings.notes(model)[0].startswith(f"optimizer_state: {quantised:,} of 21,120 parameters")
    assert OptimizerState().notes(model) == []


def size(state):
    """Return the bytes of a parameter's state, a quantised tensor's parts included."""
    parts = [value for value in state.values() if isinstance(value, torch.Tensor) and value.numel() > 256]
    flat = [
        getattr(part, name)
        for part in parts
        if hasattr(part, "__tensor_flatten__")
        for name in part.__tensor_flatten__()[0]
    ] + [part for part in parts if not hasattr(part, "__tensor_flatten__")]
    return sum(part.nbytes for part in flat if part.numel() > 256)


@pytest.mark.parametrize(
    ("make", "backend", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "torchao", "no 8-bit version of torch's SGD"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "torchao", "maximize=True"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "bitsandbytes", "amsgrad=True"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "bitsandbytes", "applies weight decay as AdamW"),
    ],
)
def test_hyperparameters_that_the_package_lacks_are_refused(make, backend, words):
    model = net()
    optimizer = make(list(model.parameters()))
    before = type(optimizer)
    with pytest.raises(UsageError, match=words):
        OptimizerState(bits=8, backend=backend).optimizer(optimizer, model)
    assert type(optimizer) is before


def test_bitsandbytes_adam_applies_weight_decay_as_adamw(eager):
    """This is why memfit refuses Adam with weight decay there."""
    made = fewer("Adam", 8, "bitsandbytes")
    found = {}
    for kind in (made, torch.optim.Adam, torch.optim.AdamW):
        model = net(WIDE)
        train(model, kind(model.parameters(), lr=0.01, weight_decay=0.9), steps=3)
        found[kind] = model[2].weight.detach()
    as_adamw = (found[made] - found[torch.optim.AdamW]).abs().mean()
    as_adam = (found[made] - found[torch.optim.Adam]).abs().mean()
    assert as_adamw < as_adam / 3


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    model = net()
    with pytest.raises(UsageError, match=r"pip install 'memfit\[torchao\]'"):
        OptimizerState(bits=4).optimizer(torch.optim.AdamW(model.parameters()), model)


def test_a_choice_that_would_lose_state_or_a_replaced_step_is_refused():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step = lambda: None
    with pytest.raises(UsageError, match="was replaced"):
        OptimizerState(implementation="foreach").optimizer(optimizer, model)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, steps=1)
    with pytest.raises(UsageError, match="would lose its state"):
        OptimizerState(implementation="foreach").optimizer(optimizer, model)


def test_the_initial_state_of_adagrad_does_not_count_as_lost():
    ours, plain = net(), net()
    optimizer = torch.optim.Adagrad(ours.parameters(), lr=0.1)
    OptimizerState(implementation="foreach").optimizer(optimizer, ours)
    assert optimizer.param_groups[0]["foreach"] is True
    train(ours, optimizer)
    train(plain, torch.optim.Adagrad(plain.parameters(), lr=0.1, foreach=True))
    assert same(ours, plain)
    with pytest.raises(UsageError, match="would lose its state"):
        OptimizerState(implementation="for-loop").optimizer(optimizer, ours)
