"""Two small convolutional networks, plain and checkpointed: when does it pay to compute a block twice?"""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

MIB = 2**20


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.conv2(self.relu(self.conv1(x)))
        out += x
        return self.relu(out)


class Net(nn.Module):
    def __init__(self, block, recompute):
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.recompute = recompute

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = self.recompute(block, x)
        return x


def peak_of(net, x):
    """Bytes at the highest point of one forward and backward."""
    torch.cuda.reset_peak_memory_stats()
    out = net(x)
    out.backward(torch.ones_like(out))
    return torch.cuda.max_memory_allocated()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--network", choices=["residual", "straight"], default="residual")
parser.add_argument("--reentrant", action="store_true")
args = parser.parse_args()

blocks = {
    "residual": lambda: ResidualBlock(64),
    "straight": lambda: nn.Conv2d(64, 64, 3, padding=1),
}
x = torch.randn(1, 3, 224, 224, requires_grad=True).cuda()

plain = Net(blocks[args.network], lambda block, x: block(x)).cuda()
peak_plain = peak_of(plain, x)
reserved = torch.cuda.max_memory_reserved()
print(f"plain         {peak_plain / MIB} MiB")

again = Net(blocks[args.network], lambda block, x: checkpoint(block, x, use_reentrant=args.reentrant)).cuda()
peak_again = peak_of(again, x)
print(f"checkpointed  {peak_again / MIB} MiB")

print(f"peak allocated {max(peak_plain, peak_again):,} B")
print(f"peak reserved {max(reserved, torch.cuda.max_memory_reserved()):,} B")
