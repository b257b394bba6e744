"""Train torchvision's ResNet-50 on made-up images, with the usual Dataset and DataLoader."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet50


class RandomImages(Dataset):
    """Images of ImageNet's shape; the same index gives the same image."""

    def __init__(self, length, classes=1000):
        self.length, self.classes = length, classes

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 224, 224, generator=generator), index % self.classes


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--images", type=int, default=640)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--channels-last", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda")
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format

    loader = DataLoader(
        RandomImages(args.images),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=True,
        drop_last=True,
    )
    model = resnet50(weights=None).to(device, memory_format=memory_format)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    model.train()
    for step, (images, labels) in enumerate(loader):
        images = images.to(device, non_blocking=True, memory_format=memory_format)
        labels = labels.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, labels)
        accuracy = (output.argmax(dim=1) == labels).float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}  loss {loss.item():.4f}  accuracy {accuracy.item():.3f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
