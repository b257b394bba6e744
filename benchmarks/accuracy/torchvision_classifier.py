"""Train a classifier of torchvision with SGD, without momentum, on random images."""

import argparse

import torch
import torchvision
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="convnext_large")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--channels-last", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(1234)
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    torch.backends.cudnn.allow_tf32 = args.tf32
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model = getattr(torchvision.models, args.model)(weights=None).to("cuda", memory_format=layout)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cuda", enabled=args.fp16)
    dtype = torch.float16 if args.fp16 else torch.float32

    model.train()
    for _ in range(args.steps):
        images = torch.randn(args.batch_size, 3, 224, 224).to("cuda", dtype=dtype, memory_format=layout)
        targets = torch.randint(1000, (args.batch_size,)).to("cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype, enabled=args.fp16):
            loss = criterion(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
