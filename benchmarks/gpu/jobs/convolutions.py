"""Train convolutions of many shapes, whose cuDNN workspaces add to the peak."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
parser.add_argument("--channels-last", action="store_true")
parser.add_argument("--benchmark", action="store_true")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--steps", type=int, default=3)
arguments = parser.parse_args()

torch.backends.cudnn.benchmark = arguments.benchmark
dtype = getattr(torch, arguments.dtype)
layout = torch.channels_last if arguments.channels_last else torch.contiguous_format

# Name -> (layer, side of its square input).
LAYERS = {
    "stem": (nn.Conv2d(3, 64, 7, stride=2, padding=3), 224),
    "same3x3": (nn.Conv2d(64, 64, 3, padding=1), 112),
    "wide3x3": (nn.Conv2d(256, 256, 3, padding=1), 28),
    "deep3x3": (nn.Conv2d(512, 512, 3, padding=1, bias=False), 14),
    "strided3x3": (nn.Conv2d(128, 256, 3, stride=2, padding=1), 56),
    "pointwise": (nn.Conv2d(256, 1024, 1), 28),
    "large5x5": (nn.Conv2d(64, 128, 5, padding=2), 56),
    "dilated": (nn.Conv2d(128, 128, 3, padding=2, dilation=2), 56),
    "grouped": (nn.Conv2d(256, 256, 3, padding=1, groups=32), 28),
    "depthwise": (nn.Conv2d(256, 256, 7, padding=3, groups=256), 28),
    "transposed": (nn.ConvTranspose2d(128, 64, 2, stride=2), 56),
}


class Convolutions(nn.Module):
    """Layers that each process their own input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: layer for name, (layer, _) in LAYERS.items()})

    def forward(self, inputs):
        return sum(layer(inputs[name]).float().mean() for name, layer in self.layers.items())


model = Convolutions().to("cuda", dtype, memory_format=layout)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = {}
for name, (layer, side) in LAYERS.items():
    image = torch.randn(arguments.batch_size, layer.in_channels, side, side, device="cuda", dtype=dtype)
    inputs[name] = image.to(memory_format=layout).requires_grad_()

for _ in range(arguments.steps):
    optimizer.zero_grad()
    loss = model(inputs)
    loss.backward()
    optimizer.step()

print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
