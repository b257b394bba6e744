"""Scripts that several tests run, and helpers that read their output."""

TRAIN = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8))
    model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    def step():
        optimizer.zero_grad()
        loss = model(torch.randn(64, 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
"""

FEED_FORWARD = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width, dropout=0.0):
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        def forward(self, x):
            return x + self.dropout(self.down(nn.functional.gelu(self.up(x))))

    class Net(nn.Module):
        def __init__(self, width, blocks=8):
            super().__init__()
            self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x
"""
"""The models of scripts that memfit plans for."""

WATCHED = """
    import torch
    from torch import nn
    import memfit
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.blocks = nn.Linear(64, 512), nn.ModuleList(nn.Linear(512, 512) for _ in range(3))
        def forward(self, x):
            x = self.first(x).relu()
            for block in self.blocks:
                x = block(x).sin()
            return x
    def steps(model, optimizer, number, batch=256):
        for _ in range(number):
            loss = model(torch.ones(batch, 64, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""
"""A model of 821,248 parameters of 4 bytes each, and a function that trains it."""


LATE_FREES = """
import torch
side = torch.cuda.Stream()
for _ in range(2):
    blocks = [torch.empty(20 << 20, dtype=torch.uint8, device="cuda") for _ in range(3)]
    for block in blocks:
        block.record_stream(side)
    del blocks, block
"""
"""Three blocks of 20 MiB, twice: the second three reuse the first, unless the side stream is late."""


def figures(answer):
    """Return the terms of a JSON answer as bytes by name."""
    return {term["name"]: term["bytes"] for term in answer["terms"]}


INSTALL_VALUES = """
import json, math
import torch.nn.functional as F
from memfit.ghost.values import gpu_reads
from memfit.ghost.values.value_options import GpuValueOptions

notes = []

def install(options=""):
    return gpu_reads.answer_gpu_reads(
        ghost, GpuValueOptions.parse(options), lambda *note, **_: notes.append(note),
        fallback_where=lambda: "layers.0",
    )
"""


def check(evaluate, expected, **arguments):
    """Assert that expressions evaluated on the ghost have the expected values."""
    answers = evaluate(expected, **arguments)
    differing = {
        line: answer for line, answer in zip(expected, answers, strict=True) if answer != expected[line]
    }
    assert not differing, differing
