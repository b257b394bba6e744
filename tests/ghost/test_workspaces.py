"""The rules for work space, and the questions they answer."""

import json
import tomllib

import pytest

from memfit.ghost.workspaces import RULES, Workspaces

FLOAT32, FLOAT16 = 0, 2


def tensor(*sizes, data_type=FLOAT32):
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return {"data_type": data_type, "sizes": sizes, "strides": strides}


def convolution(**changes):
    asked = {
        "kind": "convolution",
        "operation": "weight gradient",
        "compute_type": FLOAT32,
        "x": tensor(1, 64, 224, 224),
        "w": tensor(64, 64, 3, 3),
        "y": tensor(1, 64, 224, 224),
        "padding": [1, 1],
        "stride": [1, 1],
        "dilation": [1, 1],
        "fused": 0,
    }
    return asked | changes


def recurrent(cell, space, **changes):
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[cell]
    asked = {
        "kind": "recurrent",
        "space": space,
        "training": 1,
        "algorithm": 0,
        "cell": {"RNN": 1, "LSTM": 2, "GRU": 3}[cell],
        "bytes": 4,
        "input": 123,
        "hidden": 320,
        "projection": 320,
        "layers": 4,
        "directions": 1,
        "batch": 100,
        "longest": 250,
        "elements": 25_000,
        "matrices": gates * 320 * (123 + 320 + 3 * 640),
    }
    return asked | changes


@pytest.fixture
def answer():
    workspaces = Workspaces.read()
    return lambda asked: workspaces.answer(json.dumps(asked).encode())


def test_every_rule_has_a_source_and_says_what_it_is_about():
    rules = tomllib.loads(RULES.read_text())
    for rule in (*rules["convolution"], *rules["recurrent"].values()):
        assert rule["source"]
    for rule in rules["convolution"]:
        assert rule["name"]
        assert rule["bytes"] > 0


def test_the_published_convolution_and_no_other(answer):
    assert answer(convolution()) == 58_720_256
    for changes in (
        {"operation": "forward"},
        {"operation": "data gradient"},
        {"x": tensor(2, 64, 224, 224)},
        {"x": tensor(1, 64, 224, 224, data_type=FLOAT16)},
        {"w": tensor(64, 64, 5, 5)},
        {"padding": [2, 2]},
        {"stride": [2, 2]},
        {"dilation": [2, 2]},
    ):
        assert answer(convolution(**changes)) == 0, changes


# pytorch/pytorch issue 2895: Tesla P100, 4 layers, hidden size 320, input size 123, float32.
@pytest.mark.parametrize(
    ("cell", "reserve", "work"), [("LSTM", 736_000_000, 17_730_560), ("GRU", 864_000_000, 13_169_920)]
)
def test_published_sizes_of_recurrent_networks(answer, cell, reserve, work):
    assert answer(recurrent(cell, "reserve")) == reserve
    assert answer(recurrent(cell, "work")) == work


def test_recurrent_sizes_grow_with_what_they_should(answer):
    whole = answer(recurrent("LSTM", "reserve"))
    assert answer(recurrent("LSTM", "reserve", bytes=2)) == whole / 2
    assert answer(recurrent("LSTM", "reserve", elements=12_500)) == whole / 2
    assert answer(recurrent("LSTM", "reserve", directions=2)) == 2 * whole
    assert answer(recurrent("RNN", "reserve")) < whole
    assert answer(recurrent("LSTM", "work", batch=1)) < answer(recurrent("LSTM", "work"))


OTHERS = [
    {"kind": "batch norm", "space": "reserve", "mode": 1, "operations": 0, "x": tensor(8, 64, 56, 56)},
    {"kind": "dropout", "multiprocessors": 108, "threads": 2048},
    {"kind": "ctc", "probabilities": tensor(50, 16, 20), "longest": 255, "algorithm": 0},
    {"kind": "graph", "operations": 7},
    {"kind": "unknown"},
]


def test_what_has_no_rule_is_0_and_said_in_one_sentence():
    workspaces = Workspaces.read()
    assert [workspaces.answer(json.dumps(asked).encode()) for asked in OTHERS] == [0] * len(OTHERS)
    (note,) = workspaces.notes()
    assert "count as 0 bytes" in note
    for subject in ("batch normalization", "dropout", "CTC", "attention"):
        assert subject in note


def test_notes_name_the_rules_that_were_used_once_each():
    workspaces = Workspaces.read()
    assert list(workspaces.notes()) == []
    for asked in (recurrent("GRU", "work"), recurrent("GRU", "work", batch=1), convolution(), convolution()):
        workspaces.answer(json.dumps(asked).encode())
    gru, convolutions = workspaces.notes()
    assert "GRU" in gru
    assert "13,169,920" in gru
    assert "2895" in gru
    assert "58,720,256" in convolutions
