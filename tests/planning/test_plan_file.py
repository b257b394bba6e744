"""Plan files: read as data, and refused if they hold anything else."""

import json
from pathlib import Path

import pytest

from memfit.errors import FileFormatError, UsageError
from memfit.planning.plan_file import read_plan
from memfit.records import SCHEMA_VERSION, Change, Equality
from memfit.strategies.read_configuration import configure

SETTINGS = {"checkpointing": {"regions": [{"modules": ["0"], "save_ops": ["aten.addmm.default:1"]}]}}


@pytest.fixture
def written(tmp_path):
    def write(content):
        path = tmp_path / "plan.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def test_a_plan_is_read_as_a_change_and_as_a_plan(written):
    path = written({"plan": SETTINGS, "allocator": "expandable_segments:True", "needs": None})
    found = read_plan(path)
    assert found.change == Change(SETTINGS, "expandable_segments:True")
    plan = configure(path).plan
    assert [(each.modules, each.save_ops) for each in plan.checkpointing.regions] == [
        (("0",), ("aten.addmm.default:1",))
    ]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "[" * 100_000, {"plan": None}, {"plan": [1]}, {"plan": {"checkpointing": 3}}, {}],
)
def test_a_file_without_a_plan_is_refused_with_the_command_that_writes_one(written, content):
    with pytest.raises(FileFormatError, match=r"Cannot read a plan from .*plan\.json"):
        read_plan(written(content))


@pytest.mark.parametrize("schema", [0, SCHEMA_VERSION + 1, "1", None])
def test_a_plan_of_another_schema_is_refused_with_what_to_do(written, schema):
    says = rf"plan\.json: its schema is {schema!r}, and this memfit reads schema 1\..*memfit plan -o .*plan"
    with pytest.raises(FileFormatError, match=says):
        read_plan(written({"schema": schema, "plan": SETTINGS}))
    assert read_plan(written({"schema": SCHEMA_VERSION, "plan": SETTINGS})).change.plan == SETTINGS


def test_what_a_plan_promises_is_what_its_file_says_or_follows_from_its_settings(written):
    assert read_plan(written({"plan": SETTINGS})).equality is Equality.BITWISE
    assert read_plan(written({"plan": SETTINGS, "equality": "up to rounding"})).equality is Equality.ROUNDING
    assert read_plan(written({"plan": SETTINGS, "equality": None})).equality is Equality.BITWISE


def test_all_that_memfit_plan_writes_is_known(written):
    schema = json.loads((Path(__file__).parents[2] / "docs/plan.schema.json").read_text())
    names = schema["$defs"]["ScriptPlan"]["properties"].keys()
    of_plan = {"equality": "up to rounding", "command": [], "allocated": 1, "operations": None}
    known = {
        "nproc": 1,
        "nnodes": 1,
        "models": [],
        "versions": {},
        "fused": False,
        "allocator": "",
        "schema": 1,
    }
    content = dict.fromkeys(names, None) | of_plan | known | {"plan": SETTINGS, "own_sharding": {}}
    assert read_plan(written(content)).change.plan == SETTINGS
    with pytest.raises(FileFormatError, match=r"'needed' beside 'plan' is nothing that memfit plan writes"):
        read_plan(written(content | {"needed": 1}))


def test_what_a_plan_allocates_is_for_the_command_that_it_was_made_for(written):
    plan = read_plan(written({"plan": SETTINGS, "command": ["train.py", "--wide"], "allocated": 1024}))
    assert plan.allocated_for(("train.py", "--wide")) == 1024
    assert plan.allocated_for(("train.py",)) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("equality", "roughly"), ("allocated", "much"), ("command", [1]), ("micro_batches", {"count": 2})],
)
def test_what_is_not_of_its_type_is_refused_by_name(written, name, value):
    with pytest.raises(FileFormatError, match=rf"Cannot read a plan from .*plan\.json: '{name}': "):
        read_plan(written({"plan": SETTINGS, name: value}))


def test_an_allocator_setting_that_is_no_string_is_refused(written):
    with pytest.raises(FileFormatError, match="allocator"):
        read_plan(written({"plan": {}, "allocator": "a\0b"}))


def test_an_optimizer_is_a_number(written):
    assert read_plan(written({"plan": {}, "optimizer": 1})).change.optimizer == 1
    for wrong in (True, "1", 0.5):
        with pytest.raises(FileFormatError, match="optimizer"):
            read_plan(written({"plan": {}, "optimizer": wrong}))


def test_an_edited_plan_is_checked_as_settings_are(written):
    wrong = {"checkpointing": {"regions": [{"modules": ["0"], "save_ops": ["aten.adm"]}]}}
    with pytest.raises(UsageError, match=r"aten\.adm"):
        configure(written({"plan": wrong}))


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"fully_shard": {"offload_policy": "print()"}}, r"fully_shard\(offload_policy=print\(\)\)"),
        ({"exec": {"code": "1"}}, r"exec\(code=1\)"),
    ],
)
def test_only_options_that_memfit_can_change_are_read(written, own, named):
    with pytest.raises(FileFormatError, match=rf"'own_sharding': memfit cannot change {named}\."):
        read_plan(written({"plan": {}, "own_sharding": own}))


def test_an_option_of_the_scripts_own_sharding_is_read(written):
    own = {"fully_shard": {"offload_policy": "CPUOffloadPolicy()"}}
    found = read_plan(written({"plan": {}, "own_sharding": own}))
    assert (found.change, found.equality) == (Change(own_sharding=own), Equality.ROUNDING)
