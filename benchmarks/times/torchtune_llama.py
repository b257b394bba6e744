"""Fine-tune a model of Llama 3.2 3B's size in full, in bfloat16, as torchtune's recipe for one GPU does.

Samples of 256 random tokens stand for what FlexAttention computes of packed ones.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

WIDTH, HEADS, KEY_HEADS, SIZE, INNER, VOCABULARY, LAYERS = 3072, 24, 8, 128, 8192, 128256, 28
PACK = 4096
"""Tokens of packed samples, for which the mask of blocks is made."""

compiled_attention = torch.compile(flex_attention, dynamic=False)


@torch.compiler.disable(recursive=False)
def attention(query, key, value, mask):
    return compiled_attention(query, key, value, block_mask=mask)


def rotate(x, table):
    """Turn neighbouring elements by their position's angle, in float32."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    angles = table.view(-1, pairs.shape[1], 1, pairs.shape[3], 2)
    even, odd, cos, sin = pairs[..., 0], pairs[..., 1], angles[..., 0], angles[..., 1]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(3).type_as(x)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.scale


class Layer(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.ln_1, self.ln_2 = Norm(), Norm()
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, KEY_HEADS * SIZE, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.register_buffer("table", table)

    def attend(self, x, mask, at):
        batch, length, _ = x.shape
        query = rotate(self.query(x).view(batch, length, HEADS, SIZE), self.table[at]).transpose(1, 2)
        key = rotate(self.key(x).view(batch, length, KEY_HEADS, SIZE), self.table[at]).transpose(1, 2)
        value = self.value(x).view(batch, length, KEY_HEADS, SIZE).transpose(1, 2)
        shape = (batch, KEY_HEADS, HEADS // KEY_HEADS, -1, SIZE)
        key, value = (each.unsqueeze(2).expand(shape).flatten(1, 2) for each in (key, value))
        found = attention(query, key, value, mask)
        return self.out(found.transpose(1, 2).contiguous().view(batch, length, -1))

    def forward(self, x, mask, at):
        x = self.attend(self.ln_1(x), mask, at) + x
        h = self.ln_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        shares = 500000.0 ** -(torch.arange(0, SIZE, 2, dtype=torch.float32) / SIZE)
        angles = torch.outer(torch.arange(131072, dtype=torch.float32), shares)
        table = torch.stack([angles.cos(), angles.sin()], -1)
        self.layers = nn.ModuleList(Layer(table) for _ in range(LAYERS))
        self.ln = Norm()
        self.chunks = 0

    def forward(self, tokens, mask, at):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, mask, at)
        x = self.ln(x)
        if self.chunks:
            return [F.linear(chunk, self.tokens.weight) for chunk in x.chunk(self.chunks, dim=1)]
        return F.linear(x, self.tokens.weight).float()


def summed_loss(logits, labels):
    return F.cross_entropy(logits.float(), labels, reduction="sum")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--compile", action="store_true", help="every layer, and the loss of a chunk")
    parser.add_argument("--chunked-loss", action="store_true", help="of 8 chunks")
    parser.add_argument("--checkpointing", action="store_true", help="of every layer")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Llama()
    torch.set_default_dtype(torch.float32)
    loss_of_chunk = torch.compile(summed_loss) if args.compile else summed_loss
    for at, layer in enumerate(model.layers):
        if args.compile:
            layer.compile()
        if args.checkpointing:
            model.layers[at] = checkpoint_wrapper(layer)
    model.chunks = 8 * args.chunked_loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    ignored = torch.full((args.batch_size, 1), -100, device="cuda")
    samples = (args.batch_size, args.sequence)
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, args.sequence, args.sequence, "cuda")
    of_sample = torch.arange(PACK) // args.sequence

    for _ in range(args.steps):
        packs = of_sample.expand(args.batch_size * args.sequence // PACK, PACK).to("cuda")
        create_block_mask(
            lambda b, h, q, k, packs=packs: (q >= k) & (packs[b, q] == packs[b, k]),
            len(packs),
            None,
            PACK,
            PACK,
            "cuda",
        )
        tokens, labels = (torch.randint(128000, samples).to("cuda") for _ in range(2))
        at = torch.arange(args.sequence).expand(samples).contiguous().to("cuda")
        count = (labels != -100).sum()
        logits = model(tokens, causal, at)
        labels = torch.hstack((labels[..., 1:], ignored))
        if args.chunked_loss:
            parts = zip(logits, labels.chunk(8, dim=1), strict=True)
            losses = [loss_of_chunk(part.flatten(0, 1), few.reshape(-1)) for part, few in parts]
            loss = sum(losses) / (labels != -100).sum()
        else:
            loss = F.cross_entropy(logits.view(-1, VOCABULARY), labels.reshape(-1))
        del logits
        loss = loss * count
        loss.backward()
        for weight in model.parameters():
            weight.grad *= 1 / count
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"loss {loss.item() / count:.4f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
