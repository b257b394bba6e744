"""What the scripts of this folder share: the process group, a small transformer and its training loop."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, LENGTH = 512, 128, 32


def start(backend="nccl"):
    """Join the process group; return this rank's device."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group(backend)
    torch.manual_seed(0)
    return device


def variant(variants):
    """Return the function that the command line names."""
    return variants[sys.argv[1]]


def run_variant(variants):
    """Run the function that the command line names, as a rank of a process group."""
    variant(variants)(start())
    dist.destroy_process_group()


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width=WIDTH, heads=8):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            each(y).unflatten(-1, (-1, WIDTH // self.heads)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A language model of a few blocks; with ``checkpointed``, it recomputes each in its backward."""

    def __init__(self, blocks=2, *, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, text):
        x = self.embedding(text)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


def batch(device, size=4):
    """Return random text."""
    return torch.randint(VOCABULARY, (size, LENGTH + 1), device=device)


def loss_of(model, text):
    """Return the mean cross entropy of the next token."""
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def train(model, device, optimizer=None, steps=3):
    """Train a model for a few steps."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        loss = loss_of(model, batch(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")
    return optimizer


def train_accumulated(model, device):
    """Train a model that sums its gradients over ranks with every second batch."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        with model.no_sync():
            loss_of(model, batch(device)).backward()
        loss_of(model, batch(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
