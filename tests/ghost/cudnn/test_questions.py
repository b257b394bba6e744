"""The questions that the ghost derives from PyTorch's cuDNN calls: each operation in full, in either API.

A process takes seconds to start, so each script shows several things and prints them by name.
"""

import json

import pytest

RECORD_QUESTIONS = """
import json
from torch import nn
import torch.nn.functional as F
import msgspec
from memfit.ghost.cudnn.cache import EngineConfig
from memfit.ghost.cudnn.descriptors import cudnn_operation_of_graph
from memfit.ghost.workspaces import EngineQuery, Question
questions, shown, ANSWER = [], {}, 0
def remember(question):
    decoded = msgspec.json.decode(question, type=Question)
    operation = cudnn_operation_of_graph(decoded.descriptor) if isinstance(decoded, EngineQuery) else decoded
    questions.append(msgspec.json.decode(msgspec.json.encode(operation)))
    return [EngineConfig(ANSWER), EngineConfig(0)]
ghost.answer_with(remember)
d = "cuda"
"""


@pytest.fixture
def shown(on_ghost):
    """Return a function that runs a script and returns what it put into `shown`."""
    return lambda script, **environment: json.loads(
        on_ghost(RECORD_QUESTIONS + script + "\nprint(json.dumps(shown))", **environment).splitlines()[-1]
    )


CONVOLUTIONS = """
def convolutions():
    questions.clear()
    x = torch.zeros(2, 8, 20, 30, device=d, requires_grad=True)
    half = torch.zeros(2, 8, 20, 30, device=d, dtype=torch.half).to(memory_format=torch.channels_last)
    nn.Conv2d(8, 16, 3, stride=2, padding=1, dilation=2, groups=4).to(d)(x).sum().backward()
    layer = nn.Conv2d(8, 16, 1).to(d).half().to(memory_format=torch.channels_last)
    layer(half.requires_grad_()).sum().backward()
    nn.ConvTranspose2d(8, 4, 2, stride=2).to(d)(x).sum().backward()
    nn.Conv1d(8, 4, 5).to(d)(torch.zeros(2, 8, 99, device=d)).sum().backward()
    nn.Conv3d(8, 4, 3).to(d)(torch.zeros(2, 8, 9, 9, 9, device=d)).sum().backward()
    return [q for q in questions if q["kind"] == "convolution"]

def workspace(width):
    global ANSWER
    ANSWER, rises = 3 << 20, []
    x, layer = torch.zeros(2, 8, 20, width, device=d), nn.Conv2d(8, 8, 3).to(d)
    for label in (5, 6):
        ghost.set_label(label)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            y = layer(x)
        rises.append(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
        assert torch.cuda.memory_allocated() - before == y.numel() * 4, "the workspace is released"
        del y
    ANSWER = 0
    return rises

torch.backends.cudnn.benchmark = BENCHMARK
shown["questions"] = convolutions()
shown["rises"] = []
for torch.backends.cudnn.benchmark, width in ((False, 30), (True, 46)):  # PyTorch caches its choice
    shown["rises"] += workspace(width)
shown["spaces"] = sorted({(space.size, space.label) for space in ghost.workspace_uses()})
"""


@pytest.mark.parametrize(
    ("api", "benchmark"), [("graph", False), pytest.param("older", True, marks=pytest.mark.slow)]
)
def test_questions_and_workspaces_of_convolutions(shown, api, benchmark):
    environment = {"TORCH_CUDNN_V8_API_DISABLED": "1"} if api == "older" else {}
    results = shown(CONVOLUTIONS.replace("BENCHMARK", str(benchmark)), **environment)
    assert_questions_are_complete(results["questions"])
    assert len(results["rises"]) == 4
    assert all(rise >= 3 << 20 for rise in results["rises"])
    assert results["spaces"] == [[3 << 20, 5], [3 << 20, 6]]


def assert_questions_are_complete(questions):
    directions = {"forward", "data gradient", "weight gradient"}
    strided = [q for q in questions if q["w"]["sizes"] == [16, 2, 3, 3]]
    assert {q["operation"] for q in strided} == directions
    for q in strided:
        assert (q["padding"], q["stride"], q["dilation"]) == ([1, 1], [2, 2], [2, 2])
        assert q["x"]["sizes"] == [2, 8, 20, 30]
        assert q["y"]["sizes"] == [2, 16, 9, 14]
        assert q["x"]["strides"] == [4800, 600, 30, 1]
        assert q["w"]["strides"] == [18, 9, 3, 1]
        assert {q[t]["data_type"] for t in "xwy"} == {0}
    channels_last = [q for q in questions if q["x"]["data_type"] == 2]
    assert {q["operation"] for q in channels_last} == directions
    for q in channels_last:
        assert q["x"]["strides"] == [4800, 1, 240, 8]
        assert q["y"]["strides"] == [9600, 1, 480, 16]
    transposed = next(q for q in questions if q["w"]["sizes"] == [8, 4, 2, 2])
    assert transposed["operation"] == "data gradient"  # the forward of a transposed convolution
    assert transposed["x"]["sizes"] == [2, 4, 40, 60]
    assert transposed["y"]["sizes"] == [2, 8, 20, 30]
    assert any(q["x"]["sizes"] == [2, 8, 1, 99] for q in questions)
    assert any(q["x"]["sizes"] == [2, 8, 9, 9, 9] and len(q["padding"]) == 3 for q in questions)


