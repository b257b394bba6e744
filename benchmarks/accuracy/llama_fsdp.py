"""Train a Llama under FSDP2 with checkpointing, as torchtitan did in March and in December 2024.

    memfit dry-run --nproc 8 benchmarks/accuracy/llama_fsdp.py [--model llama2-7b]

Selective checkpointing saves every second matrix product and attention's output, and recomputes the rest. In
March, the logits were float32 and stayed in memory until the next step had computed its own.
"""

import argparse
import gc
import os
from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

WIDTH, LAYERS, HEADS, HEAD = 4096, 32, 32, 128


@dataclass(frozen=True)
class Shape:
    hidden: int
    key_heads: int
    vocabulary: int
    context: int
    batch: int
    base: float


MODELS = {
    "llama2-7b": Shape(11008, key_heads=32, vocabulary=32000, context=2048, batch=8, base=10000.0),
    "llama3-8b": Shape(14336, key_heads=8, vocabulary=128256, context=8192, batch=2, base=500000.0),
}
aten = torch.ops.aten
SAVED = {
    aten.mm.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_flash_attention.default,
}


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        normal = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return normal.type_as(x) * self.weight


def rotation(shape):
    frequencies = 1.0 / shape.base ** (torch.arange(0, HEAD, 2).float() / HEAD)
    angles = torch.outer(torch.arange(shape.context), frequencies).float()
    return torch.polar(torch.ones_like(angles), angles)


def rotate(q, k, turned):
    q_pairs = torch.view_as_complex(q.float().unflatten(-1, (-1, 2)))
    k_pairs = torch.view_as_complex(k.float().unflatten(-1, (-1, 2)))
    turned = turned[: q.shape[1]].view(1, q.shape[1], 1, -1)
    q_out = torch.view_as_real(q_pairs * turned).flatten(3)
    k_out = torch.view_as_real(k_pairs * turned).flatten(3)
    return q_out.type_as(q), k_out.type_as(k)


def repeated(x):
    times = HEADS // x.shape[2]
    return x if times == 1 else x.unsqueeze(3).expand(-1, -1, -1, times, -1).flatten(2, 3)


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.q, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, shape.key_heads * HEAD, bias=False) for _ in range(2))

    def forward(self, x, turned):
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (part.unflatten(-1, (-1, HEAD)) for part in (q, k, v))
        q, k = rotate(q, k, turned)
        keys, values = repeated(k), repeated(v)
        q, k, v = (part.transpose(1, 2) for part in (q, keys, values))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # PyTorch's choice then; now it is cuDNN
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, shape.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.hidden, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)
        self.attention_norm, self.feed_forward_norm = RMSNorm(), RMSNorm()

    def forward(self, x, turned):
        x = x + self.attention(self.attention_norm(x), turned)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    def __init__(self, shape, wide):
        super().__init__()
        self.wide = wide
        self.embedding = nn.Embedding(shape.vocabulary, WIDTH)
        self.register_buffer("rotation", rotation(shape))
        self.layers = nn.ModuleList(Block(shape) for _ in range(LAYERS))
        self.norm, self.out = RMSNorm(), nn.Linear(WIDTH, shape.vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.rotation)
        logits = self.out(self.norm(x))
        return logits.float() if self.wide else logits


def every_second_product():
    counts = defaultdict(int)

    def policy(context, operation, *_, **__):
        if operation is aten.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operation in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def build(shape, wide, selective):
    with torch.device("meta"):
        model = Llama(shape, wide)
    options = {"context_fn": every_second_product} if selective else {}
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer, preserve_rng_state=False, **options)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        last = layer is model.layers[-1]  # the backward pass begins with it
        fully_shard(layer, mp_policy=precision, reshard_after_forward=not last)
    fully_shard(model, mp_policy=precision)
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.rotation = rotation(shape).cuda()
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="llama3-8b")
    parser.add_argument("--checkpointing", choices=("selective", "full"), default="selective")
    parser.add_argument("--keep-logits", action="store_true", help="float32 logits, until the next ones")
    args = parser.parse_args()
    shape = MODELS[args.model]
    gc.disable()  # torchtitan collects every 50 steps
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = build(shape, args.keep_logits, args.checkpointing == "selective")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.context)).to("cuda")
        labels = torch.randint(shape.vocabulary, (shape.batch, shape.context)).to("cuda")
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        if not args.keep_logits:
            del logits
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
    print(f"peak_allocated {torch.cuda.max_memory_allocated() / 2**20:.3f} MiB")
    print(f"peak_reserved {torch.cuda.max_memory_reserved() / 2**20:.3f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
