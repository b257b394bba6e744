"""Train, evaluate, save and resume a classifier; each --mistake needs its memory late, after hours of training."""

import argparse
import copy
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=16384)
parser.add_argument("--eval-samples", type=int, default=8192)
parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
parser.add_argument("--resume", action="store_true")
parser.add_argument("--mistake", choices=["evaluation", "saving", "losses"])
args = parser.parse_args()

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def samples(count: int) -> TensorDataset:
    return TensorDataset(torch.randn(count, 256), torch.randint(10, (count,)))


train_loader = DataLoader(samples(args.samples), 64, shuffle=True)
eval_loader = DataLoader(samples(args.eval_samples), 1024)

blocks = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)]
model = nn.Sequential(nn.Linear(256, 1024), *blocks, nn.Linear(1024, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
criterion = nn.CrossEntropyLoss()
first = 0
if args.resume:
    checkpoint = torch.load(args.checkpoint, map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    first = checkpoint["epoch"] + 1


kept = []


def evaluate() -> float:
    losses = kept if args.mistake == "losses" else []
    model.eval()
    with torch.set_grad_enabled(args.mistake in ("evaluation", "losses")):
        for x, y in eval_loader:
            losses.append(criterion(model(x.to(device)), y.to(device)))
    return torch.stack(losses).mean().item()


def save(epoch: int) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    if args.mistake == "saving":
        state = copy.deepcopy(state)
    torch.save(state, args.checkpoint)


for epoch in range(first, args.epochs):
    model.train()
    for x, y in train_loader:
        loss = criterion(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}  loss {evaluate():.3f}")
    save(epoch)

print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
