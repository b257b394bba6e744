"""Train a GPT of basic operations: of the book "Build a Large Language Model", of a lecture, or with einsum.

The book's takes queries, keys and values from three products, has layer normalisation and GELU of its own, and a
head that is not tied; ``--layers`` and ``--sdpa`` replace them by PyTorch's. The lecture's (Stanford's CS336) has
products, normalisation, rotary positions, softmax, loss and AdamW of its own. The third has the sequence first.
"""

import argparse
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

LECTURE = {"small": (768, 12, 12), "medium": (1024, 24, 16), "large": (1280, 36, 20), "xl": (1600, 48, 25)}


class OwnLayerNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return self.scale * (x - mean) / torch.sqrt(variance + 1e-5) + self.shift


class OwnGELU(nn.Module):
    def forward(self, x):
        inner = torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))


class BookBlock(nn.Module):
    def __init__(self, args, width=768, heads=12):
        super().__init__()
        norm = nn.LayerNorm if args.layers else OwnLayerNorm
        self.heads, self.sdpa = heads, args.sdpa
        self.norms = nn.ModuleList([norm(width), norm(width)])
        wide = [3 * width] if args.sdpa else [width] * 3
        self.qkv = nn.ModuleList(nn.Linear(width, each, bias=False) for each in wide)
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)
        gelu = nn.GELU(approximate="tanh") if args.layers else OwnGELU()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))
        self.register_buffer("mask", torch.ones(1024, 1024).triu(diagonal=1))

    def attention(self, x):
        batch, length, width = x.shape
        if self.sdpa:
            q, k, v = self.qkv[0](x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            return self.out(found.transpose(1, 2).contiguous().view(batch, length, width))
        q, k, v = (each(x).view(batch, length, self.heads, -1).transpose(1, 2) for each in self.qkv)
        scores = (q @ k.transpose(2, 3)).masked_fill_(self.mask.bool()[:length, :length], -torch.inf)
        weights = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1))
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = self.dropout(self.attention(self.norms[0](x))) + x
        return self.dropout(self.mlp(self.norms[1](x))) + x


class Book(nn.Module):
    def __init__(self, args, width=768):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(args.vocabulary, width), nn.Embedding(1024, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(BookBlock(args) for _ in range(12)))
        self.norm = nn.LayerNorm(width) if args.layers else OwnLayerNorm(width)
        self.head = nn.Linear(width, args.vocabulary, bias=False)

    def forward(self, tokens):
        at = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.dropout(self.tokens(tokens) + self.positions(at)))))


def own_softmax(x):
    grown = torch.exp(x - torch.max(x, dim=-1, keepdim=True)[0])
    return grown / torch.sum(grown, dim=-1, keepdim=True)


def own_cross_entropy(logits, targets):
    logits = logits - torch.max(logits, dim=-1, keepdim=True)[0]
    costs = -(logits - torch.log(torch.sum(torch.exp(logits), dim=-1, keepdim=True)))
    return torch.mean(torch.gather(costs, -1, targets.unsqueeze(-1)))


class OwnLinear(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outside, inside))

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class OwnRMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * wide).to(x.dtype)


class LectureBlock(nn.Module):
    def __init__(self, width, heads, rotations):
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList([OwnRMSNorm(width), OwnRMSNorm(width)])
        self.qkv = nn.ModuleList(OwnLinear(width, width) for _ in range(3))
        self.out, self.down = OwnLinear(width, width), OwnLinear(4 * width, width)
        self.gate, self.up = OwnLinear(width, 4 * width), OwnLinear(width, 4 * width)
        self.register_buffer("rotations", rotations)

    def rotated(self, x, at):
        cos, sin = self.rotations[:, at]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((cos * even - sin * odd, sin * even + cos * odd), dim=-1).flatten(-2)

    def attention(self, x):
        batch, length, width = x.shape
        q, k, v = (each(x).view(batch, length, self.heads, -1).transpose(1, 2) for each in self.qkv)
        at = torch.arange(length, device=x.device)
        q, k = self.rotated(q, at.view(1, 1, -1)), self.rotated(k, at.view(1, 1, -1))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
        scores = torch.where(at.view(1, 1, -1, 1) >= at.view(1, 1, 1, -1), scores, -torch.inf)
        found = torch.einsum("bhqk,bhkd->bhqd", own_softmax(scores), v)
        return self.out(found.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        normed = self.norms[1](x)
        gate = self.gate(normed)
        return x + self.down(gate * torch.sigmoid(gate) * self.up(normed))


class Lecture(nn.Module):
    def __init__(self, args):
        super().__init__()
        width, layers, heads = LECTURE[args.size]
        self.tokens, self.head = nn.Parameter(torch.randn(10000, width)), OwnLinear(width, 10000)
        rates = 10000.0 ** -(torch.arange(0, width // heads, 2) / (width // heads))
        angles = torch.outer(torch.arange(args.context), rates)
        rotations = torch.stack((torch.cos(angles), torch.sin(angles)))
        self.blocks = nn.Sequential(*(LectureBlock(width, heads, rotations) for _ in range(layers)))
        self.norm = OwnRMSNorm(width)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.tokens[tokens, :])))


