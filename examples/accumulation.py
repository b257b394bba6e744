"""Accumulate gradients over several micro-batches before each clipped optimizer step."""

import argparse

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, vocabulary=30000, width=512, layers=6, classes=20):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(dim=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda")
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    criterion = nn.CrossEntropyLoss()

    for step in range(args.steps):
        running = 0.0
        for _ in range(args.gradient_accumulation_steps):
            tokens = torch.randint(30000, (args.micro_batch_size, args.sequence_length)).to(device)
            labels = torch.randint(20, (args.micro_batch_size,)).to(device)
            loss = criterion(model(tokens), labels) / args.gradient_accumulation_steps
            loss.backward()
            running += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {running:.4f}  gradient norm {norm.item():.3f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
