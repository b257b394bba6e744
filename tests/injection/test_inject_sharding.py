"""Shardings that do not suit a script are refused by name; optimizers take what belongs to the shards."""

import weakref

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memfit.errors import UsageError
from memfit.injection.inject_sharding import ShardingInjector
from memfit.injection.route_through_ddp import route_through_ddp
from memfit.strategies.plan import Plan
from memfit.strategies.precision import Precision
from memfit.strategies.sharding import Sharding


@pytest.fixture
def injector():
    """Return a function that makes an injector for a mode; and a list of what it refuses and reports."""

    def make(mode, **strategies):
        sharding = Sharding(mode)
        plan = Plan(sharding=sharding, **strategies)
        return ShardingInjector(sharding, plan, make.refused.append, lambda: make.changes.append(1))

    make.refused, make.changes = [], []
    return make


@pytest.fixture
def group():
    """Join a process group of two, as a script does."""
    from torch.testing._internal.distributed import fake_pg

    dist.init_process_group("fake", rank=0, world_size=2, store=fake_pg.FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_a_model_that_the_script_shards_itself_is_refused(injector, group, mode):
    model = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="itself shares Linear among ranks, by DistributedDataParallel"):
        injector(mode).shard(model)


def test_zero1_shards_the_optimizer_of_a_script_with_ddp(injector, group):
    model = DistributedDataParallel(nn.Linear(2, 2))
    one = injector("zero1")
    one.shard(model)
    assert one.has(model)


def test_a_script_with_ddp_gets_the_other_strategies_of_the_plan(injector, group):
    model = DistributedDataParallel(nn.Linear(2, 2))
    injector("zero1", precision=Precision("bf16")).shard(model)
    assert model(torch.randn(1, 2)).dtype == torch.bfloat16


def test_a_script_that_joins_a_group_without_ddp_is_refused(injector, group):
    with pytest.raises(UsageError, match="joins a process group itself, and Linear is in no Distributed"):
        injector("ddp").shard(nn.Linear(2, 2))


def test_a_model_that_moves_to_the_gpu_later_is_refused(injector, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UsageError, match="Linear is not on the GPU yet when its optimizer is created"):
        injector("fsdp2").shard(nn.Linear(2, 2))
    assert not dist.is_initialized()


def test_calls_of_a_model_go_through_its_wrapper_once_and_copies_do_not():
    import copy

    model = nn.Sequential(nn.Linear(2, 2))
    calls = []

    class Wrapper(nn.Module):
        def forward(self, x):
            calls.append(x)
            return model(x)

    route_through_ddp(model, Wrapper(), Wrapper, pytest.fail, "ddp")
    x, copied = torch.ones(1, 2), copy.deepcopy(model)
    assert torch.equal(model(x), model.forward(x))
    assert len(calls) == 1
    copied(x)
    copy.deepcopy(model)(x)
    assert len(calls) == 1


def test_an_optimizer_takes_shards_in_place_of_what_was_sharded(injector):
    one = injector("fsdp2")
    whole, shard, other = (nn.Parameter(torch.zeros(n)) for n in (4, 2, 3))
    one._shards[whole] = shard
    found = one.of_shards([{"params": [whole, other], "lr": 1}, {"params": [("weight", whole)]}])
    assert found[0]["params"][0] is shard
    assert found[0]["params"][1] is other
    assert found[0]["lr"] == 1
    assert found[1]["params"][0][0] == "weight"
    assert found[1]["params"][0][1] is shard


@pytest.mark.parametrize("keeps", [(), ("bias",), ("weight", "bias")])
def test_a_script_that_keeps_whole_parameters_is_refused_unless_they_are_negligible(injector, keeps):
    one, model = injector("fsdp2"), nn.Linear(200, 2)
    before = dict(model.named_parameters())
    for name, parameter in before.items():
        one._shards[parameter] = nn.Parameter(torch.zeros(1))
        setattr(model, name, one._shards[parameter])
    one._bytes_before = 1608  # weight and bias
    one._models.append(weakref.ref(model))
    kept = [before[name] for name in keeps]
    del before, parameter
    one._check_released()
    one._check_released()
    assert len(injector.refused) == (len(kept) > 1)
    if injector.refused:
        assert "keeps 1.6 KiB of the parameters" in injector.refused[0]
        assert "so they stay in memory: weight (1.6 KiB), bias (8 B)." in injector.refused[0]
