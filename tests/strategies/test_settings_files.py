"""Settings from files: TOML, and networks in Caffe's text format."""

import pytest

from memfit.errors import FileFormatError, UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.configuration import configure
from memfit.strategies.legacy_settings import parse_mem_param
from memfit.strategies.plan import Plan
from memfit.strategies.precision import Precision


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


def test_caffes_text_is_read_and_reported_as_pytorchs_default(tmp_path):
    fields = {"optimize_train": True, "optimize_test": False, "exclude_blob": ["fc1", "fc2"]}
    assert len(configure({"mem_param": {"exclude_blob": "fc1"}}).echo) == 1
    assert parse_mem_param(NETWORK) == fields
    assert parse_mem_param('optimize_train: true exclude_blob: "fc1"')["exclude_blob"] == ["fc1"]
    path = tmp_path / "net.prototxt"
    path.write_text(NETWORK)
    for given in (path, {"mem_param": NETWORK}, {"mem_param": fields}):
        found = configure(given)
        assert found.plan == Plan()
        assert [effect.split(":")[0] for _, effect in found.echo] == ["nothing to set"] * 3


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
