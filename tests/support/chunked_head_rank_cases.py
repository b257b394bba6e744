"""What each rank of a pool does in a test of ChunkedHead: it trains with its head in chunks, and compares."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from memfit import ChunkedHead
from memfit.errors import UsageError
from support.rank_jobs import whole

BATCH, LENGTH, TOKENS, WIDTH = 6, 5, 23, 7


class Model(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, chunks):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight
        self.chunks = chunks

    def forward(self, text):
        hidden, targets = torch.tanh(self.layer(self.tokens(text)))[:, :-1], text[:, 1:]
        if self.chunks:
            return ChunkedHead(self.head, self.chunks)(hidden, targets)
        return cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def build(chunks):
    torch.manual_seed(0)
    return Model(chunks).double()


def sharded(model):
    fully_shard(model)
    return model


def head_sharded(model):
    model.head = nn.Linear(WIDTH, TOKENS).double()
    fully_shard(model.head)
    return model


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "ddp, unused parameters looked for": lambda model: DistributedDataParallel(
        model, find_unused_parameters=True
    ),
    "ddp, static graph": lambda model: DistributedDataParallel(model, static_graph=True),
    "fsdp2": sharded,
}


def head_in_ddp(model):
    model.head = DistributedDataParallel(nn.Linear(WIDTH, TOKENS).double())
    return model


def loss_outside(model):
    """Call the head before the forward, which gathers its parameters."""
    fully_shard(model)
    return lambda text: ChunkedHead(model.head)(torch.ones(2, WIDTH).double(), text[0, :2])


REFUSED = {"fsdp2 of the head": head_sharded, "ddp of the head": head_in_ddp, "fsdp2, outside": loss_outside}


def compared(rank, ranks):
    """Return each case's largest difference from the gradients of one process, and the refusals."""
    text = torch.randint(TOKENS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    alone = build(0)
    alone(text).backward()
    found = {}
    for name, wrap in WRAPPERS.items():
        model = wrap(build(4))
        for _ in range(2):  # the second time with gradients in DDP's buckets
            model.zero_grad()
            model(text[rank::ranks]).backward()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        found[name] = max(float((whole(own.grad) - one.grad).abs().max()) for own, one in pairs)
    refused = {}
    for name, wrap in REFUSED.items():
        try:
            wrap(build(4))(text)
        except UsageError as error:
            refused[name] = str(error)
    return found, refused
