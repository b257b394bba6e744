"""Files of settings in place of a plan: three formats of the same, and what is refused; no file runs."""

import json

import pytest

from memfit.errors import FileFormatError, MemfitError, UsageError
from memfit.planning.strategies_to_compare import strategies_to_compare
from memfit.records import Equality
from memfit.strategies.read_configuration import configure
from memfit.strategies.read_plan_or_settings import read_plan_or_settings

CONFIG = """
from mmdet.models import RetinaNet
import os
raise SystemExit("memfit has run the file")
norm = dict(type="BN", eps=-1e-5)
lr: float = 0.01 * 8
model = dict(type=RetinaNet, backbone=dict(depth=50, norm_cfg=norm, with_cp=True), heads=[norm, (1, None)])
optimizer = dict(type="SGD", lr=lr, path=os.path.join("a", "b"))
fp16 = dict(loss_scale=512.)
"""
SAME = {
    "config.py": CONFIG,
    "settings.json": json.dumps({"fp16": {"loss_scale": 512.0}, "model": {"backbone": {"with_cp": True}}}),
    "settings.toml": "fp16.loss_scale = 512.0\nmodel.backbone.with_cp = true",
}
BOMB = "\n".join(
    ["a0 = [1, 1]", *(f"a{n} = [a{n - 1}, a{n - 1}]" for n in range(1, 60)), "model = dict(x=a59)"]
)


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a file."""

    def write(name, text):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize("name", SAME)
def test_every_format_of_the_same_settings_is_the_same_plan(written, name):
    file = written(name, SAME[name])
    found = read_plan_or_settings(file)
    scale = found.change.plan["precision"]["loss_scale"]
    assert (scale["init_scale"], scale["mode"]) == (512.0, "static")
    assert found.change.plan["checkpointing"] == {"blocks": "backbone"}
    assert found.equality is Equality.OTHER
    assert configure(found.change.plan).plan == configure(file).plan


def test_a_plan_s_file_is_read_as_before(written):
    plan = written("plan.json", '{"plan": {"checkpointing": {"every": 2}}, "allocated": 7}')
    assert read_plan_or_settings(plan).allocated == 7
    assert read_plan_or_settings(plan).change.plan == {"checkpointing": {"every": 2}}


def test_8_bits_are_those_of_the_row_of_compare(written):
    row = {each.name: each.change.plan for each in strategies_to_compare(1)}
    found = read_plan_or_settings(written("settings.json", '{"optimizer_state": {"bits": 8}}'))
    assert found.change.plan == row["8-bit optimizer state"]


def test_what_decides_nothing_in_a_python_file_is_left_out(written):
    text = "import os\nif os.path.exists('a'):\n    lr = 2\nwith_cp = True\ndef schedule(): return with_cp"
    assert read_plan_or_settings(written("a.py", text)).change.plan == {
        "checkpointing": {"blocks": "backbone"}
    }


def test_settings_that_keep_every_bit_are_said_to(written):
    for text in ("[optimizer_state]\noffload = true", "checkpointing = true", "[offload]\nprefetch = 2"):
        assert read_plan_or_settings(written("settings.toml", text)).equality is Equality.BITWISE


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.py", "fp16 = dict(loss_scale=2**9)", r"not '2 [*][*] 9 \(no literal: a.py:1\)'"),
        ("a.py", "\nfp16 = dict(loss_scale=scale)", r"not 'scale \(no literal: a.py:2\)'"),
        ("a.py", "lr = 1", "assigns none that memfit reads, such as fp16"),
        ("a.py", "_base_ = ['b.py']\nfp16 = True", "line 1 inherits from other files"),
        ("a.py", "with read_base():\n    from b import *\nfp16 = True", "line 1 inherits from other files"),
        ("a.py", "fp16 = dict(", "it is not valid Python"),
        ("a.py", "fp16 = " + "-" * 200_000 + "1", r"it is not valid Python \(.+\)"),
        ("a.py", "fp16 = " + "[" * 90 + "]" * 90, "nested more than 32 levels|must be true, false or a dict"),
        ("a.py", BOMB, "line 14 has more than 20,000 values"),
        ("a.py", b"fp16 = \xff", "it is not a text file"),
        ("a.py", "fp16 = True\0", "it is not valid Python"),
        ("a.py", "fp16 = True\nif debug:\n    fp16 = None", "a.py: line 2 may change fp16, and memfit reads"),
        ("a.py", "fp16 = {}\nfor each in fp16: pass", "line 2 may change fp16"),
        ("a.py", "scale = 2.0\nscale *= 2\nfp16 = dict(loss_scale=scale)", "line 2 may change scale"),
        ("a.py", "fp16 = {}\nfp16['loss_scale'] = 2.0", "line 2 may change fp16"),
        ("a.py", "fp16 = {}\nfp16.update(loss_scale=2.0)", "line 2 may change fp16"),
        ("a.py", "lr, fp16 = 1, True", "line 1 may change fp16"),
        ("a.py", "with_cp = True\ndel with_cp", "line 2 may change with_cp"),
        ("a.py", "with_cp = True\nfrom other import value as with_cp", "line 2 may change with_cp"),
        ("a.py", "with_cp = True\ndef with_cp(): ...", "line 2 may change with_cp"),
        (
            "a.json",
            '{"plan": {"checkpointing": {}}, "fp16": {"loss_scale": 512.0}, "gpu": 1}',
            "a.json: 'fp16', 'gpu' beside 'plan' is nothing that memfit plan writes. Move settings into",
        ),
        ("a.json", '{"fp61": true}', "Nearest: fp16"),
        ("a.json", '{"fp16": ', "it is not valid JSON"),
        ("a.json", "{}", "it has no settings under 'plan'"),
        ("a.json", '{"plan": {"batch_slices": 2}}', "'batch_slices' is 2, and not an object"),
        ("a.json", '{"fp16": ' + "[" * 100_000, "it is not valid JSON"),
        ("a.toml", "fp16 = 1" + "0" * 5000, "it is not valid TOML|at most 64 bits"),
        ("a.toml", "max_grad_norm = 1.0", "clipping of gradients, which belongs to the training loop"),
        ("a.toml", "fp16 = false", "no setting of memfit.Plan"),
        ("a.toml", "x" * (2 << 20), "a.toml"),
    ],
    ids=map(str, range(29)),
)
def test_other_files_are_refused_with_what_and_where(written, name, text, says):
    with pytest.raises(MemfitError, match=says):
        read_plan_or_settings(written(name, text))


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(FileFormatError, match="No such file"):
        read_plan_or_settings(tmp_path / "plan.json")
    with pytest.raises(UsageError, match="No such file"):
        read_plan_or_settings(tmp_path / "config.py")
