"""Train a small ResNet, each of its blocks compiled on its own; the optimizer's step is compiled, too."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(y)))


class ResNet(nn.Module):
    def __init__(self, channels=64, blocks=3, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, classes)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def main():
    torch.manual_seed(0)
    model = ResNet().cuda().to(memory_format=torch.channels_last)
    for block in model.blocks:
        block.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    update = torch.compile(optimizer.step)
    for step in range(4):
        images = torch.randn(128, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
        labels = torch.randint(10, (128,), device="cuda")
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        update()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
