"""What the scripts of this folder share: the process group, a small transformer and its training loop."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
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


def calls(block, x, checkpointed):
    """Call a block, which is recomputed in its backward if ``checkpointed``."""
    return checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)


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
            x = calls(block, x, self.checkpointed)
        return self.head(self.norm(x))


def on_meta():
    """Return a model without memory."""
    with torch.device("meta"):
        return Model()


def mesh_of_pairs(*names):
    """Return a mesh of pairs of neighbours, the second dimension."""
    return init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=names)


def batch(device, size=4):
    """Return random text."""
    return torch.randint(VOCABULARY, (size, LENGTH + 1), device=device)


def loss_of(model, text):
    """Return the mean cross entropy of the next token."""
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def updates(optimizer, steps=3):
    """Yield a few times, each time for a backward pass, after which the parameters are updated."""
    for _ in range(steps):
        yield
        optimizer.step()
        optimizer.zero_grad()


def train(model, device, optimizer=None, steps=3):
    """Train a model for a few steps."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in updates(optimizer, steps):
        loss = loss_of(model, batch(device))
        loss.backward()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.4f}")
    return optimizer


def check_shards(optimizer, whole, ranks, pieces):
    """Check that the state of ``AdamW`` is a rank's share of the parameters, but for padding.

    ``whole`` is the number of their elements; up to ``pieces`` tensors are padded to a multiple of ``ranks``.
    """
    states = [state["exp_avg"] for state in optimizer.state.values() if "exp_avg" in state]
    held = sum(getattr(state, "_local_tensor", state).numel() for state in states)
    assert 0 <= held * ranks - whole < pieces * ranks, (held, whole, ranks)


def train_accumulated(model, device):
    """Train a model that sums its gradients over ranks with every second batch."""
    for _ in updates(torch.optim.AdamW(model.parameters())):
        with model.no_sync():
            loss_of(model, batch(device)).backward()
        loss_of(model, batch(device)).backward()
