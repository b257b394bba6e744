"""Settings from files: TOML, and networks in Caffe's text format."""

import pytest

from memfit.errors import FileFormatError, UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.arena_settings import ArenaSettings
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.plan import Plan
from memfit.strategies.precision import Precision
from memfit.strategies.read_configuration import configure
from memfit.strategies.translate_other_frameworks_settings import parse_caffe_mem_param_block


def test_a_toml_file_is_read(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text(
        'precision = "bf16"\ngradient_accumulation_steps = 4\nmax_grad_norm = 1.0\n'
        '[checkpointing]\nmodules = ["a"]\n'
    )
    expected = Plan(
        Precision("bf16"),
        accumulation=Accumulation(batches_per_update=4, remainder="step"),
        checkpointing=Checkpointing("a"),
    )
    for given in (path, str(path)):
        assert configure(given).plan == expected
        assert configure(given).max_grad_norm == 1.0


@pytest.mark.parametrize(
    "content", [b"precision = ", b"\xff\xfe", b"mini_steps = 1" + b"0" * 5000, b"a=[" * 10**4]
)
def test_files_that_are_not_toml_are_refused(content, tmp_path):
    path = tmp_path / "train.toml"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=r"Cannot read settings from .*train\.toml"):
        configure(path)


NETWORK = """
name: "example_net"
mem_param {  # multiloading
  optimize_train: true
  optimize_test: false;
  exclude_blob: "fc1"
  exclude_blob: 'fc2'
}
layer { name: "data" type: "Input" }
"""


def test_caffes_text_sets_up_the_arena(tmp_path):
    fields = {"optimize_train": True, "optimize_test": False, "exclude_blob": ["fc1", "fc2"]}
    assert parse_caffe_mem_param_block(NETWORK) == fields
    assert parse_caffe_mem_param_block('optimize_train: true exclude_blob: "fc1"')["exclude_blob"] == ["fc1"]
    path = tmp_path / "net.prototxt"
    path.write_text(NETWORK)
    for given in (path, {"mem_param": NETWORK}, {"mem_param": fields}):
        found = configure(given)
        assert found.plan == Plan()
        assert found.arena == ArenaSettings(optimize_test=False, exclude=("fc1", "fc2"))
        assert str(found).splitlines() == [
            "mem_param.optimize_train=True          ->  arena.optimize_train=True",
            "mem_param.optimize_test=False          ->  arena.optimize_test=False",
            "mem_param.exclude_blob=['fc1', 'fc2']  ->  arena.exclude=('fc1', 'fc2')",
        ]


@pytest.mark.parametrize(
    ("text", "train", "test"),
    [
        ("", True, False),
        ('exclude_blob: "fc1"', True, False),
        ("optimize_train: false", False, False),
        ("optimize_test: true", True, True),
    ],
)
def test_what_a_network_leaves_out_has_caffes_default(text, train, test):
    arena = configure({"mem_param": f"mem_param {{ {text} }}"}).arena
    assert (arena.optimize_train, arena.optimize_test) == (train, test)


def test_an_explicit_setting_overrides_caffes_default():
    found = configure({"mem_param": {"optimize_train": True}, "arena": {"optimize_test": True}})
    assert found.arena == ArenaSettings()
    assert ("mem_param", "arena.optimize_test=False (Caffe's default)") not in found.echo


def test_the_arena_is_set_up_in_toml(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text('arena = { optimize_test = false, exclude = ["layer4", "fc"] }\nparts_per_batch = 2\n')
    found = configure(path)
    assert found.arena == ArenaSettings(optimize_test=False, exclude=("layer4", "fc"))
    assert found.plan == Plan(accumulation=Accumulation(parts_per_batch=2))
    path.write_text("arena = true")
    assert configure(path).arena == ArenaSettings()
    path.write_text('[arena]\nexclude = "fc"')
    assert configure(path).arena == ArenaSettings(exclude=("fc",))
    path.write_text("parts_per_batch = 2")
    assert configure(path).arena is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layer { name: 'a' }", "it has 0"),
        ("mem_param { } mem_param { }", "it has 2"),
        ("mem_param { optimize_train true }", "Cannot parse mem_param at 'optimize_train true'"),
        ("mem_param { optimize_train: tru }", "optimize_train must be true or false, not 'tru'"),
    ],
)
def test_invalid_caffe_text_is_refused(text, words):
    with pytest.raises(UsageError, match=words):
        configure({"mem_param": text})
