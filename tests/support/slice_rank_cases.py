"""What each rank of a pool does in a test of batch slices: it trains on its part of a batch, and compares."""

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import memfit
from memfit import BatchSlices
from memfit.errors import UsageError
from support.rank_jobs import whole

BATCH, LENGTH, TOKENS, WIDTH = 12, 5, 23, 7


class Model(nn.Module):
    """A language model; the target of its last position is its first token."""

    def __init__(self, returns_loss):
        super().__init__()
        self.tokens, self.unused = nn.Embedding(TOKENS, WIDTH), nn.Linear(2, 2)
        self.unused.requires_grad_(False)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, TOKENS)
        self.returns_loss = returns_loss

    def forward(self, text):
        logits = self.head(self.layers(self.tokens(text)))
        return loss_of(logits, text) if self.returns_loss else logits


def loss_of(logits, text):
    return cross_entropy(logits.flatten(0, 1), text.roll(-1, 1).flatten())


def build(returns_loss):
    torch.manual_seed(0)
    return Model(returns_loss).double()


def sharded(model):
    fully_shard(model.layers)
    fully_shard(model)
    return model


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "ddp, small buckets": lambda model: DistributedDataParallel(model, bucket_cap_mb=1e-4),
    "ddp, unused parameters looked for": lambda model: DistributedDataParallel(
        model, find_unused_parameters=True
    ),
    "ddp, static graph": lambda model: DistributedDataParallel(model, static_graph=True),
    "fsdp2": sharded,
}


def step(model, text, returns_loss):
    out = model(text)
    (out if returns_loss else loss_of(out, text)).backward()


def compared(rank, ranks):
    """Return how far gradients are off the whole batch's, which buckets were reduced, and refusals."""
    text = torch.randint(TOKENS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    found, reductions, refused = {}, {}, {}
    for returns_loss in (False, True):
        plain = build(returns_loss)
        step(plain, text, returns_loss)
        wanted = {name: each.grad for name, each in plain.named_parameters()}
        for name, wrap in WRAPPERS.items():
            counts = []
            for slices in (None, BatchSlices(3)):
                model = wrap(build(returns_loss))
                calls = []
                if isinstance(model, DistributedDataParallel):

                    def hook(state, bucket, calls=calls):
                        calls.append(bucket.index())
                        return allreduce_hook(None, bucket)

                    model.register_comm_hook(None, hook)
                case = f"{name}{', loss' * returns_loss}"
                try:
                    if slices:
                        memfit.apply(model, slices)
                    for _ in range(2):  # the first divides DDP's buckets
                        model.zero_grad()
                        calls.clear()
                        step(model, text.chunk(ranks)[rank], returns_loss)
                except UsageError as error:
                    refused[case] = str(error)
                    continue
                counts.append(sorted(calls))
                own = {each.removeprefix("module."): value for each, value in model.named_parameters()}
                gaps = [
                    float((whole(own[each].grad) - gradient).abs().max())
                    for each, gradient in wanted.items()
                    if gradient is not None
                ]
                found[case] = max(gaps)
            reductions[case] = counts
    return found, reductions, refused
