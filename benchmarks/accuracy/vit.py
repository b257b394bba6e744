"""Fine-tune torchvision's ViT-L/16 on random images of ten classes, in one of three precisions.

The loop clears the gradients after the forward, so the previous step's gradients stay in memory while the
activations grow.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import vit_l_16


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=["32", "16-mixed", "bf16-true"], default="32")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--no-flash", action="store_true", help="use memory-efficient attention instead")
    args = parser.parse_args()

    torch.manual_seed(123)
    torch.backends.cuda.enable_flash_sdp(not args.no_flash)
    torch.backends.cuda.enable_cudnn_sdp(not args.no_flash)
    dtype = torch.bfloat16 if args.precision == "bf16-true" else torch.float32
    mixed = args.precision == "16-mixed"
    model = vit_l_16(weights=None)
    model.heads.head = nn.Linear(1024, 10)
    model.to("cuda", dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-5)
    scaler = torch.amp.GradScaler("cuda", enabled=mixed)

    model.train()
    for _ in range(args.steps):
        images = torch.randn(args.batch_size, 3, 224, 224).to("cuda")
        targets = torch.randint(10, (args.batch_size,)).to("cuda")
        with torch.autocast("cuda", torch.float16, enabled=mixed):
            logits = model(images.to(dtype))
        loss = F.cross_entropy(logits.float(), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
