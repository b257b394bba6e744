"""``memfit.ChunkedHead`` in models: names, copies, checkpointing, offload, torch.compile, the engine."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import memfit
from memfit import ChunkedHead
from support.plain_head import (
    BATCH,
    CLASSES,
    FEATURES,
    LENGTH,
    POSITIONS,
    case,
    error,
    gradients_of,
    ignored,
    plain,
)


class Trunk(nn.Module):
    def __init__(self, chunks=0):
        super().__init__()
        self.up = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.chunks = chunks
        self.loss = ChunkedHead(self.head, chunks) if chunks else None

    def trunk(self, x):
        return torch.tanh(self.up(x))

    def forward(self, x, targets):
        hidden = self.trunk(x)
        return self.loss(hidden, targets) if self.chunks else plain(self.head, hidden, targets)


def pair():
    torch.manual_seed(0)
    expected, found = Trunk().double(), Trunk(4).double()
    found.load_state_dict(expected.state_dict())
    x, targets = torch.randn(BATCH, LENGTH, FEATURES, dtype=torch.float64), case()[2]
    return gradients_of(expected(x, targets), expected), found, x, targets


def test_names_and_copies_are_those_of_a_model_without_it():
    expected, model, x, targets = pair()
    assert list(model.state_dict()) == ["up.weight", "up.bias", "head.weight", "head.bias"]
    copied = copy.deepcopy(model)
    assert copied.loss.head is copied.head
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for each in (model, copied, loaded):
        assert error(gradients_of(each(x, targets), each), expected) <= 1e-12
    del model, loaded
    assert copied.float().loss.head.weight.dtype is torch.float32


def test_parameters_that_are_computed():
    """As ``functional_call`` has them: their gradients go on to what they were computed from."""
    expected, model, x, targets = pair()
    halves = {name: (each.detach() / 2).requires_grad_() for name, each in model.named_parameters()}
    doubled = {name: each * 2 for name, each in halves.items()}
    loss = torch.func.functional_call(model, doubled, (x, targets))
    loss.backward()
    assert error([loss.detach(), *(each.grad / 2 for each in halves.values())], expected) <= 1e-12


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_checkpointing_around_the_trunk_and_around_the_loss(whole, reentrant):
    expected, model, x, targets = pair()
    x.requires_grad_(reentrant)
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    if whole:
        loss = checkpoint(model, x, targets, use_reentrant=reentrant)
    else:
        loss = model.loss(checkpoint(model.trunk, x, use_reentrant=reentrant), targets)
    assert len(calls) == whole, "not recomputed in its own forward"
    assert error(gradients_of(loss, model), expected) <= 1e-12


def test_checkpointing_by_memfit_around_the_model():
    expected, model, x, targets = pair()
    outer = memfit.apply(nn.ModuleDict({"inner": model}), memfit.Checkpointing("inner"))
    assert error(gradients_of(outer["inner"](x, targets), model), expected) <= 1e-12


def test_what_a_slice_saves_is_not_offloaded():
    expected, model, x, targets = pair()
    model.loss = ChunkedHead(model.head, 2)
    sizes = []

    def pack(tensor):
        sizes.append(tensor.numel())
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        loss = model(x, targets)
    assert error(gradients_of(loss, model), expected) <= 1e-12
    assert POSITIONS * FEATURES in sizes
    assert max(sizes) == CLASSES * FEATURES < POSITIONS // 2 * CLASSES


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch.compile looks
@pytest.mark.parametrize("whole", [False, True])
def test_torch_compile(whole):
    expected, model, x, targets = pair()
    graphs = []

    def backend(graph, inputs):
        graphs.append({node.target for node in graph.graph.nodes if node.op == "call_function"})
        return graph

    torch._dynamo.reset()
    if whole:
        loss = torch.compile(model, backend=backend)(x, targets)
    else:
        trunk = torch.compile(model.trunk, backend=backend, fullgraph=True)
        head = torch.compile(model.head, backend=backend, fullgraph=True)
        loss = ChunkedHead(head, 3)(trunk(x), targets)
    assert error(gradients_of(loss, model), expected) <= 1e-12
    linear = nn.functional.linear
    assert graphs == [{linear, torch.tanh}] if whole else [{linear, torch.tanh}, {linear}]


def test_the_engine_trains_with_it_in_its_loss():
    torch.manual_seed(0)
    model = Trunk(chunks=0)
    batch = torch.randn(8, LENGTH, FEATURES), ignored(torch.randint(CLASSES, (8, LENGTH)))

    def chunked(model, batch):
        loss = ChunkedHead(model.head, 4)(model.trunk(batch[0]), batch[1], reduction="sum")
        return loss, (batch[1] != -100).sum()

    def whole(model, batch):
        logits = model.head(model.trunk(batch[0])).flatten(0, 1)
        return cross_entropy(logits, batch[1].flatten(), reduction="sum"), (batch[1] != -100).sum()

    for plan in (
        memfit.Accumulation(parts_per_batch=4),
        memfit.Precision("bf16"),
        memfit.Precision("fp16"),
    ):
        trained = []
        for loss in (whole, chunked):
            own = copy.deepcopy(model)
            optimizer = torch.optim.SGD(own.parameters(), 0.1)
            engine = memfit.Engine(own, plan, optimizer=optimizer, loss=loss)
            engine.fit([batch] * 3, epochs=1)
            trained.append([each.detach() for each in own.parameters()])
        assert error(*trained) <= (1e-2 if isinstance(plan, memfit.Precision) else 1e-6)
