"""Train a 2.7 B-class decoder (d_model 2560, 32 layers, 32 heads, SwiGLU of 10240, vocabulary 10000).

Attention, norm, loss and AdamW use plain tensor operations, as a course on language models teaches them.
"""

import argparse
import math

import torch
from torch import nn


class Linear(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        std = (2 / (d_in + d_out)) ** 0.5
        self.weight = nn.Parameter(torch.empty(d_out, d_in).normal_(std=std))

    def forward(self, x):
        return x @ self.weight.T


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        dtype, x = x.dtype, x.float()
        return (self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))).to(dtype)


def softmax(x):
    exponentials = torch.exp(x - x.max(-1, keepdim=True).values)
    return exponentials / exponentials.sum(-1, keepdim=True)


class Attention(nn.Module):
    def __init__(self, width, heads, context):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.output_proj = (Linear(width, width) for _ in range(4))
        half = width // heads // 2
        angles = torch.arange(context)[:, None] * 10000.0 ** -(torch.arange(half) / half)
        self.register_buffer("rotation", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def rotate(self, x):
        cos, sin = self.rotation[:, torch.arange(x.shape[-2], device=x.device)]
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((cos * first - sin * second, sin * first + cos * second), -1).flatten(-2)

    def forward(self, x):
        q, k, v = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rotate(q), self.rotate(k)
        at = torch.arange(x.shape[1], device=x.device)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = softmax(torch.where(at[:, None] >= at, scores, float("-inf")))
        return self.output_proj((weights @ v).transpose(1, 2).flatten(-2))


class DecoderBlock(nn.Module):
    def __init__(self, width, heads, hidden, context):
        super().__init__()
        self.attn = Attention(width, heads, context)
        self.w1, self.w2, self.w3 = Linear(width, hidden), Linear(hidden, width), Linear(width, hidden)
        self.ln1, self.ln2 = RMSNorm(width), RMSNorm(width)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        hidden = self.ln2(x)
        gate = self.w1(hidden)
        return x + self.w2(gate * torch.sigmoid(gate) * self.w3(hidden))


class CourseDecoder(nn.Module):
    def __init__(self, context, vocabulary=10_000, width=2560, layers=32, heads=32, hidden=10_240):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(vocabulary, width))
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, hidden, context) for _ in range(layers))
        self.ln_final, self.lm_head = RMSNorm(width), Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding[tokens]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_final(x))


class AdamW(torch.optim.Optimizer):
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure=None):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                state, gradient = self.state[p], p.grad.data
                t = state.get("t", 1)
                m = state.get("m", torch.zeros_like(gradient))
                v = state.get("v", torch.zeros_like(gradient))
                m = beta1 * m + (1 - beta1) * gradient
                v = beta2 * v + (1 - beta2) * torch.square(gradient)
                rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
                p.data -= rate * m / (torch.sqrt(v) + group["eps"])
                p.data -= lr * group["weight_decay"] * p.data
                state.update(t=t + 1, m=m, v=v)


def cross_entropy(logits, targets):
    shifted = logits - logits.max(-1, keepdim=True).values
    chosen = shifted.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (torch.log(torch.exp(shifted).sum(-1)) - chosen).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--forward-only", action="store_true")
    args = parser.parse_args()

    model = CourseDecoder(args.context).to("cuda")
    optimizer = AdamW(model.parameters())
    tokens = torch.randint(10_000, (4, args.context), device="cuda")
    targets = torch.randint(10_000, (4, args.context), device="cuda")
    for _ in range(args.steps):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=args.bf16):
            loss = cross_entropy(model(tokens), targets)
        if not args.forward_only:
            loss.backward()
            optimizer.step()

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
