"""Train a compiled transformer layer."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--mode", default="default", choices=["default", "reduce-overhead"])
parser.add_argument("--steps", type=int, default=3)
arguments = parser.parse_args()

model = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True).to("cuda")
compiled = torch.compile(model, mode=arguments.mode)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(arguments.steps):
    x = torch.randn(16, 256, 512, device="cuda")
    optimizer.zero_grad()
    compiled(x).square().mean().backward()
    optimizer.step()

print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
