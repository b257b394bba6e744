"""A decoder, its loss and its optimizer in plain tensor operations, as a course on language models teaches them.

Which tensors a function still refers to when it returns matters: names are assigned as in the original.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Size:
    width: int
    hidden: int
    layers: int
    heads: int
    context: int
    vocabulary: int = 10000


class Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs).normal_(std=0.02))

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width).normal_())

    def forward(self, tokens):
        return self.weight[tokens, :]


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class Rotation(nn.Module):
    def __init__(self, width, context):
        super().__init__()
        angles = torch.arange(context)[:, None] * 10000.0 ** -(torch.arange(0, width, 2) / width)
        self.register_buffer("cos_sin", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, x):
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.cos_sin[:, : x.shape[-2]].unbind(0)
        return torch.cat((cos * first - sin * second, sin * first + cos * second), -1)


def softmax(scores):
    shifted = scores - torch.max(scores, dim=-1, keepdim=True)[0]
    exponentials = torch.exp(shifted)
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


def attend(q, k, v, mask):
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(k.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, v)


class Attention(nn.Module):
    def __init__(self, size, rotation):
        super().__init__()
        self.q, self.k, self.v, self.out = (Linear(size.width, size.width) for _ in range(4))
        self.heads, self.rotation = size.heads, rotation

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        q = self.rotation(q)
        k = self.rotation(k)
        at = torch.arange(x.shape[1], device=x.device)
        mask = (at[:, None] >= at)[None]
        heads = attend(q, k, v, mask)
        heads = heads.transpose(1, 2).flatten(-2).contiguous()
        return self.out(heads)


class FeedForward(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.gate, self.up = (Linear(size.width, size.hidden) for _ in range(2))
        self.down = Linear(size.hidden, size.width)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


def silu(x):
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, size, rotation):
        super().__init__()
        self.attention, self.feed_forward = Attention(size, rotation), FeedForward(size)
        self.norm1, self.norm2 = RMSNorm(size.width), RMSNorm(size.width)

    def forward(self, x):
        attended = self.attention(self.norm1(x))
        x = x + attended
        fed = self.feed_forward(self.norm2(x))
        return x + fed


class Decoder(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.embedding = Embedding(size.vocabulary, size.width)
        self.rotation = Rotation(size.width // size.heads, size.context)
        self.layers = nn.ModuleList(Block(size, self.rotation) for _ in range(size.layers))
        self.norm, self.head = RMSNorm(size.width), Linear(size.width, size.vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def cross_entropy(logits, targets):
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


def log_softmax(x):
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


class AdamW(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                grad, state = parameter.grad.data, self.state[parameter]
                parameter.data -= 1e-5 * parameter.data
                before_m = state.get("m", torch.zeros_like(grad))
                before_v = state.get("v", torch.zeros_like(grad))
                m = 0.9 * before_m + (0.1 * grad)
                v = 0.999 * before_v + (0.001 * torch.square(grad))
                parameter.data -= 1e-3 * m / (torch.sqrt(v) + 1e-8)
                state["m"], state["v"] = m, v
