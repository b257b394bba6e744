"""Train through an autotuned Triton kernel: a fused bias and GELU with a backward of its own."""

import torch
import triton
import triton.language as tl
from torch import nn

CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((1024, 4), (2048, 8))]


@triton.autotune(CONFIGS, key=["size"])
@triton.jit
def forward_kernel(x, bias, out, size, width, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + at, inside) + tl.load(bias + at % width, inside)
    tl.store(out + at, value * tl.sigmoid(1.702 * value), inside)


@triton.autotune(CONFIGS, key=["size"])
@triton.jit
def backward_kernel(x, bias, grad_out, grad_x, size, width, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + at, inside) + tl.load(bias + at % width, inside)
    gate = tl.sigmoid(1.702 * value)
    slope = gate * (1 + 1.702 * value * (1 - gate))
    tl.store(grad_x + at, slope * tl.load(grad_out + at, inside), inside)


def grid(meta):
    return (triton.cdiv(meta["size"], meta["BLOCK"]),)


class BiasGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        out = torch.empty_like(x)
        forward_kernel[grid](x, bias, out, x.numel(), x.shape[-1])
        return out

    @staticmethod
    def backward(ctx, grad_out):
        x, bias = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        backward_kernel[grid](x, bias, grad_out.contiguous(), grad_x, x.numel(), x.shape[-1])
        return grad_x, grad_x.sum(0)


class Net(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.inner = nn.Linear(width, 4 * width, bias=False)
        self.bias = nn.Parameter(torch.zeros(4 * width))
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.outer(BiasGELU.apply(self.inner(x), self.bias))


def main():
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        loss = model(torch.randn(512, 1024, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}  loss {loss.item():.4f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
