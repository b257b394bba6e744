"""What each rank of a pool does in a test of a divided batch: it trains as one process does, and compares."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

from memfit.errors import UsageError
from memfit.strategies.mechanisms.forward_of_rank import ForwardOfRank, ShareOfRank
from memfit.strategies.mechanisms.wrap_forward import wrap_forward
from support.rank_jobs import whole

TOKENS, WIDTH, LENGTH = 23, 6, 5
FEW = 9
"""A target that the first sample alone has."""
MODES = ("ddp", "fsdp2")


class Model(nn.Module):
    """A language model, which may return its loss beside the logits."""

    def __init__(self, loss=None):
        super().__init__()
        self.tokens, self.head, self.loss = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS), loss

    def forward(self, text, targets=None):
        logits = self.head(torch.tanh(self.tokens(text)))
        return logits if self.loss is None else (self.loss(logits, targets), logits)


def mean_of_counted(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


def mean_of_few(logits, targets):
    return logits[targets == FEW].square().mean()


def clamped(logits, targets):
    few = targets == FEW
    return (logits.square().mean(-1) * few).sum() / few.sum().clamp(min=1)


def summed(logits, targets):
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def two_means(logits, targets):
    return mean_of_counted(logits, targets) + logits.square().mean()


def of_few(logits, targets):
    return logits.square().sum() * (1 + int((targets == FEW).sum()))


def between_samples(model, text, targets):
    """Return a loss of pairs of samples, and of a parameter that the model's forward does not see."""
    logits = model(text)
    rows = normalize(logits.flatten(1))
    return mean_of_counted(logits, targets) + (rows @ rows.T).mean() + 0.1 * logits.square().sum()


def inside(model, text, targets):
    loss, logits = model(text, targets)
    assert logits.shape == (*text.shape, TOKENS)
    return 2 * loss


JOBS = {
    "outputs": (None, between_samples),
    "mean": (mean_of_counted, inside),
    "mean of none on a rank": (mean_of_few, inside),
    "divided by one at least": (clamped, inside),
    "sum": (summed, inside),
}


def sharded(model, mode):
    refused = []
    wrap_forward(model, ShareOfRank(refused.append), ForwardOfRank)
    if mode == "ddp":
        return DistributedDataParallel(model), refused
    fully_shard(model)
    return model, refused


def compared(rank, ranks):
    """Return how far losses and gradients are off those of one process."""
    found = {}
    for name, (loss, job) in JOBS.items():
        for samples in (8, 7, 1):
            data = torch.Generator().manual_seed(samples)
            text = torch.randint(TOKENS, (samples, LENGTH), generator=data)
            targets = torch.randint(3, (samples, LENGTH), generator=data)
            targets[0, 0] = FEW
            for mode in MODES:
                torch.manual_seed(0)
                plain, model = Model(loss).double(), Model(loss).double()
                model.load_state_dict(plain.state_dict())
                called, _ = sharded(model, mode)
                wanted, own = job(plain, text, targets), job(called, text, targets)
                wanted.backward()
                own.backward()
                pairs = zip(plain.parameters(), model.parameters(), strict=True)
                gaps = [float((whole(mine.grad) - one.grad).abs().max()) for one, mine in pairs]
                found[name, samples, mode] = max(*gaps, float(abs(own - wanted)))
    return found


def chained(rank, ranks):
    """Return how far the gradients of two models, one after the other, and of an input are off."""
    found = {}
    for mode in MODES:
        torch.manual_seed(0)
        x = torch.randn(5, 4, dtype=torch.float64)
        plain = [nn.Linear(4, 4).double(), nn.Linear(4, 2).double()]
        copies = [nn.Linear(4, 4).double(), nn.Linear(4, 2).double()]
        gradients = []
        for one, other in zip(plain, copies, strict=True):
            other.load_state_dict(one.state_dict())
        for models in (plain, [sharded(each, mode)[0] for each in copies]):
            given = x.clone().requires_grad_()
            (models[1](torch.tanh(models[0](given))).square().sum() + given.sum()).backward()
            gradients.append([given.grad, *(whole(p.grad) for each in models for p in each.parameters())])
        found[mode] = max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))
    return found


def random_numbers(rank, ranks):
    """Return whether ranks drop other values, and go on with the same numbers; also without dropout."""
    found = []
    for dropout in (0.5, 0.0):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(dropout))
        called, _ = sharded(model, "ddp")
        before = torch.get_rng_state()
        out = called(torch.ones(4, 4))
        unchanged = torch.equal(before, torch.get_rng_state())
        found.append((out[:2].tolist() == out[2:].tolist(), unchanged, torch.rand(2).tolist()))
    return found


class Normalised(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.linear, self.layer = nn.Linear(4, 4), layer

    def forward(self, x):
        return self.layer(self.linear(x))


class MinusMean(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def refused(rank, ranks):
    """Return why some models and derivatives are refused, each twice: what is reported, and the error."""
    found = {}
    two = Model(two_means).double()
    jobs = {
        "mixes samples": (Normalised(MinusMean()), lambda model: model(torch.randn(4, 4))),
        "no batch": (nn.Linear(4, 4), lambda model: model(torch.tensor(1.0))),
        "two means": (
            two,
            lambda model: model(
                torch.ones(4, LENGTH, dtype=torch.long), torch.tensor([[0] * LENGTH] * 2 + [[1] * LENGTH] * 2)
            ),
        ),
        "a count": (
            Model(of_few),
            lambda model: model(
                torch.ones(4, LENGTH, dtype=torch.long), torch.tensor([[0] * LENGTH] * 3 + [[FEW] * LENGTH])
            ),
        ),
        "second derivative": (
            nn.Linear(4, 4),
            lambda model: torch.autograd.grad(
                model(x := torch.randn(4, 4, requires_grad=True)).sum(), x, create_graph=True
            ),
        ),
    }
    for name, (model, call) in jobs.items():
        called, reported = sharded(model, "fsdp2")
        try:
            call(called)
        except UsageError as error:
            found[name] = str(error), reported
    norms, _ = sharded(Normalised(nn.BatchNorm1d(4)), "ddp")
    norms(torch.randn(4, 4)).sum().backward()
    found["batch norm"] = norms.module.layer.num_batches_tracked.item()
    return found
