"""Train a small transformer with FullyShardedDataParallel (FSDP1), which wraps each layer."""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

VOCABULARY = 1000


def start():
    """Join the process group; return this rank's device."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    return device


def finish(device):
    """Print this rank's peaks and leave the process group."""
    if device.type == "cuda":
        print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
        print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
    dist.destroy_process_group()


def build(vocabulary, width=256, layers=4):
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True),
        layers,
        enable_nested_tensor=False,
    )
    return nn.Sequential(nn.Embedding(vocabulary, width), encoder, nn.Linear(width, vocabulary))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    device = start()
    layers = functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
    )
    model = FullyShardedDataParallel(build(VOCABULARY), auto_wrap_policy=layers, device_id=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    torch.manual_seed(1 + dist.get_rank())  # each rank has batches of its own
    for step in range(args.steps):
        text = torch.randint(VOCABULARY, (4, 65), device=device)
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}")
    finish(device)


if __name__ == "__main__":
    main()
