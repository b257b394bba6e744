"""Optimizer state on the host: the same run bit for bit, and the state is on the device only while in use."""

import copy
import json
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch

from memfit.errors import UsageError
from memfit.strategies.apply import revert
from memfit.strategies.mechanisms.host_copies import HostCopier
from memfit.strategies.mechanisms.offloaded_optimizer_state import BLOCK_BYTES, OffloadedOptimizerState
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.precision import Precision
from memfit.train.engine import Engine
from support.late_stream import late_state_copies
from support.optimizer_loops import (
    OPTIMIZERS,
    assert_equal_states,
    groups,
    halving,
    loss_of,
    net,
    same,
    train,
)

OFFLOADED = OptimizerState(offload=True)


@pytest.fixture(autouse=True)
def streams():
    with late_state_copies() as made:
        yield made


@pytest.mark.parametrize("block_bytes", [0, 200, 2**20])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_offloading_the_state_is_the_same_run_bit_for_bit(kind, block_bytes, streams):
    ours, plain = net(), net()
    optimizer = getattr(torch.optim, kind)(groups(ours), **OPTIMIZERS[kind])
    reference = getattr(torch.optim, kind)(groups(plain), **OPTIMIZERS[kind])
    train(ours, OffloadedOptimizerState(optimizer, block_bytes), scheduler=halving(optimizer))
    train(plain, reference, scheduler=halving(reference))
    assert same(ours, plain)
    assert not same(ours, net())
    assert_equal_states(optimizer.state_dict(), reference.state_dict())
    assert any("back" in stream.log for stream in streams)


def engine_of(model, plan=OFFLOADED, **options):
    optimizer = torch.optim.AdamW(groups(model), lr=0.05)
    return Engine(model, plan, optimizer=optimizer, loss=loss_of, **options)


def trained(engine, seeds):
    for seed in seeds:
        engine.step(seed)
    return engine.model


def test_states_in_engines_are_the_same_and_load_into_runs_with_and_without_offload():
    plain = trained(engine_of(net(), None), range(6))
    assert same(trained(engine_of(net()), range(6)), plain)
    in_backward = OptimizerState(offload=True, step_in_backward=True)
    assert same(trained(engine_of(net(), in_backward), range(6)), plain)
    for before, after in ((OFFLOADED, OFFLOADED), (None, OFFLOADED), (OFFLOADED, None)):
        first, second = engine_of(net(), before), engine_of(net(width=8), after)
        trained(first, range(3))
        saved = copy.deepcopy(first.state_dict())
        second.load_state_dict(first.state_dict())
        assert same(trained(second, range(3, 6)), plain)
        trained(first, range(3, 6))
        assert_equal_states(saved["optimizer"], saved["optimizer"])


def test_the_state_is_in_host_memory_between_updates(streams):
    engine = engine_of(net())
    trained(engine, range(2))
    hosts = {copied.data_ptr() for copied in streams[1].hosts}
    state = [value for entry in engine.optimizer.state.values() for value in entry.values()]
    assert {value.untyped_storage().data_ptr() for value in state} <= hosts
    saved = copy.deepcopy(engine.optimizer.state_dict())
    engine.load_state_dict(engine.state_dict())
    state = [value for entry in engine.optimizer.state.values() for value in entry.values()]
    hosts = {copied.data_ptr() for copied in streams[1].hosts}
    assert {value.untyped_storage().data_ptr() for value in state} <= hosts
    assert_equal_states(engine.optimizer.state_dict(), saved)


def test_a_model_that_is_reverted_has_its_state_on_the_device_again(streams):
    engine, plain = engine_of(net()), net()
    reference = torch.optim.AdamW(groups(plain), lr=0.05)
    trained(engine, range(3))
    revert(engine.model)
    hosts = {copied.data_ptr() for copied in streams[1].hosts}
    state = [value for entry in engine.optimizer.state.values() for value in entry.values()]
    assert not hosts & {value.untyped_storage().data_ptr() for value in state}
    train(engine.model, engine.optimizer, first=3)
    train(plain, reference, steps=8)
    assert same(engine.model, plain)


