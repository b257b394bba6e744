"""The modules that a pattern selects."""

import pytest
import torch
from torch import nn

from memfit.errors import UsageError
from memfit.strategies.mechanisms.module_patterns import modules_named, repeated_blocks


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(2, 2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Part() for _ in range(3))
        self.layers2 = nn.Sequential(Part(), nn.Linear(2, 2), Part(), Part())
        self.heads = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("layers.1", ["layers.1"]),
        ("layers.*", ["layers.0", "layers.1", "layers.2"]),
        ("layers?.0", ["layers2.0"]),
        ("layers.**", [f"layers.{n}{part}" for n in range(3) for part in ("", ".mlp")]),
        ("**.mlp", [f"layers.{n}.mlp" for n in range(3)] + [f"layers2.{n}.mlp" for n in (0, 2, 3)]),
        ("Part", ["layers.0", "layers.1", "layers.2", "layers2.0", "layers2.2", "layers2.3"]),
        (("heads.1", "layers.0"), ["layers.0", "heads.1"]),
        ("la.ers.1", []),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_names_patterns_and_classes_select_modules(pattern, names, compiled):
    model = Net()
    if compiled:
        model.layers[1] = torch.compile(model.layers[1])
        model = torch.compile(model)
    if names:
        assert list(modules_named(model, pattern, "x")) == names
    else:
        with pytest.raises(
            UsageError, match=r"x: no module of Net has the name or class 'la\.ers\.1'. Nearest: layers\.1"
        ):
            modules_named(model, pattern, "x")


def test_repeated_blocks_are_found():
    model = Net()
    found = [f"layers.{n}" for n in range(3)] + ["layers2.2", "layers2.3"]
    assert list(repeated_blocks(model)) == found
    assert list(repeated_blocks(torch.compile(model))) == found
    assert list(repeated_blocks(nn.Sequential(Part(), Part()))) == ["0", "1"]
    assert not repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
