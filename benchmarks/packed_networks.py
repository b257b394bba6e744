"""Train a model for a few steps, or run a few forwards: the script whose buffers ``packing.py`` packs.

python packed_networks.py resnet50 training [--batch-size 32] [--steps 3] [--accumulate 1]
"""

import argparse

import torch
import torchvision
from torch import nn


def model_of(name: str) -> nn.Module:
    """Build a model with random weights."""
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config())
    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    return torchvision.models.get_model(name, weights=None, **options)


def main() -> None:
    """Train, or run inference."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("mode", choices=("training", "inference"))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1, help="batches per training step")
    arguments = parser.parse_args()
    model, size = model_of(arguments.model).cuda(), arguments.batch_size
    is_text = arguments.model == "gpt2"
    batch = torch.zeros(size, 1024, dtype=torch.long) if is_text else torch.zeros(size, 3, 224, 224)
    if arguments.mode == "inference":
        model.eval()
        for _ in range(arguments.steps):
            with torch.no_grad():
                model(batch.cuda())
        return
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(arguments.steps):
        for micro in range(arguments.accumulate):
            inputs = batch.cuda()
            output = model(inputs, labels=inputs).loss if is_text else model(inputs).sum()
            if not micro:
                optimizer.zero_grad()
            output.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
