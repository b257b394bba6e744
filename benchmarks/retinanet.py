"""Measure how much memory each strategy saves for RetinaNet with a ResNet-50 (VOC, batch 2, GTX 1660).

    python benchmarks/retinanet.py

A published experiment trained the model in four ways with MMDetection (PyTorch 1.7.1, 1300 iterations, a
real GTX 1660) and reported the megabytes of each. This benchmark runs the same four on the ghost, with
torchvision's parts assembled as in MMDetection's configuration: ResNet-50 with a frozen stem and first
stage and fixed batch norm statistics, P6 and P7 from C5, nine anchors per location, SGD with momentum.

Assumptions: images of 1000 x 600 (MMDetection's largest for VOC) and random boxes; gradients that persist
between steps, as in PyTorch before 2.0; non-reentrant checkpointing of every trained block of the backbone.
The number of matching anchors depends on values: the two columns are its bounds. The software differs from
the article's: the loss is torchvision's, and PyTorch and cuDNN are years newer.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from measuring import MIB

import memfit

PUBLISHED = {  # MB, as published
    "base": 2900,
    "amp": 2243,
    "accumulation": 3177,
    "checkpointed": 2590,
}
STEPS = 3
HEIGHT, WIDTH, CLASSES = 600, 1000, 20


def build(*, checkpointed: bool) -> Any:
    """Return the model on the GPU, in training mode."""
    import torch
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    from torchvision.models.resnet import Bottleneck
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    backbone = resnet_fpn_backbone(
        backbone_name="resnet50",
        weights=None,
        norm_layer=torch.nn.BatchNorm2d,
        trainable_layers=3,
        returned_layers=[2, 3, 4],
        extra_blocks=LastLevelP6P7(2048, 256),
    )
    model = RetinaNet(backbone, CLASSES, min_size=HEIGHT, max_size=WIDTH).cuda().train()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
        if checkpointed and isinstance(module, Bottleneck):
            module.forward = partial(checkpoint_if_trained, module.forward)
    return model


def checkpoint_if_trained(forward: Callable[..., Any], x: Any) -> Any:
    """Run a block, checkpointed if its input requires grad."""
    from torch.utils.checkpoint import checkpoint

    return checkpoint(forward, x, use_reentrant=False) if x.requires_grad else forward(x)


def train(variant: str) -> None:
    """Train for a few steps: the script that runs on the ghost."""
    import torch

    model = build(checkpointed=variant == "checkpointed")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.001, momentum=0.9, weight_decay=1e-4, foreach=False)
    scaler = torch.amp.GradScaler("cuda", enabled=variant == "amp")
    batches = 2 if variant == "accumulation" else 1
    for _ in range(STEPS):
        for _ in range(batches):
            images = [torch.rand(3, HEIGHT, WIDTH, device="cuda") for _ in range(2)]
            corners = torch.rand(3, 2, device="cuda") * 300
            boxes = torch.cat([corners, corners + 100], dim=1)
            labels = torch.ones(3, dtype=torch.long, device="cuda")
            with torch.autocast("cuda", dtype=torch.float16, enabled=variant == "amp"):
                losses = model(images, [{"boxes": boxes, "labels": labels}] * 2)
            scaler.scale(sum(losses.values()) / batches).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)


def peak_mib(variant: str, count: str) -> float:
    """Return the peak allocated on the ghost, in MiB, with ``count`` as the bound of matching anchors."""
    result = memfit.dry_run(__file__, [variant], gpu="GTX-1660", values=f"count={count}", steps=STEPS + 1)
    if result.steps != STEPS:
        raise SystemExit(f"{variant} ended early: {result.end}")
    return result.peak_allocated / MIB


def main() -> None:
    """Print the table."""
    counts = {"all match": "upper", "one matches": "1"}
    print(
        "MiB allocated; relative to base; relative to base after adding the published base's excess to both "
        "(published: MB, relative to base)"
    )
    print(f"{'':<14}" + "".join(f"{name:>28}" for name in (*counts, "published")))
    base: dict[str, float] = {}
    for variant, published in PUBLISHED.items():
        row = ""
        for name, count in counts.items():
            peak = peak_mib(variant, count)
            base.setdefault(name, peak)
            more = PUBLISHED["base"] - base[name]
            row += f"{peak:>14,.0f}{peak / base[name]:>7.3f}{(peak + more) / PUBLISHED['base']:>7.3f}"
        print(f"{variant:<14}{row}{published:>21,}{published / PUBLISHED['base']:>7.3f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1])
    else:
        main()
