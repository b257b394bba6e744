"""Train a U-Net to segment images in half precision, on masks drawn at random."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def block(inputs, outputs):
    layers = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, classes, width=32, depth=4):
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.encoder = nn.ModuleList(map(block, [3, *widths[:-1]], widths))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(wide, narrow, 2, stride=2) for narrow, wide in zip(widths, widths[1:])
        )
        self.decoder = nn.ModuleList(block(wide, narrow) for narrow, wide in zip(widths, widths[1:]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        skips = []
        for level, encode in enumerate(self.encoder):
            x = encode(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for up, decode in zip(reversed(self.up), reversed(self.decoder)):
            x = decode(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--classes", type=int, default=21)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = UNet(args.classes).to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")

    for step in range(args.steps):
        images = torch.randn(args.batch_size, 3, args.size, args.size, device="cuda")
        masks = torch.randint(args.classes, (args.batch_size, args.size, args.size), device="cuda")
        masks[:, :2] = 255  # the border is not labelled
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(
                model(images.to(memory_format=torch.channels_last)), masks, ignore_index=255
            )
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"step {step}: loss {loss.item():.3f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
