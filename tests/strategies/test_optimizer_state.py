"""How the optimizer steps and what it keeps: the same result where that is promised, or refused."""

import json
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.optimizer_state import OptimizerState, StepInBackward
from memfit.strategies.precision import Precision

IN_BACKWARD = OptimizerState(step_in_backward=True)


def net(width=8):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


def groups(model):
    """Return two groups with settings of their own."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.01, "weight_decay": 0.0}]


def loss_of(model, seed):
    return model(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))).square().mean()


def train(model, optimizer, steps=5, scheduler=None, first=0):
    for seed in range(first, first + steps):
        loss_of(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def same(one, other):
    return all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"implementation": "for_loop"}, "'for_loop' is none of foreach, fused, for-loop"),
        ({"bits": 16}, "bits=16 is none of 32, 8, 4"),
        ({"bits": "8"}, "bits='8' is none of 32, 8, 4"),
        ({"bits": 8, "backend": "apex"}, "'apex' is none of torchao, bitsandbytes"),
        ({"backend": "torchao"}, "needs bits=8"),
        ({"bits": 4, "backend": "bitsandbytes"}, "bitsandbytes has no optimizer of 4 bits"),
        ({"bits": 8, "implementation": "fused"}, "has only its own"),
        ({"step_in_backward": 1}, "step_in_backward=1 must be True or False"),
    ],
)
def test_what_cannot_be_is_refused(given, words):
    with pytest.raises(UsageError, match=words):
        OptimizerState(**given)


# ---- foreach, fused, for-loop ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("implementation", ["foreach", "fused", "for-loop"])
def test_an_implementation_is_as_if_the_optimizer_had_been_made_with_it(kind, implementation):
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


def test_the_implementation_is_of_this_run_whatever_a_saved_state_says():
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
            "cannot be fused: .*floating point",
        ),
        (lambda: torch.optim.SGD(net().parameters(), differentiable=True), "cannot be fused: .*different"),
    ],
)
def test_what_pytorch_does_not_have_is_refused_with_its_reason(make, words):
    with pytest.raises(UsageError, match=words):
        OptimizerState(implementation="fused").optimizer(make(), net())


# ---- Fewer bits -----------------------------------------------------------------------------------------


@pytest.fixture
def eager():
    """Have torchao not compile its steps: the same arithmetic without a compiler's seconds."""
    with torch.compiler.set_stance("force_eager"):
        yield


def fewer(kind, bits, backend):
    return getattr(pytest.importorskip(f"{backend}.optim"), f"{kind}{bits}bit")


WIDE = 64
"""Tensors of fewer than 4096 numbers are kept in 32 bits by both packages."""


@pytest.mark.parametrize(
    ("kind", "bits", "backend", "state"),
    [
        ("AdamW", 8, "torchao", 2),
        ("Adam", 8, "torchao", 2),
        ("AdamW", 4, "torchao", 1),
        ("AdamW", 8, "bitsandbytes", 2),
    ],
)
def test_fewer_bits_are_the_package_s_optimizer_with_groups_hooks_and_scheduler(
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
    """Parameters on both sides of what decides."""

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
def test_the_note_says_which_tensors_are_quantised(bits, backend, quantised, eager):
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
        (lambda p: torch.optim.SGD(p, lr=0.1), "torchao", "no torch's SGD of 8 bits"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "torchao", "maximize=True"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "bitsandbytes", "amsgrad=True"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "bitsandbytes", "decouples weight decay"),
    ],
)
def test_hyperparameters_that_the_package_lacks_are_refused(make, backend, words):
    model = net()
    optimizer = make(list(model.parameters()))
    before = type(optimizer)
    with pytest.raises(UsageError, match=words):
        OptimizerState(bits=8, backend=backend).optimizer(optimizer, model)
    assert type(optimizer) is before


def test_bitsandbytes_adam_is_what_the_refusal_says(eager):
    """The reason for refusing Adam with weight decay there: the step is AdamW's."""
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
        OptimizerState(bits=8).optimizer(torch.optim.AdamW(model.parameters()), model)


def test_a_choice_that_would_lose_state_or_another_s_step_is_refused():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step = lambda: None
    with pytest.raises(UsageError, match="was replaced"):
        OptimizerState(implementation="foreach").optimizer(optimizer, model)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, steps=1)
    with pytest.raises(UsageError, match="its state would be lost"):
        OptimizerState(implementation="foreach").optimizer(optimizer, model)


