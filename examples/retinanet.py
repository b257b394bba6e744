"""Train RetinaNet with a ResNet-50 and feature pyramid on images of VOC's size, made at random."""

import argparse

import torch
from torchvision.models.detection import retinanet_resnet50_fpn


def batch(size, height, width, objects=4):
    images, targets = [], []
    for _ in range(size):
        corners = torch.rand(objects, 2) * torch.tensor([width / 2, height / 2])
        extents = torch.rand(objects, 2) * torch.tensor([width / 2, height / 2]) + 1
        boxes = torch.cat([corners, corners + extents], dim=1)
        images.append(torch.rand(3, height, width).cuda())
        targets.append({"boxes": boxes.cuda(), "labels": torch.randint(1, 21, (objects,)).cuda()})
    return images, targets


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--height", type=int, default=375)
    parser.add_argument("--width", type=int, default=500)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = retinanet_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=21, min_size=args.height, max_size=args.width
    ).cuda()
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.005, momentum=0.9, weight_decay=1e-4)

    for step in range(args.steps):
        losses = model(*batch(args.batch_size, args.height, args.width))
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 10.0)
        optimizer.step()
        print(f"step {step}: " + ", ".join(f"{name} {value.item():.3f}" for name, value in losses.items()))

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
