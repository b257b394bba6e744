"""Train timm models as timm's train.py does by default, each batch size in a process of its own.

SGD with momentum, float32 with TF32, cudnn.benchmark, batches that PrefetchLoader copies and normalizes on a
stream of its own. Prints a line of JSON for each model and batch size: the most that PyTorch reserved.
"""

import argparse
import json
import os

import timm
import torch
from timm.data import resolve_data_config
from timm.data.loader import PrefetchLoader
from timm.optim import create_optimizer_v2
from torch import nn


class Batches:
    """Images of bytes in host memory, as timm's fast_collate returns them."""

    def __init__(self, batch, size, steps):
        self.batch, self.size, self.steps = batch, size, steps

    def __len__(self):
        return self.steps

    def __iter__(self):
        for _ in range(self.steps):
            yield (
                torch.zeros(self.batch, *self.size, dtype=torch.uint8),
                torch.zeros(self.batch, dtype=torch.int64),
            )


def train(name, batch, steps):
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda")
    model = timm.create_model(name, num_classes=1000)
    size = resolve_data_config({}, model=model)["input_size"]
    model.to(device).train()
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9, weight_decay=2e-5)
    criterion = nn.CrossEntropyLoss().to(device)
    for images, targets in PrefetchLoader(Batches(batch, size, steps), device=device):
        loss = criterion(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()


def outcome(name, batch, steps):
    """Train; return what happened: "trained", "out of memory", or an error."""
    try:
        train(name, batch, steps)
    except torch.OutOfMemoryError:
        return "out of memory"
    except Exception as error:  # noqa: BLE001 - a model that fails must not stop the others
        return f"{type(error).__name__}: {error}"[:200]
    return "trained"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", required=True, help="file to which the lines are appended")
    args = parser.parse_args()

    for name in args.models:
        for batch in args.batches:
            if (child := os.fork()) == 0:
                state = outcome(name, batch, args.steps)
                line = {
                    "model": name,
                    "batch": batch,
                    "state": state,
                    "reserved": torch.cuda.max_memory_reserved(),
                }
                with open(args.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                os._exit(state != "trained")
            if os.waitpid(child, 0)[1]:
                break  # a larger batch would fail, too


if __name__ == "__main__":
    main()
