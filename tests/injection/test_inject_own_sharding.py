"""Calls by which a script shards itself: how they are noted, and what is passed in them."""

import json
import sys
from types import SimpleNamespace

import pytest

from memfit.injection.inject_own_sharding import OwnShardingInjector
from memfit.patching.installed_hooks import InstalledHooks

DEEPSPEED = "deepspeed.initialize"
STAGE_3 = {"zero_optimization": {"stage": 3}}
CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5}}
CHANGED = {"train_batch_size": 8, "zero_optimization": {"stage": 3, "reduce_bucket_size": 5}}
PACKAGE = """
def initialize(args=None, model=None, optimizer=None, config=None, mesh_param=None, config_params=None):
    return args, model, config, config_params
"""


@pytest.fixture
def deepspeed(tmp_path, monkeypatch):
    """Return a function that imports a package with DeepSpeed's function, its options changed."""
    (tmp_path / "deepspeed.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    hooks = InstalledHooks()

    def imported(options=None):
        monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
        noted = []
        OwnShardingInjector({DEEPSPEED: options} if options else {}, noted.append).install(hooks)
        import deepspeed

        return deepspeed, noted

    yield imported
    hooks.remove()


def test_an_option_is_merged_into_the_configuration_wherever_it_is_passed(deepspeed, tmp_path):
    package, _ = deepspeed(STAGE_3)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CONFIG))
    given = SimpleNamespace(deepspeed_config=str(file), local_rank=0)
    assert package.initialize(config=CONFIG)[2:] == (CHANGED, None)
    assert package.initialize(config=str(file))[2:] == (CHANGED, None)
    assert package.initialize(model=1, config_params=CONFIG) == (None, 1, CHANGED, None)
    args, _, config, _ = package.initialize(given)
    assert (config, args.deepspeed_config, args.local_rank) == (CHANGED, None, 0)
    assert given.deepspeed_config == str(file)
    assert CONFIG["zero_optimization"]["stage"] == 2


def test_without_an_option_the_call_is_only_noted(deepspeed):
    package, noted = deepspeed()
    assert package.initialize(config=CONFIG)[2] is CONFIG
    ((call,),) = noted
    assert (call.name, call.call) == ("DeepSpeed", DEEPSPEED)
    stages = [each["zero_optimization"].get("stage") for each in (*call.options, *call.others)]
    assert 2 not in stages
    assert {0, 1, 3} <= set(stages)


def test_a_call_whose_configuration_cannot_be_read_is_neither_noted_nor_changed(deepspeed):
    package, noted = deepspeed(STAGE_3)
    assert package.initialize(config="bm90IGEgZmlsZQ==")[2] == "bm90IGEgZmlsZQ=="
    assert package.initialize()[2] is None
    assert noted == []


def test_an_option_that_one_of_the_calls_lacks_is_worth_a_run(deepspeed):
    package, noted = deepspeed()
    package.initialize(config=CHANGED)
    package.initialize(config=CONFIG)
    assert STAGE_3 in noted[-1][0].others
    assert STAGE_3 not in noted[0][0].others