def test_parameters_that_join_or_have_no_gradient_keep_their_own_state():
    ours, plain = net(), net()

    def run(model, step_with):
        optimizer = torch.optim.Adam(list(model[0].parameters()), lr=0.1)
        stepper = step_with(optimizer)
        for seed in range(9):
            if seed == 2:
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
            model[0].weight.requires_grad_(seed not in (4, 5))
            loss_of(model, seed).backward()
            stepper.step()
            model.zero_grad()
        return optimizer.state_dict()

    assert_equal_states(
        run(ours, lambda optimizer: OffloadedOptimizerState(optimizer, 0)),
        run(plain, lambda optimizer: optimizer),
    )
    assert same(ours, plain)


def test_step_hooks_see_whole_steps_with_all_gradients():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad is not None for p in model.parameters()]))
    optimizer.register_step_post_hook(lambda *_: seen.append("done"))
    train(model, OffloadedOptimizerState(optimizer, 0), steps=2)
    assert seen == [[True] * 6, "done"] * 2


def test_an_optimizer_whose_parameters_depend_on_each_other_is_refused():
    with pytest.raises(UsageError, match=r"optimizer_state\.offload needs an optimizer that updates each"):
        OffloadedOptimizerState(torch.optim.LBFGS(net().parameters()))


@pytest.mark.slow
@pytest.mark.process  # torchao's step is compiled
def test_quantised_state_moves_as_well(streams):
    pytest.importorskip("torchao")
    plan, kept = (OptimizerState(bits=8, backend="torchao", offload=each) for each in (True, False))
    ours, plain = engine_of(net(width=64), plan), engine_of(net(width=64), kept)
    assert same(trained(ours, range(4)), trained(plain, range(4)))
    assert "back" in streams[0].log


@pytest.mark.parametrize("settings", [OFFLOADED, OptimizerState(offload=True, step_in_backward=True)])
def test_on_a_cpu_offload_warns_once_and_does_nothing(settings, monkeypatch):
    monkeypatch.setattr(
        "memfit.strategies.mechanisms.offloaded_optimizer_state.host_copier_for_device", lambda _: None
    )
    engine = engine_of(net(), settings)
    with pytest.warns(UserWarning, match=r"optimizer_state\.offload does nothing here"):
        engine.step(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step(1)
    assert same(engine.model, trained(engine_of(net(), None), range(2)))


@pytest.mark.parametrize(
    "kind",
    ["several dtypes", pytest.param("quantised", marks=[pytest.mark.process, pytest.mark.slow])],
)
def test_a_state_of_several_dtypes_is_saved_and_loaded(kind, tmp_path):
    if kind == "quantised":
        pytest.importorskip("torchao")
    low = {"bits": 8, "backend": "torchao"} if kind == "quantised" else {}
    plan = OptimizerState(**low, offload=True)

    def made():
        model = net(width=64)
        if kind == "several dtypes":
            model[2].to(torch.float64)
            model[1].register_forward_hook(lambda _, __, out: out.double())
            model[3].register_forward_hook(lambda _, __, out: out.float())
        return engine_of(model, plan)

    run, resumed = made(), made()
    trained(run, range(3))
    run.save(tmp_path / "run")
    torch.save(run.optimizer.state_dict(), tmp_path / "optimizer")
    resumed.load(tmp_path / "run")
    assert same(trained(run, range(3, 5)), trained(resumed, range(3, 5)))


MASTERS = [OFFLOADED, Precision("bf16", autocast=False, master_weights=True)]


def low_precision_loss(model, seed):
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    return model(batch.to(model[0].weight.dtype)).float().square().mean()


def master_engine(plan):
    model = net()
    return Engine(
        model,
        plan,
        optimizer=torch.optim.AdamW(groups(model), lr=0.05),
        loss=low_precision_loss,
        max_grad_norm=1.0,
    )


def test_float32_copies_of_parameters_wait_with_their_state(streams):
    engine, plain = master_engine(MASTERS), master_engine(MASTERS[1])
    before = copy.deepcopy(plain.state_dict()["model"])
    for seed in range(3):
        engine.step(seed)
        plain.step(seed)
        assert all(p.isnan().all() for group in engine.optimizer.param_groups for p in group["params"])
        assert {value.dtype for value in engine.state_dict()["model"].values()} == {torch.float32}
        torch.testing.assert_close(engine.state_dict()["model"], plain.state_dict()["model"], rtol=0, atol=0)
        assert same(engine.model, plain.model)
    assert not torch.equal(before["0.weight"], plain.state_dict()["model"]["0.weight"])
    resumed = master_engine(MASTERS)
    resumed.load_state_dict(engine.state_dict())
    for each in (resumed, plain):
        each.step(3)
    assert same(resumed.model, plain.model)
    for each in (resumed, plain):
        revert(each.model)
    assert same(resumed.model, plain.model)
    assert not any(parameter.isnan().any() for parameter in resumed.model.parameters())
    train(resumed.model, resumed.optimizer)
    train(plain.model, plain.optimizer)
    assert same(resumed.model, plain.model)


def test_step_hooks_that_would_find_no_values_are_refused():
    engine = master_engine(MASTERS)
    hook = engine.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UsageError, match=r"step hooks, which would find NaN in place of the float32 copies"):
        engine.step(0)
    hook.remove()
    assert engine.step(0).updated


