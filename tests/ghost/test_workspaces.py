"""The sizes of workspaces by rule and from cuDNN, and the notes about them."""

import json
import tomllib

import msgspec
import pytest

from memfit.ghost.cudnn.cache import EngineConfig, HeuristicsResult
from memfit.ghost.cudnn.client import NoCudnnAnswerError
from memfit.ghost.cudnn.descriptors import CudnnDescriptor, cudnn_operation_of_graph
from memfit.ghost.workspaces import RULES, WorkspaceSizes, WorkspaceSource
from memfit.records import Provenance
from support.cudnn_descriptors import FALLBACK, attention
from support.cudnn_descriptors import convolution as convolution_tree

FLOAT32, FLOAT16 = 0, 2


def tensor(*sizes, data_type=FLOAT32):
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.insert(0, strides[0] * size)
    return {"data_type": data_type, "sizes": sizes, "strides": strides}


def convolution(**changes):
    question = {
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
    return question | changes


def recurrent(cell, space, **changes):
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[cell]
    question = {
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
    return question | changes


@pytest.fixture
def answer():
    workspaces = WorkspaceSizes.read()
    return lambda question: workspaces.answer(json.dumps(question).encode())[0].workspace


def test_every_rule_has_a_source_and_a_subject():
    rules = tomllib.loads(RULES.read_text())
    single = (rules["recurrent_work"], rules["dropout"])
    for rule in (*rules["convolution"], *rules["recurrent"].values(), *single):
        assert rule["source"]
    for rule in rules["convolution"]:
        assert rule["name"]
        assert rule["bytes"] > 0


def test_the_rule_applies_to_the_published_convolution_only(answer):
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
@pytest.mark.parametrize(("cell", "reserve"), [("LSTM", 736_000_000), ("GRU", 864_000_000)])
def test_published_reserve_spaces_of_recurrent_networks(answer, cell, reserve):
    assert answer(recurrent(cell, "reserve")) == reserve


# benchmarks/gpu/results: an H100 under cuDNN 9.19, two layers of 512 on 32 sequences of 128 steps.
@pytest.mark.parametrize(
    ("cell", "size", "directions", "reserve", "work"),
    [("LSTM", 4, 1, 92_537_088, 87_294_464), ("GRU", 2, 2, 110_100_736, 103_154_176)],
)
def test_measured_spaces_of_recurrent_networks_are_within_the_stated_difference(
    answer, cell, size, directions, reserve, work
):
    gates = {"LSTM": 4, "GRU": 3}[cell]
    network = {
        "bytes": size,
        "input": 256,
        "hidden": 512,
        "projection": 512,
        "layers": 2,
        "directions": directions,
        "batch": 32,
        "longest": 128,
        "elements": 32 * 128,
        "matrices": gates * 512 * directions * (256 + 512 + directions * 512 + 512),
    }
    assert answer(recurrent(cell, "reserve", **network)) / reserve == pytest.approx(1, abs=0.01)
    assert answer(recurrent(cell, "work", **network)) / work == pytest.approx(1.03, abs=0.005)


def test_the_work_space_grows_with_matrices_pseudo_layers_and_elements(answer):
    one = {"layers": 1, "directions": 1, "matrices": 0, "elements": 0}
    assert answer(recurrent("LSTM", "work", **one)) == 8 << 20
    assert answer(recurrent("LSTM", "work", **one | {"layers": 3, "directions": 2})) == 6 * (8 << 20)
    assert answer(recurrent("LSTM", "work", **one | {"matrices": 1000})) == (8 << 20) + 4000
    per_element = 5 * 320 * 4
    assert answer(recurrent("LSTM", "work", **one | {"elements": 7})) == (8 << 20) + 7 * per_element


def test_recurrent_sizes_scale_with_dtype_elements_and_directions(answer):
    whole = answer(recurrent("LSTM", "reserve"))
    assert answer(recurrent("LSTM", "reserve", bytes=2)) == whole / 2
    assert answer(recurrent("LSTM", "reserve", elements=12_500)) == whole / 2
    assert answer(recurrent("LSTM", "reserve", directions=2)) == 2 * whole
    assert answer(recurrent("RNN", "reserve")) < whole


def test_the_states_of_dropout_are_in_proportion_to_the_threads_of_the_card(answer):
    h100 = {"kind": "dropout", "multiprocessors": 132, "threads": 2048}
    assert answer(h100) == 6_488_064
    assert answer(h100 | {"threads": 1024}) == 3_244_032


OTHERS = [
    {"kind": "batch norm", "space": "reserve", "mode": 1, "operations": 0, "x": tensor(8, 64, 56, 56)},
    {"kind": "ctc", "probabilities": tensor(50, 16, 20), "longest": 255, "algorithm": 0},
    {"kind": "graph", "operations": 7},
    {"kind": "unknown"},
]


def test_operations_without_a_rule_count_0_bytes_and_share_one_note():
    workspaces = WorkspaceSizes.read()
    for question in OTHERS:
        assert workspaces.answer(json.dumps(question).encode()) == (EngineConfig(0),)
    ((provenance, note),) = workspaces.notes()
    assert provenance is Provenance.ASSUMED
    assert "counted as 0 bytes" in note
    assert "tens of MiB" in note
    for subject in ("batch normalization", "CTC", "attention"):
        assert subject in note


def test_each_applied_rule_is_noted_once_with_its_largest_size():
    workspaces = WorkspaceSizes.read()
    assert list(workspaces.notes()) == []
    networks = (recurrent("GRU", "reserve"), recurrent("GRU", "reserve", elements=1))
    for question in (*networks, convolution(), convolution()):
        workspaces.answer(json.dumps(question).encode())
    gru, convolutions = (text for _, text in workspaces.notes())
    assert "GRU" in gru
    assert "864,000,000" in gru
    assert "2895" in gru
    assert "58,720,256" in convolutions


# ---- Querying cuDNN first ---------------------------------------------------------------------------

CONFIGS = (EngineConfig(5 << 20, 38, 1), EngineConfig(0))


class FakeCudnn:
    """A CudnnClient that answers every question alike, or refuses every one."""

    def __init__(self, configs=CONFIGS, refusal=""):
        self.configs, self.refusal, self.questions, self.missed = configs, refusal, [], set()

    def answer(self, question):
        self.questions.append(question)
        if self.refusal:
            raise NoCudnnAnswerError(self.refusal)
        return HeuristicsResult(92_400, self.configs)


def engine_query(tree):
    return b'{"kind":"plan","descriptor":' + tree + b"}"


def querying(cudnn, source=WorkspaceSource.CUDNN):
    return WorkspaceSizes.read(source, lambda: cudnn)


def notes_of(workspaces):
    return [(provenance, text) for provenance, text in workspaces.notes()]


def test_cudnn_is_queried_once_per_convolution_and_its_configurations_are_returned():
    cudnn = FakeCudnn()
    workspaces = querying(cudnn)
    assert notes_of(workspaces) == []
    for _ in range(2):
        assert workspaces.answer(engine_query(convolution_tree("forward"))) == CONFIGS
    (question,) = cudnn.questions
    assert json.loads(question) == json.loads(convolution_tree("forward"))
    ((provenance, note),) = notes_of(workspaces)
    assert provenance is Provenance.SIMULATED
    assert "cuDNN 9.24.0" in note


def test_cudnn_is_queried_for_graph_convolutions_only():
    cudnn = FakeCudnn()
    workspaces = querying(cudnn)
    older_api = json.dumps(convolution()).encode()
    for question in (
        engine_query(attention()),
        older_api,
        *(json.dumps(other).encode() for other in OTHERS),
    ):
        workspaces.answer(question)
    assert not cudnn.questions
    assert {provenance for provenance, _ in notes_of(workspaces)} == {Provenance.ASSUMED}


@pytest.mark.parametrize("source", [WorkspaceSource.RULES, WorkspaceSource.NONE])
def test_cudnn_is_not_queried_if_another_source_was_chosen(source):
    cudnn = FakeCudnn()
    workspaces = querying(cudnn, source)
    rule = {WorkspaceSource.RULES: 58_720_256, WorkspaceSource.NONE: 0}[source]
    for question in (
        engine_query(convolution_tree("weight gradient")),
        json.dumps(convolution()).encode(),
    ):
        assert workspaces.answer(question)[0].workspace == rule
    assert not cudnn.questions
    ((provenance, note),) = notes_of(workspaces)
    assert provenance is Provenance.ASSUMED
    assert ("as requested" in note) == (source is WorkspaceSource.NONE)
    assert ("hundreds of MiB" in note) == (source is WorkspaceSource.NONE)


def test_without_an_answer_from_cudnn_the_rules_apply_and_the_reason_is_noted_once():
    workspaces = querying(FakeCudnn(refusal="status 3000"))
    for images in (1, 2):
        workspaces.answer(engine_query(convolution_tree("weight gradient", images=images)))
    first, *_ = workspaces.answer(engine_query(convolution_tree("weight gradient")))
    assert first == EngineConfig(58_720_256)
    notes = notes_of(workspaces)
    assert {provenance for provenance, _ in notes} == {Provenance.ASSUMED}
    (note,) = [text for _, text in notes if "status 3000" in text]
    assert "no workspace size for 2 distinct convolutions (reason: status 3000)" in note
    assert any("58,720,256" in text for _, text in notes)


def test_an_empty_list_of_engines_is_returned_except_for_the_last_list():
    workspaces = querying(FakeCudnn(configs=()))
    assert workspaces.answer(engine_query(convolution_tree("forward"))) == ()
    last = engine_query(convolution_tree("forward", mode=FALLBACK))
    assert workspaces.answer(last) == (EngineConfig(0),), "an assumption must not make the script fail"
    assert any("no engine" in text for _, text in notes_of(workspaces))


def test_functions_that_cudnn_did_not_find_are_noted():
    cudnn = FakeCudnn()
    cudnn.missed.add("cuNewFunction")
    workspaces = querying(cudnn)
    workspaces.answer(engine_query(convolution_tree("forward")))
    assert any("cuNewFunction" in text for _, text in notes_of(workspaces))


def test_a_convolution_is_read_from_its_descriptors():
    read = cudnn_operation_of_graph(
        msgspec.json.decode(convolution_tree("weight gradient"), type=CudnnDescriptor)
    )
    assert msgspec.to_builtins(read) == {
        **convolution(),
        "x": {**tensor(1, 64, 224, 224), "strides": (3211264, 50176, 224, 1), "sizes": (1, 64, 224, 224)},
        "w": {**tensor(64, 64, 3, 3), "strides": (576, 9, 3, 1), "sizes": (64, 64, 3, 3)},
        "y": {**tensor(1, 64, 224, 224), "strides": (3211264, 50176, 224, 1), "sizes": (1, 64, 224, 224)},
        "padding": (1, 1),
        "stride": (1, 1),
        "dilation": (1, 1),
    }
