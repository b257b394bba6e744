"""Fine-tune torchvision's ViT-L/16 with Adam on one made-up image at a time."""

import argparse

import torch
from torch import nn
from torchvision.models import vit_l_16


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--classes", type=int, default=1000)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda"
    model = vit_l_16(weights=None, num_classes=args.classes).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    for step in range(args.steps):
        images = torch.randn(args.batch_size, 3, 224, 224, device=device)
        labels = torch.randint(args.classes, (args.batch_size,), device=device)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        print(f"step {step}  loss {loss.item():.4f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
