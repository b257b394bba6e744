"""Train nnU-Net's network for brain tumours, in two or three dimensions, with the sum of Dice and cross entropy."""

import argparse
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

CLASSES = MODALITIES = 4


class Block(nn.Module):
    def __init__(self, args, inside, outside, stride=1):
        super().__init__()
        flat = args.dimensions == 2
        conv, norm = (nn.Conv2d, nn.InstanceNorm2d) if flat else (nn.Conv3d, nn.InstanceNorm3d)
        self.conv_1 = conv(inside, outside, 3, stride, padding=1, bias=False)
        self.conv_2 = conv(outside, outside, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = norm(outside, affine=True), norm(outside, affine=True)

    def forward(self, x):
        x = F.leaky_relu(self.norm_1(self.conv_1(x)))
        return F.leaky_relu(self.norm_2(self.conv_2(x)))


class UNet(nn.Module):
    def __init__(self, args):
        super().__init__()
        flat = args.dimensions == 2
        widths = [min(32 * 2**level, 512 if flat else 320) for level in range(6)]
        pairs = list(zip(widths[:-1], widths[1:], strict=True))
        self.first = Block(args, MODALITIES, widths[0])
        self.down = nn.ModuleList(Block(args, above, below, 2) for above, below in pairs)
        widen = nn.ConvTranspose2d if flat else nn.ConvTranspose3d
        self.widen = nn.ModuleList(widen(below, above, 2, 2) for above, below in reversed(pairs))
        self.up = nn.ModuleList(Block(args, 2 * above, above) for above, _ in reversed(pairs))
        self.last = (nn.Conv2d if flat else nn.Conv3d)(widths[0], CLASSES, 1)

    def forward(self, x):
        levels = [self.first(x)]
        for block in self.down:
            levels.append(block(levels[-1]))
        x = levels.pop()
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(torch.cat((widen(x), levels.pop()), dim=1))
        return self.last(x)


def loss_of(logits, labels):
    entropy = F.cross_entropy(logits, labels.squeeze(1).long())
    shares = torch.softmax(logits, 1)[:, 1:]
    truth = torch.zeros_like(logits).scatter_(1, labels.long(), 1)[:, 1:]
    axes = [0, *range(2, logits.dim())]
    both = (truth * shares).sum(axes)
    dice = 1 - (2 * both + 1e-5) / (truth.sum(axes) + shares.sum(axes) + 1e-5)
    return dice.mean() + entropy


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dimensions", type=int, choices=[2, 3])
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--amp", action="store_true", help="autocast to float16, with a loss scaler")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
    model = UNet(args).to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=8e-4, weight_decay=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    size = (192, 160) if args.dimensions == 2 else (128, 128, 128)

    for _ in range(args.steps):
        images = torch.randn(args.batch_size, MODALITIES, *size, device="cuda")
        labels = torch.zeros(args.batch_size, 1, *size, device="cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16) if args.amp else nullcontext():
            loss = loss_of(model(images), labels)
        scaler.scale(loss).backward()
        print(f"loss {loss.item():.4f}")
        scaler.step(optimizer)
        scaler.update()

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
