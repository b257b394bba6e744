"""Train a 2.7 B-class decoder (d_model 2560, 32 layers, 32 heads, SwiGLU of 10240, vocabulary 10000).

The decoder is that of decoder.py; AdamW, too, uses plain tensor operations.
"""

import argparse
import math

import torch
from decoder import Decoder, Size, cross_entropy


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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--forward-only", action="store_true")
    args = parser.parse_args()

    size = Size(width=2560, hidden=10_240, layers=32, heads=32, context=args.context)
    model = Decoder(size).to("cuda")
    optimizer = AdamW(model.parameters())
    tokens = torch.randint(size.vocabulary, (4, args.context), device="cuda")
    targets = torch.randint(size.vocabulary, (4, args.context), device="cuda")
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