# ---- Step in backward -----------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "RMSprop": {"centered": True},
    "Adagrad": {},
    "Adadelta": {},
    "ASGD": {},
    "Rprop": {},
    "RAdam": {"foreach": True},
    "Adafactor": {},
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_stepping_in_backward_is_the_same_run_bit_for_bit(kind):
    ours, plain = net(), net()
    optimizer = getattr(torch.optim, kind)(list(ours.parameters()), **OPTIMIZERS[kind])
    reference = getattr(torch.optim, kind)(list(plain.parameters()), **OPTIMIZERS[kind])
    StepInBackward(optimizer)
    train(ours, optimizer, scheduler=halving(optimizer))
    train(plain, reference, scheduler=halving(reference))
    assert same(ours, plain)
    assert not same(ours, net())
    equal_states(optimizer.state_dict(), reference.state_dict())


def equal_states(one, other):
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for index, state in one["state"].items():
        assert state.keys() == other["state"][index].keys()
        for name, value in state.items():
            torch.testing.assert_close(value, other["state"][index][name], rtol=0, atol=0)


def test_no_two_gradients_are_alive_at_once_and_groups_keep_their_own_settings():
    ours, plain = net(), net()
    optimizer = torch.optim.AdamW(groups(ours))
    StepInBackward(optimizer)
    alive = []
    for parameter in ours.parameters():
        parameter.register_hook(
            lambda _: alive.append(sum(one.grad is not None for one in ours.parameters()))
        )
    reference = torch.optim.AdamW(groups(plain))
    loss_of(ours, 0).backward()
    assert alive == [0] * 6
    assert all(parameter.grad is None for parameter in ours.parameters())
    optimizer.step()
    train(plain, reference, steps=1)
    assert same(ours, plain)


def test_saved_and_loaded_it_goes_on_as_if_nothing_had_happened():
    ours, plain = net(), net()
    reference = torch.optim.AdamW(plain.parameters())
    train(plain, reference, steps=6)
    first = torch.optim.AdamW(ours.parameters())
    stepping = StepInBackward(first)
    train(ours, first, steps=3)
    for hook in stepping.hooks():
        hook.remove()
    second = torch.optim.AdamW(ours.parameters())
    StepInBackward(second)
    second.load_state_dict(first.state_dict())
    train(ours, second, steps=3, first=3)
    assert same(ours, plain)
    equal_states(second.state_dict(), reference.state_dict())


def test_tied_weights_are_updated_once():
    ours, plain = net(), net()
    for model in (ours, plain):
        model.insert(4, model[2])
    optimizer, reference = (
        torch.optim.SGD(ours.parameters(), lr=0.1),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    StepInBackward(optimizer)
    train(ours, optimizer, steps=2)
    train(plain, reference, steps=2)
    assert same(ours, plain)


def test_what_joins_or_thaws_later_is_updated_by_the_step_itself():
    ours, plain = net(), net()
    for model in (ours, plain):
        model[0].weight.requires_grad_(False)
    made = [torch.optim.AdamW(list(model[:4].parameters())) for model in (ours, plain)]
    StepInBackward(made[0])
    for model, optimizer in zip((ours, plain), made, strict=True):
        model[0].weight.requires_grad_(True)
        optimizer.add_param_group({"params": list(model[4:].parameters()), "lr": 0.1})
        train(model, optimizer, steps=3)
    assert same(ours, plain)


def test_removed_it_leaves_gradients_alone():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for hook in StepInBackward(optimizer).hooks():
        hook.remove()
    loss_of(model, 0).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert same(model, net())


def test_a_turned_optimizer_is_freed_with_the_last_name_for_it():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = halving(optimizer)
    OptimizerState(implementation="foreach").optimizer(optimizer, model)
    train(model, optimizer, steps=1, scheduler=scheduler)
    alive = weakref.ref(optimizer)
    del optimizer, scheduler
    assert alive() is None


def test_memory_is_freed_with_the_last_name_for_it():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    StepInBackward(optimizer)
    train(model, optimizer, steps=1)
    alive = [weakref.ref(tensor) for state in optimizer.state.values() for tensor in state.values()]
    alive += [weakref.ref(parameter) for parameter in model.parameters()]
    del optimizer
    loss_of(model, 0).backward()  # and nothing is updated any more
    assert all(parameter.grad is not None for parameter in model.parameters())
    del model
    assert len(alive) == 24
    assert not any(tensor() is not None for tensor in alive)


def test_step_hooks_see_one_step():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append("its"))
    everyone = register_optimizer_step_post_hook(lambda *_: steps.append("everyone's"))
    StepInBackward(optimizer)
    train(model, optimizer, steps=3)
    everyone.remove()
    assert steps == ["its", "everyone's"] * 3


