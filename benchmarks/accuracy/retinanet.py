"""Train RetinaNet with a ResNet-50 (VOC, batch 2): base, amp, accumulation or checkpointed.

A published experiment trained the model in four ways with MMDetection (PyTorch 1.7.1, 1300 iterations, a
real GTX 1660) and reported the megabytes of each. This script trains in the same four, with torchvision's
parts assembled as in MMDetection's configuration: ResNet-50 with a frozen stem and first stage and fixed batch
norm statistics, P6 and P7 from C5, nine anchors per location, SGD with momentum.

Assumptions: images of 1000 x 600 (MMDetection's largest for VOC) and random boxes; gradients that persist
between steps, as in PyTorch before 2.0; non-reentrant checkpointing of every trained block of the backbone.
The number of matching anchors depends on values: two rows of rows.toml are its bounds. The software differs
from the article's: the loss is torchvision's, and PyTorch and cuDNN are years newer.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

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


if __name__ == "__main__":
    train(sys.argv[1])