OTHERS = """
x, layer = torch.zeros(2, 8, 20, 30, device=d), nn.Conv2d(8, 8, 3).to(d)
torch.cudnn_convolution_relu(x, layer.weight, layer.bias, (1, 1), (0, 0), (1, 1), 1)
shown["fused"] = [(q["operation"], q["fused"] > 0) for q in questions]

ANSWER = 1 << 40
shown["too large"] = [tuple(layer(x).shape), len(ghost.workspace_uses())]

ANSWER = 1 << 20
net, x = nn.GRU(8, 8).to(d), torch.zeros(5, 4, 8, device=d)
before = torch.cuda.memory_allocated()
y, h = net(x)
after = torch.cuda.memory_allocated()
y.sum().backward()
del y, h
shown["reserve space"] = [after - before, torch.cuda.memory_allocated() - before]
shown["of GRU"] = [space.size for space in ghost.workspace_uses()]

questions.clear()
logits = torch.zeros(50, 16, 20, device=d, requires_grad=True)
targets = torch.ones(159, dtype=torch.int32)
F.ctc_loss(logits.log_softmax(2), targets, [50] * 16, [10] * 15 + [9]).backward()
lengths, targets = torch.tensor([50] * 16, dtype=torch.int32, device=d), targets.to(d)
shown["ctc"] = [(q["kind"], q["probabilities"]["sizes"], q["longest"]) for q in questions]
shown["of CTC"] = len(ghost.workspace_uses())

questions.clear()
ghost.set_label(1)  # so that no use counts as a repetition
nn.BatchNorm2d(16).to(d)(torch.zeros(8, 16, 4, 4, device=d, requires_grad=True)).sum().backward()
shown["batch norm"] = sorted(q["space"] for q in questions if q["kind"] == "batch norm")
shown["of batch norm"] = len(ghost.workspace_uses())
"""


def test_questions_and_workspaces_of_other_operations(shown):
    results = shown(OTHERS)
    assert results["fused"] == [["forward", True]]
    assert results["too large"] == [[2, 8, 18, 28], 0]  # PyTorch falls back to an engine without a workspace
    kept, left = results["reserve space"]
    assert kept >= 1 << 20  # until the backward
    assert left < 1 << 20
    assert results["of GRU"] == [1 << 20] * 3  # work and reserve of the forward; work of the backward, once
    assert results["ctc"] == [["ctc", [50, 16, 20], 10]]
    assert results["of CTC"] == 3 + 1
    assert results["batch norm"] == ["backward", "forward", "reserve"]
    assert results["of batch norm"] == 4 + 3


NETWORKS = """
def check(cell, packed, **options):
    net = cell(13, 20, **options).to(d)
    parameters = list(net.parameters())
    (start,) = {p.untyped_storage().data_ptr() for p in parameters}
    (end,) = {p.untyped_storage().data_ptr() + p.untyped_storage().nbytes() for p in parameters}
    spans = sorted((p.data_ptr(), p.data_ptr() + 4 * p.numel()) for p in parameters)
    assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:])), "no overlap"
    assert start <= spans[0][0] and spans[-1][1] <= end
    if options.get("bias", True):
        assert sum(b - a for a, b in spans) == end - start, "nothing else in the buffer"
    x = torch.zeros((4, 5, 13) if options.get("batch_first") else (5, 4, 13), device=d)
    if packed:
        x = nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2, 1], batch_first=bool(options.get("batch_first")))
    questions.clear()
    out = net(x)[0]
    (out.data if packed else out).sum().backward()
    assert all(p.grad.shape == p.shape for p in parameters)
    net.eval()(x)
    return [q for q in questions if q["kind"] == "recurrent"]

common = [{}, {"bidirectional": True}, {"bias": False}, {"num_layers": 3, "dropout": 0.5},
          {"num_layers": 2, "bidirectional": True, "batch_first": True}]
own = {nn.LSTM: [{"proj_size": 7}, {"proj_size": 7, "num_layers": 2, "bidirectional": True, "bias": False}],
       nn.GRU: [], nn.RNN: [{"nonlinearity": "relu"}]}
for cell, others in own.items():
    for options in common + others:
        for packed in (False, True):
            check(cell, packed, **options)
shown["questions"] = check(nn.LSTM, True, num_layers=2, bidirectional=True, proj_size=7)
shown["gaps"] = ghost.gaps_reached()
"""


def test_questions_of_recurrent_networks(shown):
    results = shown(NETWORKS)
    assert results["gaps"] == []
    for q in results["questions"]:
        facts = {"cell": 2, "input": 13, "hidden": 20, "projection": 7, "layers": 2, "directions": 2}
        assert facts.items() <= q.items()
        assert (q["batch"], q["longest"], q["elements"], q["bytes"]) == (4, 5, 11, 4)
        # Two layers of two directions: four gates over input and projection, and the projection.
        assert q["matrices"] == 2 * (4 * 20 * (13 + 7) + 7 * 20) + 2 * (4 * 20 * (14 + 7) + 7 * 20)
    assert {(q["space"], q["training"]) for q in results["questions"]} == {
        ("work", 1),
        ("reserve", 1),
        ("work", 0),
    }
