"""Batch slices with other strategies, and compiled: what training with the same strategies alone does."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import memfit
from memfit import BatchSlices, Checkpointing, Offload, OptimizerState, Precision
from memfit.errors import UsageError
from memfit.strategies.checkpointing import Region

WIDTH, CLASSES = 16, 11


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Network(nn.Module):
    def __init__(self, returns):
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(3)))
        self.head, self.returns = nn.Linear(WIDTH, CLASSES), returns

    def forward(self, x, y=None):
        x = self.layers(x)
        if self.returns == "loss of ChunkedHead":
            return memfit.ChunkedHead(self.head, chunks=3)(x, y)
        logits = self.head(x)
        return logits if self.returns == "outputs" else F.cross_entropy(logits.flatten(0, 1), y.flatten())


def trained(returns, plan, change=lambda model: model):
    """Return the losses of two steps, and the parameters."""
    torch.manual_seed(0)
    model = Network(returns)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = change(model)
    in_backward = [each for each in plan if isinstance(each, OptimizerState)]
    memfit.apply(model, plan, **({"optimizer": optimizer} if in_backward else {}))
    losses = []
    for _ in range(2):
        x, y = torch.randn(7, 5, WIDTH), torch.randint(CLASSES, (7, 5))
        y[torch.rand(7, 5) < 0.3] = -100
        out = model(x) if returns == "outputs" else model(x, y)
        loss = F.cross_entropy(out.float().flatten(0, 1), y.flatten()) if returns == "outputs" else out
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, torch.cat([each.detach().flatten() for each in model.parameters()])


def expect_near(ours, plain, limit):
    (losses, parameters), (others, wanted) = ours, plain
    assert losses == pytest.approx(others, rel=limit)
    assert (parameters - wanted).norm() <= limit * wanted.norm()


PLANS = {
    "checkpointed": [Checkpointing("layers.*")],
    "every other, results kept": [Checkpointing("layers.*", every=2, save_ops=("aten.addmm",))],
    "tensor by tensor": [Checkpointing(regions=(Region("", recompute="tensors"),))],
    "reentrant": [Checkpointing("layers.*", use_reentrant=True)],
    "inputs offloaded": [Checkpointing("layers.*"), Offload(what="inputs", min_bytes=0)],
    "activations offloaded": [Offload(what="activations", min_bytes=0)],
    "bf16": [Precision("bf16")],
    "stepped in backward": [OptimizerState(step_in_backward=True)],
}


@pytest.mark.parametrize("returns", ["outputs", "loss", "loss of ChunkedHead"])
@pytest.mark.parametrize("name", PLANS)
def test_slices_change_nothing_in_other_strategies(name, returns):
    plan, limit = PLANS[name], 1e-6 if name != "bf16" else 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a CPU, a strategy may not pay off
        expect_near(trained(returns, [*plan, BatchSlices(3)]), trained(returns, plan), limit)


def compiled(model):
    return torch.compile(model, backend="eager")


def part_compiled(model):
    model.layers[1].compile(backend="aot_eager")
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, also without slices
@pytest.mark.parametrize("returns", ["outputs", "loss"])
@pytest.mark.parametrize("change", [compiled, part_compiled])
def test_a_compiled_model_in_slices(change, returns):
    torch._dynamo.reset()
    expect_near(trained(returns, [BatchSlices(3)], change), trained(returns, [], change), 1e-6)


def test_regions_recomputed_in_parts_are_refused():
    with pytest.raises(UsageError, match="split_at cannot be combined"):
        memfit.apply(Network("outputs"), [Checkpointing("layers.*", split_at="mlp"), BatchSlices(2)])
