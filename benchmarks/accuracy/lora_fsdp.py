"""Train adapters of Llama 2 under FSDP1 with checkpointing and accumulation, as litgpt did in October 2023.

    memfit dry-run --nproc 2 benchmarks/accuracy/lora_fsdp.py [--model 13b] [--micro-batch 4] [--later 1304]

FSDP keeps one flat gradient per block, frozen weights included, and accumulates it unsharded over micro-batches.
The first micro-batch has the longest sample of the data set; those after it were drawn at random.
"""

import argparse
import os
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel

LONGEST, VOCABULARY, HEAD = 1304, 32000, 128
RANK, ALPHA, DROPOUT, PART = 8, 16, 0.05, 128  # PART: tokens per part of the logits
MICRO_BATCHES, UPDATE = 5, 2  # the third micro-batch ends a step, and two of the next step follow


@dataclass(frozen=True)
class Shape:
    width: int
    layers: int
    hidden: int


MODELS = {"7b": Shape(4096, 32, 11008), "13b": Shape(5120, 40, 13824)}


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        normal = x * torch.rsqrt(mean + 1e-5)
        return self.weight * normal


class AdaptedQKV(nn.Module):
    """Queries, keys and values in one projection, with adapters of the queries and the values."""

    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Parameter(torch.empty(2 * RANK, width))
        self.up = nn.Parameter(torch.empty(2 * width, RANK))
        self.dropout = nn.Dropout(DROPOUT)
        self.adapted = [*range(width), *range(2 * width, 3 * width)]

    def forward(self, x):
        y = self.base(x)
        low = F.linear(self.dropout(x), self.down)
        change = F.conv1d(low.transpose(1, 2), self.up.unsqueeze(-1), groups=2).permute(2, 0, 1)
        zeros = change.new_zeros((*change.shape[:-1], y.shape[-1]))
        columns = torch.tensor(self.adapted, device=x.device)
        padded = zeros.flatten(0, 1).index_copy(1, columns, change.flatten(0, 1)).view(zeros.shape)
        return y + padded.transpose(0, 1) * (ALPHA / RANK)


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).type_as(x)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = AdaptedQKV(width), nn.Linear(width, width, bias=False)

    def forward(self, x, cos, sin):
        qkv = self.qkv(x).unflatten(-1, (-1, 3, HEAD)).permute(0, 2, 3, 1, 4)
        q, k, v = (part.squeeze(2) for part in qkv.split(1, dim=2))
        q, k = (torch.cat((rotate(part, cos, sin), part[..., HEAD:]), dim=-1) for part in (q, k))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # PyTorch's choice then
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x):
        gate, up = self.gate(x), self.up(x)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.attention, self.feed_forward = Attention(shape.width), FeedForward(shape)
        self.attention_norm, self.feed_forward_norm = RMSNorm(shape.width), RMSNorm(shape.width)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.out = RMSNorm(shape.width), nn.Linear(shape.width, VOCABULARY, bias=False)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(LONGEST, HEAD, dtype=torch.float32))

    def forward(self, tokens):
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return [self.out(part) for part in self.norm(x).split(PART, dim=1)]


def build(shape):
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = Llama(shape)
    torch.set_default_dtype(torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(("qkv.down", "qkv.up")))
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
        param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
        device_id=torch.cuda.current_device(),
        limit_all_gathers=True,
        use_orig_params=True,
    )
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, Block)
    )
    return model


def cross_entropy(logits, targets):
    parts = zip(logits, targets.split(PART, dim=1), strict=True)
    losses = [
        F.cross_entropy(part.reshape(-1, VOCABULARY), target.reshape(-1), ignore_index=-1, reduction="none")
        for part, target in parts
    ]
    return torch.cat(losses).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="7b")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument(
        "--later", type=int, default=LONGEST, help="tokens of the micro-batches after the first"
    )
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = build(MODELS[args.model])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.01)
    for index in range(MICRO_BATCHES):
        length = args.later if index else LONGEST
        tokens = torch.randint(VOCABULARY, (args.micro_batch, length)).cuda()
        targets = torch.randint(VOCABULARY, (args.micro_batch, length)).cuda()
        with nullcontext() if index == UPDATE else model.no_sync():
            logits = [part.float() for part in model(tokens)]  # as Fabric does with what a model returns
            logits[-1] = logits[-1][:, :-1]
            loss = cross_entropy(logits, targets[:, 1:])
            (loss / (UPDATE + 1)).backward()
        if index == UPDATE:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
