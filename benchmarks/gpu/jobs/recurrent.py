"""Train a recurrent network on random sequences."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("cell", choices=["LSTM", "GRU", "RNN"])
parser.add_argument("--dtype", default="float32", choices=["float32", "float16"])
parser.add_argument("--bidirectional", action="store_true")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--steps", type=int, default=3)
arguments = parser.parse_args()

dtype = getattr(torch, arguments.dtype)
cell = getattr(nn, arguments.cell)
model = cell(256, 512, num_layers=2, batch_first=True, dropout=0.1, bidirectional=arguments.bidirectional)
model.to("cuda", dtype)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(arguments.steps):
    x = torch.randn(arguments.batch_size, arguments.length, 256, device="cuda", dtype=dtype)
    optimizer.zero_grad()
    hidden, _ = model(x)
    hidden.float().square().mean().backward()
    optimizer.step()

print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