def test_a_second_backward_before_the_step_is_refused():
    """Row 29: two updates where one was meant."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    StepInBackward(optimizer)
    loss_of(model, 0).backward()
    with pytest.raises(UsageError, match="in two pieces, and the first is used"):
        loss_of(model, 1).backward()


def test_gradients_that_come_in_two_pieces_are_refused():
    """A module that two reentrant checkpoints share gets its gradient from two backward passes."""
    block = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    StepInBackward(optimizer)
    x = torch.ones(2, 4, requires_grad=True)
    y = checkpoint(block, checkpoint(block, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(UsageError, match="use_reentrant=False"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, "LBFGS is not known to update each parameter by itself"),
        (
            type("Mine", (torch.optim.SGD,), {"step": id, "__module__": "mine"}),
            "mine's Mine is not",
        ),
    ],
)
def test_optimizers_that_may_look_at_several_parameters_are_refused(make, words):
    with pytest.raises(UsageError, match=words):
        StepInBackward(make(net().parameters(), lr=0.1))


MEMORY = """
    import json, torch
    from memfit.strategies.optimizer_state import StepInBackward

    def plain(model):
        optimizer = torch.optim.Adam(model.parameters())
        return optimizer.step, optimizer.zero_grad

    def by_hand(model):
        optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}
        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        return (lambda: None,) * 2

    def ours(model):
        optimizer = torch.optim.Adam(model.parameters())
        StepInBackward(optimizer)
        return optimizer.step, optimizer.zero_grad

    def peaks(prepare):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
        step, zero_grad = prepare(model)
        found = []
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            model(torch.ones(16, 1024, device="cuda")).sum().backward()
            step()
            zero_grad()
            found += [torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before]
        return found

    warm_up = peaks(plain)  # cuBLAS's workspace is there from now on
    with open("peaks.json", "w") as file:
        json.dump({way.__name__: peaks(way) for way in (plain, by_hand, ours)}, file)
"""


def test_on_the_ghost_it_takes_what_the_loop_by_hand_takes_to_the_byte(dry_run):
    ran = dry_run(MEMORY, options=("--steps", "1000"))
    found = json.loads((ran.folder / "peaks.json").read_text())
    assert found["ours"] == found["by_hand"]
    weights = 8 * 4 * 1024 * 1025
    gradients = found["plain"][2] - found["ours"][2]
    assert 0.5 * weights < gradients < 2 * weights


def test_hooks_that_want_gradients_are_refused():
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UsageError, match="would find no gradients"):
        StepInBackward(optimizer)


def test_ranks_would_update_before_they_agree():
    """Row 29, where there are several ranks."""

    class Replica(DistributedDataParallel):
        def __init__(self, module):  # no ranks here
            nn.Module.__init__(self)
            self.module = module

    model = nn.ModuleDict({"inner": Replica(net())})
    with pytest.raises(UsageError, match=r"DistributedDataParallel \(inner\)"):
        IN_BACKWARD.optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


@pytest.mark.parametrize(
    ("accumulation", "precision", "words"),
    [
        (None, None, None),
        (Accumulation(1), Precision("bf16"), None),
        (Accumulation(2), None, "several micro-batches"),
        (Accumulation(micro_batch_size=4), None, "several micro-batches"),
        (None, Precision("fp16"), "loss scaling"),
        (None, SimpleNamespace(dtype="bf16", master_weights=True), "master_weights"),
    ],
)
def test_conflicts_with_what_needs_all_gradients(accumulation, precision, words):
    """Row 29."""
    found = IN_BACKWARD.conflicts(SimpleNamespace(accumulation=accumulation, precision=precision))
    assert (found is None) if words is None else (words in found)
