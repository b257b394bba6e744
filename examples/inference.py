"""Score made-up images with torchvision's EfficientNet-B4: no gradients, no optimizer."""

import argparse

import torch
from torchvision.models import efficientnet_b4


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--half", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda:0")
    dtype = torch.float16 if args.half else torch.float32
    model = efficientnet_b4(weights=None).eval().to(device, dtype)

    confident = 0
    for batch in range(args.batches):
        images = torch.randn(args.batch_size, 3, 380, 380).to(device, dtype)
        scores, classes = model(images).softmax(dim=1).max(dim=1)
        confident += (scores > 0.5).sum().item()
        print(f"batch {batch}  first classes {classes[:4].tolist()}  confident so far {confident}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
