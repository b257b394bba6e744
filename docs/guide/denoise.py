"""Remove noise from synthetic heartbeats with a one-dimensional U-Net."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Heartbeats(Dataset):
    def __init__(self, count, length):
        self.count, self.length = count, length

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        t = torch.linspace(0, 8, self.length)
        rate = 0.8 + torch.rand(1, generator=generator)
        clean = torch.exp(-(((t * rate) % 1 - 0.5) ** 2) / 0.002)
        noise = 0.3 * torch.randn(self.length, generator=generator)
        return (clean + noise)[None], clean[None]


def pair(inputs, outputs):
    return nn.Sequential(
        nn.Conv1d(inputs, outputs, 9, padding=4),
        nn.GroupNorm(8, outputs),
        nn.SiLU(),
        nn.Conv1d(outputs, outputs, 9, padding=4),
        nn.GroupNorm(8, outputs),
        nn.SiLU(),
    )


class UNet(nn.Module):
    def __init__(self, widths=(32, 64, 128)):
        super().__init__()
        self.down = nn.ModuleList(pair(a, b) for a, b in zip((1, *widths), widths))
        self.middle = pair(widths[-1], widths[-1])
        self.up = nn.ModuleList(pair(2 * b, a) for a, b in zip((widths[0], *widths[:-1]), widths))
        self.out = nn.Conv1d(widths[0], 1, 1)

    def forward(self, x):
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = nn.functional.avg_pool1d(x, 2)
        x = self.middle(x)
        for block, skip in zip(reversed(self.up), reversed(kept)):
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2), skip], 1))
        return self.out(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=192)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = UNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(Heartbeats(args.samples, args.length), batch_size=args.batch_size, shuffle=True)
    started = time.time()
    for epoch in range(1):
        for step, (noisy, clean) in enumerate(loader):
            loss = nn.functional.mse_loss(model(noisy.to(device)), clean.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
    torch.save(model.state_dict(), "denoise.pt")


if __name__ == "__main__":
    main()
