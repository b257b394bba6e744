"""Train torchvision's ViT-L/16 with Adam on one image, stepping after backward or during it.

With ``--in-backward``, every parameter has its own optimizer, which steps as soon as the gradient has
accumulated and then releases it.
"""

import argparse

import torch
from torchvision.models import vit_l_16


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-backward", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    model = vit_l_16(weights=None).cuda()
    if args.in_backward:
        optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    else:
        optimizer = torch.optim.Adam(model.parameters())

    for _ in range(args.steps):
        image = torch.rand(1, 3, 224, 224).cuda()
        model(image).sum().backward()
        if not args.in_backward:
            optimizer.step()
            optimizer.zero_grad()

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
