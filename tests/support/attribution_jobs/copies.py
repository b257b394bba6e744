"""Train while keeping an average of the parameters, as libraries do it; ``copies`` and ``held`` are what it keeps."""

import copy
import sys

import torch
from torch import nn


class Average:
    """An average of parameters, in a list."""

    def __init__(self, parameters):
        self.shadow_params = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def step(self, parameters):
        torch._foreach_lerp_(self.shadow_params, [parameter.detach() for parameter in parameters], 0.1)


def averaging(kind, net):
    """Return the tensors of an average, and a function that updates it."""
    if kind == "averaged_model":
        average = torch.optim.swa_utils.AveragedModel(net)
        return list(average.parameters()), lambda: average.update_parameters(net)
    if kind == "timm":
        from timm.utils import ModelEmaV3

        average = ModelEmaV3(net)
        return list(average.parameters()), lambda: average.update(net)
    if kind == "diffusers":
        from diffusers.training_utils import EMAModel

        average = EMAModel(net.parameters())
        average.to("cuda")
    else:
        average = Average(net.parameters())
    return average.shadow_params, lambda: average.step(net.parameters())


net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.LayerNorm(1024), nn.Linear(1024, 64)).cuda()
teacher = copy.deepcopy(net).requires_grad_(False)
copies, update = averaging(sys.argv[1], net)
held = [torch.ones(1000, 64, device="cuda")]
optimizer = torch.optim.AdamW(net.parameters())
for index in range(4):
    batch = torch.randn(64, 512).cuda()
    (net(batch) - teacher(batch) + held[0][index]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    update()
