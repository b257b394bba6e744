"""Train adapters of Llama 2 7B over frozen 4-bit or 16-bit weights under FSDP1, as Answer.AI did in March 2024.

    memfit dry-run --nproc 2 benchmarks/accuracy/qlora_fsdp.py [--weights bf16] [--context 2048]

Every decoder layer and, inside it, every matrix of an adapter is a unit of FSDP. bitsandbytes quantizes the
weights to NF4 and stores them as bf16, so that FSDP can shard them; their scales stay whole on every rank.
"""

import argparse
import os

import bitsandbytes as bnb
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDTH, HIDDEN, LAYERS, HEAD, VOCABULARY, POSITIONS = 4096, 11008, 32, 128, 32000, 4096
RANK, ALPHA, DROPOUT = 64, 16, 0.1
STEPS = 2


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        mean = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(mean + 1e-5)
        return self.weight * wide.to(x.dtype)


class Rotation(nn.Module):
    """Cosines and sines of every position, which each layer kept for itself."""

    def __init__(self, dtype):
        super().__init__()
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(POSITIONS, HEAD, dtype=dtype, device="cpu"))

    def forward(self, q, k):
        places = torch.arange(q.shape[2], device=q.device).unsqueeze(0)
        cos, sin = (part[: q.shape[2]].to(q.dtype)[places].unsqueeze(1) for part in (self.cos, self.sin))
        return tuple(x * cos + self.swapped(x) * sin for x in (q, k))

    @staticmethod
    def swapped(x):
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter; `clone` as PEFT does for 4-bit layers."""

    def __init__(self, base, clone):
        super().__init__()
        self.base, self.clone = base, clone
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x):
        y = self.base(x)
        if self.clone:
            y = y.clone()
        return y + self.up(self.down(self.dropout(x))) * (ALPHA / RANK)


class Attention(nn.Module):
    def __init__(self, linear, adapted, dtype):
        super().__init__()
        self.q, self.k, self.v = (adapted(linear(WIDTH, WIDTH)) for _ in range(3))
        self.out, self.rotation = linear(WIDTH, WIDTH), Rotation(dtype)

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = self.rotation(q, k)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # PyTorch's choice then
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().flatten(2))


class FeedForward(nn.Module):
    def __init__(self, linear, adapted):
        super().__init__()
        self.gate, self.up = (adapted(linear(WIDTH, HIDDEN)) for _ in range(2))
        self.down = adapted(linear(HIDDEN, WIDTH))

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, linear, adapted, dtype):
        super().__init__()
        self.attention, self.feed_forward = Attention(linear, adapted, dtype), FeedForward(linear, adapted)
        self.attention_norm, self.feed_forward_norm = RMSNorm(), RMSNorm()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    def __init__(self, linear, adapted, dtype):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(linear, adapted, dtype) for _ in range(LAYERS))
        self.norm, self.out = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens).requires_grad_()  # for reentrant checkpointing
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x)).float()


def linear_4bit(inputs, outputs):
    kinds = {"compute_dtype": torch.bfloat16, "quant_type": "nf4", "quant_storage": torch.bfloat16}
    return bnb.nn.Linear4bit(inputs, outputs, bias=False, **kinds)


def linear_16bit(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def quantize(model):
    """Quantize weight after weight on the GPU; leave their scales there."""
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            shape = (module.out_features, module.in_features)
            values = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            weight = bnb.nn.Params4bit(values, **module.weight.__dict__).cuda()
            module.weight = bnb.nn.Params4bit(weight.data.to("meta"), **weight.__dict__)
    torch.cuda.empty_cache()


def build(four_bits):
    torch.set_default_dtype(torch.bfloat16)
    linear = linear_4bit if four_bits else linear_16bit
    with torch.device("meta"):
        kept = torch.float32 if four_bits else torch.bfloat16
        model = Llama(linear, lambda base: Adapted(base, clone=four_bits), kept)
    torch.set_default_dtype(torch.float32)
    if four_bits:
        quantize(model)
    trained = [
        part for module in model.modules() if isinstance(module, Adapted) for part in (module.down, module.up)
    ]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for part in trained:
        part.weight.requires_grad_()
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=lambda module, recurse, **_: (
            recurse or isinstance(module, Layer) or module in trained
        ),
        use_orig_params=False,
        limit_all_gathers=True,
        device_id=torch.cuda.current_device(),
        sync_module_states=True,
        param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
    )


def shifted_cross_entropy(logits, labels):
    predictions = logits[:, :-1].contiguous().flatten(0, 1)
    return F.cross_entropy(predictions, labels[:, 1:].contiguous().flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", choices=("nf4", "bf16"), default="nf4")
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    model = build(args.weights == "nf4")
    print(f"reserved_after_wrap {torch.cuda.memory_reserved() / 2**20:.3f} MiB")
    dist.barrier()
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=lambda part: checkpoint_wrapper(part, checkpoint_impl=CheckpointImpl.REENTRANT),
        check_fn=lambda module: isinstance(module, Layer),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (1, args.context)).cuda()
        labels = torch.randint(VOCABULARY, (1, args.context)).cuda()
        logits = model(tokens)
        loss = shifted_cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del logits, loss
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
