"""Train adapters beside weights that bitsandbytes has quantised; ``beside`` are the weights' scales."""

import sys

import bitsandbytes as bnb
import torch
from torch import nn


def quantised(bits, size):
    if bits == 8:
        return bnb.nn.Linear8bitLt(size, size, bias=False, has_fp16_weights=False)
    return bnb.nn.Linear4bit(size, size, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")


def scales(weight):
    """Return the tensors of a quantised weight's state."""
    state = getattr(weight, "quant_state", None)
    if state is None:
        return [weight.SCB]
    nested = [] if state.state2 is None else [state.offset, state.state2.absmax, state.state2.code]
    return [state.absmax, state.code, *nested]


class Adapted(nn.Module):
    """A frozen quantised layer with a low-rank adapter."""

    def __init__(self, bits, size):
        super().__init__()
        self.base = quantised(bits, size).requires_grad_(False)
        self.a, self.b = nn.Linear(size, 8, bias=False), nn.Linear(8, size, bias=False)

    def forward(self, x):
        return self.base(x).float() + self.b(self.a(x))


net = nn.Sequential(*(Adapted(int(sys.argv[1]), 1024) for _ in range(3))).cuda()
beside = [tensor for layer in net for tensor in scales(layer.base.weight)]
optimizer = torch.optim.AdamW([one for one in net.parameters() if one.requires_grad])
for _ in range(4):
    net(torch.randn(16, 1024).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