SCRIPT = """
    import json, torch, memfit
    from torch import nn

    def trained(settings, blocks, samples, dtype=torch.float32):
        torch.cuda.empty_cache()
        layers = [nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(blocks)]
        model = nn.Sequential(*layers).cuda()
        batch = torch.randn(samples, 1024, device="cuda", dtype=dtype)
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        optimizer = torch.optim.Adam(model.parameters())
        loss = lambda model, batch: model(batch).square().mean()
        engine = memfit.Engine(model, settings, optimizer=optimizer, loss=loss)
        peaks = []
        for step in range(4):
            torch.cuda.reset_peak_memory_stats()
            engine.step(batch)
            peaks.append(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)
        rest = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
        values = [value for state in optimizer.state.values() for value in state.values()]
        devices = sorted({value.device.type for value in values if value.ndim})
        return {"peaks": peaks, "rest": rest, "devices": devices}

    trained(None, 1, 1)  # libraries allocate their workspaces once
    state = memfit.OptimizerState
    settings = {
        "plain": None,
        "offloaded": state(offload=True),
        "in backward": state(step_in_backward=True),
        "offloaded, in backward": state(offload=True, step_in_backward=True),
    }
    found = {
        size: {name: trained(each, *shape) for name, each in settings.items()}
        for size, shape in {"activations": (6, 32768), "update": (32, 1)}.items()
    }
    masters = memfit.Precision("bf16", autocast=False, master_weights=True)
    found["masters"] = {
        name: trained([state(offload=offload), masters], 6, 32768, torch.bfloat16)
        for name, offload in {"plain": False, "offloaded": True}.items()
    }
    open("found.json", "w").write(json.dumps(found))
"""
LAYER = (1024 * 1024 + 1024) * 4
"""Bytes of a layer's parameters; its gradients take as many, and its state twice as many."""


@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    """Return the peaks of training on the ghost, above what model and batch take."""
    folder = tmp_path_factory.mktemp("peaks")
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "memfit", "dry-run", "--steps", "100", "script.py"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.process
def test_on_the_ghost_the_peak_falls_by_the_state(peaks):
    found, state = peaks["activations"], 6 * 2 * LAYER
    for with_offload, without in (("offloaded", "plain"), ("offloaded, in backward", "in backward")):
        fall = [
            before - after
            for before, after in zip(found[without]["peaks"], found[with_offload]["peaks"], strict=True)
        ]
        assert fall[1:] == [state] * 3, (with_offload, found)
        assert found[without]["rest"] - found[with_offload]["rest"] == state
        assert (found[without]["devices"], found[with_offload]["devices"]) == (["cuda"], ["cpu"])


@pytest.mark.process
def test_on_the_ghost_float32_copies_leave_the_device_too(peaks):
    found = peaks["masters"]
    fall = found["plain"]["peaks"][-1] - found["offloaded"]["peaks"][-1]
    stand_ins = 4 * len(range(0, 6 * LAYER, BLOCK_BYTES // LAYER * LAYER))  # a NaN for each block
    assert fall == 6 * 3 * LAYER - stand_ins, found


@pytest.mark.process
def test_an_update_holds_three_blocks_of_the_state_at_most(peaks):
    found = {name: figures["peaks"][-1] for name, figures in peaks["update"].items()}
    block = BLOCK_BYTES // LAYER * LAYER
    state, temporaries = 2 * block, block
    assert 0 <= found["offloaded"] - 32 * LAYER - 3 * state - temporaries < LAYER / 100
    # One gradient, the state of two weights, and that of the bias between them.
    assert 0 <= found["offloaded, in backward"] - LAYER - 2 * 2 * LAYER < LAYER / 10


def test_host_memory_is_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        assert HostCopier(torch.device("cpu"), pin_memory=False).host_memory(8).is_cpu
