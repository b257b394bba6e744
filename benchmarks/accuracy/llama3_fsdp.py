"""Train Llama 3.1 8B under FSDP2 with selective checkpointing, as torchtitan did at the end of 2024.

    memfit dry-run --nproc 8 benchmarks/accuracy/llama3_fsdp.py

Every second matrix product, attention's output and reduced sums are saved, the rest is recomputed.
"""

import argparse
import gc
import os
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

WIDTH, HIDDEN, LAYERS, HEADS, KEY_HEADS, VOCABULARY, CONTEXT = 4096, 14336, 32, 32, 8, 128256, 8192
HEAD = WIDTH // HEADS
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


def rotation():
    frequencies = 1.0 / 500000 ** (torch.arange(0, HEAD, 2).float() / HEAD)
    angles = torch.outer(torch.arange(CONTEXT), frequencies).float()
    return torch.polar(torch.ones_like(angles), angles)


def rotate(q, k, turned):
    q_pairs = torch.view_as_complex(q.float().unflatten(-1, (-1, 2)))
    k_pairs = torch.view_as_complex(k.float().unflatten(-1, (-1, 2)))
    turned = turned[: q.shape[1]].view(1, q.shape[1], 1, -1)
    q_out = torch.view_as_real(q_pairs * turned).flatten(3)
    k_out = torch.view_as_real(k_pairs * turned).flatten(3)
    return q_out.type_as(q), k_out.type_as(k)


def repeated(x):
    return x.unsqueeze(3).expand(-1, -1, -1, HEADS // KEY_HEADS, -1).flatten(2, 3)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False) for _ in range(2))

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
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.feed_forward_norm = RMSNorm(), RMSNorm()

    def forward(self, x, turned):
        x = x + self.attention(self.attention_norm(x), turned)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("rotation", rotation())
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.out = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.rotation)
        return self.out(self.norm(x))


def every_second_product():
    counts = defaultdict(int)

    def policy(context, operation, *_, **__):
        if operation is aten.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operation in SAVED else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def build():
    with torch.device("meta"):
        model = Llama()
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(
            layer, context_fn=every_second_product, preserve_rng_state=False
        )
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        last = layer is model.layers[-1]  # the backward pass begins with it
        fully_shard(layer, mp_policy=precision, reshard_after_forward=not last)
    fully_shard(model, mp_policy=precision)
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.rotation = rotation().cuda()
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=2, help="sequences of each rank")
    args = parser.parse_args()
    gc.disable()  # torchtitan collects every 50 steps
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        tokens = torch.randint(VOCABULARY, (args.batch, CONTEXT)).to("cuda")
        labels = torch.randint(VOCABULARY, (args.batch, CONTEXT)).to("cuda")
        optimizer.zero_grad()
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        del logits
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
    print(f"peak_allocated {torch.cuda.max_memory_allocated() / 2**20:.3f} MiB")
    print(f"peak_reserved {torch.cuda.max_memory_reserved() / 2**20:.3f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
