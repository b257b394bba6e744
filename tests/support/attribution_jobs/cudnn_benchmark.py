"""Train a small ResNet for which PyTorch times cuDNN's engines."""

import torch
from torch import nn

torch.backends.cudnn.benchmark = True


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm_a, self.norm_b = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(x + self.norm_b(self.b(torch.relu(self.norm_a(self.a(x))))))


stem = nn.Conv2d(3, 64, 7, 2, 3)
head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
net = nn.Sequential(stem, Block(64), Block(64), head).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
for _ in range(4):
    images, labels = torch.randn(16, 3, 128, 128).cuda(), torch.zeros(16, dtype=torch.long).cuda()
    nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
