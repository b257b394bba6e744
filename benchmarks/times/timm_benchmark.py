"""Train a timm model with SGD on one batch that stays on the GPU, and wait for the GPU after each step."""

import argparse
from contextlib import nullcontext

import timm
import torch
from data_parallel import data_parallel
from timm.layers import set_fused_attn
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--amp", action="store_true", help="autocast to float16, without a loss scaler")
    parser.add_argument("--scaler", action="store_true", help="with a loss scaler")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--tf32", action="store_true", help="of matrix products; convolutions use it anyway")
    parser.add_argument("--no-benchmark", action="store_true", help="let cuDNN choose by its heuristics")
    parser.add_argument("--as-in-2022", action="store_true", dest="old", help="as PyTorch 1.12 and timm 0.6")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    torch.backends.cudnn.benchmark = not args.no_benchmark
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    set_fused_attn(not args.old)
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model = data_parallel(timm.create_model(args.model).to("cuda", memory_format=layout).train())
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=1e-4,
        momentum=0.9,
        nesterov=True,
        foreach=not args.old,
    )
    scaler = torch.amp.GradScaler("cuda", enabled=args.scaler)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device="cuda")
    images = images.contiguous(memory_format=layout)
    loss_of = nn.CrossEntropyLoss()

    for _ in range(args.steps):
        optimizer.zero_grad(set_to_none=not args.old)
        with torch.autocast("cuda", torch.float16) if args.amp else nullcontext():
            output = model(images)
            targets = torch.empty(args.batch_size, device="cuda", dtype=torch.long).random_(1000)
            loss = loss_of(output, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.synchronize()

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
