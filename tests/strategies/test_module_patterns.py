"""The modules that a pattern selects."""

import pytest
import torch
from torch import nn

from memfit.errors import UsageError
from memfit.strategies.mechanisms.module_patterns import backbone_blocks, modules_named, repeated_blocks


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


class Block(nn.Module):
    """A residual block, known as such by its expansion."""

    expansion = 4

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        return x + self.conv(x)


def detector(*, residual):
    """Return a model with a backbone of two stages, a neck and a head that repeat blocks of their own."""

    def repeated():
        return nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))

    stages = [nn.Sequential(*(Block() for _ in range(2))) for _ in range(2)]
    backbone = nn.ModuleDict(
        {"stages": nn.ModuleList(stages) if residual else repeated(), "neck": repeated()}
    )
    return nn.ModuleDict({"backbone": backbone, "head": repeated()})


def test_the_blocks_of_a_backbone_are_its_residual_ones():
    expected = [f"backbone.stages.{stage}.{block}" for stage in range(2) for block in range(2)]
    assert list(backbone_blocks(detector(residual=True))) == expected
    assert list(backbone_blocks(nn.ModuleDict({"model": detector(residual=True)}))) == [
        f"model.{name}" for name in expected
    ]
    assert list(backbone_blocks(detector(residual=True)["backbone"])) == [
        name.removeprefix("backbone.") for name in expected
    ]


def test_a_backbone_without_residual_blocks_repeats_others_and_the_head_has_no_part_in_it():
    found = list(backbone_blocks(detector(residual=False)))
    assert found == [f"backbone.{part}.{index}" for part in ("stages", "neck") for index in range(2)]


def test_with_cp_checkpoints_what_mmdetections_does():
    """30 modules repeat in torchvision's RetinaNet: heads on five levels and the pyramid, too."""
    from torchvision.models.detection import retinanet_resnet50_fpn

    model = retinanet_resnet50_fpn(weights=None, weights_backbone=None)
    blocks = backbone_blocks(model)
    assert len(blocks) == 16
    assert {type(block).__name__ for block in blocks.values()} == {"Bottleneck"}