class OwnAdamW(torch.optim.Optimizer):
    def __init__(self, weights):
        super().__init__(weights, {"lr": 1e-3})

    def step(self):
        for weight in self.param_groups[0]["params"]:
            grad, state, rate = weight.grad.data, self.state[weight], self.param_groups[0]["lr"]
            step = state.get("step", 1)
            mean, square = (state.get(name, torch.zeros_like(grad)) for name in ("mean", "square"))
            state["mean"] = mean = 0.9 * mean + ((1 - 0.9) * grad)
            state["square"] = square = 0.999 * square + ((1 - 0.999) * torch.square(grad))
            scale = rate * ((1 - 0.999**step) ** 0.5 / (1 - 0.9**step))
            weight.data -= scale * mean / (torch.sqrt(square) + 1e-8)
            weight.data -= rate * 0.01 * weight.data
            state["step"] = step + 1


class EinsumBlock(nn.Module):
    def __init__(self, args, width=512, heads=8):
        super().__init__()
        self.heads, self.sdpa = heads, args.sdpa
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x):
        length, batch, width = x.shape
        parts = self.qkv(x).view(length, batch, 3, self.heads, -1).permute(1, 2, 3, 0, 4)
        q, k, v = parts.unbind(1)
        if self.sdpa:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = torch.einsum("bhtd,bhsd->bhts", q, k) * q.shape[-1] ** -0.5
            mask = torch.full((length, length), -torch.inf, device=x.device).triu(diagonal=1)
            found = torch.einsum("bhts,bhsd->bhtd", (scores + mask).softmax(-1), v)
        return self.out(found.permute(2, 0, 1, 3).reshape(length, batch, width))

    def forward(self, x):
        x = x + F.dropout(self.attention(self.norm_1(x)), 0.1)
        hidden = F.dropout(F.relu(self.up(self.norm_2(x))), 0.1)
        return x + F.dropout(self.down(hidden), 0.1)


class Einsum(nn.Module):
    def __init__(self, args, width=512, length=256):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(length, 1, width))
        self.tokens, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.blocks = nn.Sequential(*(EinsumBlock(args) for _ in range(8)))

    def forward(self, tokens):
        embedded = self.tokens(tokens.int())
        first = torch.zeros(1, *embedded.shape[1:], device=tokens.device)
        shifted = torch.cat([first, embedded[:-1]]) + self.positions
        return self.head(self.blocks(F.dropout(shifted, 0.1)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=["book", "lecture", "einsum"])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=50257, help="of the book's")
    parser.add_argument("--size", choices=LECTURE, default="small", help="of the lecture's")
    parser.add_argument("--context", type=int, default=512, help="of the lecture's")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--amp", choices=["float16", "bfloat16"], help="autocast; with a scaler for float16")
    parser.add_argument("--bfloat16", action="store_true", help="weights in bfloat16")
    parser.add_argument("--fused", action="store_true", help="AdamW in one kernel")
    parser.add_argument("--layers", action="store_true", help="PyTorch's LayerNorm and GELU")
    parser.add_argument("--sdpa", action="store_true", help="PyTorch's attention")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    kind = {"book": Book, "lecture": Lecture, "einsum": Einsum}[args.model]
    model = kind(args).to("cuda", torch.bfloat16 if args.bfloat16 else torch.float32)
    if args.model == "book":
        optimizer = torch.optim.AdamW(model.parameters(), 5e-4, weight_decay=0.1, fused=args.fused or None)
    elif args.model == "lecture":
        optimizer = OwnAdamW(model.parameters())
    else:
        optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler(enabled=args.amp == "float16")
    step = torch.compile(model) if args.compile else model
    loss_of = own_cross_entropy if args.model == "lecture" else F.cross_entropy

    for _ in range(args.steps):
        if args.model == "book":
            text = torch.randint(50257, (args.batch_size, 1025))
            tokens, targets = text[:, :-1].contiguous().to("cuda"), text[:, 1:].contiguous().to("cuda")
        elif args.model == "lecture":
            tokens, targets = torch.randint(10000, (2, args.batch_size, args.context), device="cuda")
        else:
            text = torch.randint(256, (args.batch_size, 256), dtype=torch.uint8).to("cuda")
            tokens = targets = text.transpose(0, 1).contiguous()
        optimizer.zero_grad()
        with torch.autocast("cuda", getattr(torch, args.amp)) if args.amp else nullcontext():
            loss = loss_of(step(tokens).flatten(0, 1), targets.flatten().long())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if args.model == "einsum":
            print(f"loss {loss.item():.4f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
