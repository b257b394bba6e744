"""Train a transformer that recomputes each block's activations in the backward pass."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Encoder(nn.Module):
    def __init__(self, width=1024, heads=16, layers=24, vocabulary=32000, use_checkpoint=True):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.use_checkpoint = use_checkpoint

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.use_checkpoint else block(x)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-checkpoint", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda"
    model = Encoder(layers=args.layers, use_checkpoint=not args.no_checkpoint).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    for step in range(args.steps):
        tokens = torch.randint(32000, (args.batch_size, args.sequence_length), device=device)
        masked = tokens.masked_fill(torch.rand(tokens.shape, device=device) < 0.15, 0)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(masked).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
