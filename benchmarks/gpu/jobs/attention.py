"""Train scaled dot product attention with one of PyTorch's backends."""

import argparse

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
parser = argparse.ArgumentParser()
parser.add_argument("backend", choices=BACKENDS)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--steps", type=int, default=3)
arguments = parser.parse_args()


class Attention(nn.Module):
    """Causal attention with sixteen heads of width 64."""

    def __init__(self, width=1024, heads=16):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


model = nn.Sequential(Attention(), Attention()).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())
with sdpa_kernel(BACKENDS[arguments.backend]):
    for _ in range(arguments.steps):
        x = torch.randn(arguments.batch_size, arguments.length, 1024, device="cuda", dtype=torch.bfloat16)
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()

print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
