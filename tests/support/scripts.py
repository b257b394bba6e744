"""Scripts and readings that several tests share."""

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
"""A model of 821,248 parameters, 4 bytes each, and training steps of it."""


def figures(answer):
    """Return the terms of a JSON answer: bytes by name."""
    return {term["name"]: term["bytes"] for term in answer["terms"]}


INSTALL_VALUES = """
import json, math
import torch.nn.functional as F
from memfit.ghost import values as values_module

notes = []

def install(choices=""):
    return values_module.install(
        ghost, values_module.ValueChoices.parse(choices), lambda *note, sizes=False: notes.append(note),
        fallback_where=lambda: "layers.0",
    )
"""


def check(told, expected, **options):
    """Compare what expressions on the ghost are told with what they should be."""
    answers = told(expected, **options)
    wrong = {line: answer for line, answer in zip(expected, answers, strict=True) if answer != expected[line]}
    assert not wrong
