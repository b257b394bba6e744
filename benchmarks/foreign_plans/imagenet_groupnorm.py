"""Run main.py of pytorch/examples' imagenet, unmodified, with a ResNet-18 of GroupNorm among its models."""

import runpy
from functools import partial

from torch import nn
from torchvision import models

models.resnet18_gn = partial(models.resnet18, norm_layer=partial(nn.GroupNorm, 8))  # type: ignore[attr-defined]
runpy.run_path("main.py", run_name="__main__")
