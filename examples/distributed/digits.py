"""LeNet-5 on scikit-learn's handwritten digits, on one process or several: the same updates, the same accuracy.

Each update has 48 digits in micro-batches of 8: six on one process (python digits.py), three on each of two
(torchrun --nproc-per-node 2 digits.py).
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import memfit


def lenet5():
    return nn.Sequential(
        nn.Upsample(32),  # the digits are 8 x 8
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def accuracy(model, batch):
    images, labels = batch
    return (model(images).argmax(1) == labels).sum(), len(labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--sharding", choices=["ddp", "zero1", "fsdp2"], default="ddp")
    args = parser.parse_args()

    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
    )
    if ranks > 1:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(device)

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, device=device)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)
    data = TensorDataset(images[train], labels[train])
    sampler = DistributedSampler(data, ranks, rank)  # the same digits in the same updates, however many ranks
    loader = DataLoader(data, batch_size=48 // ranks, sampler=sampler, drop_last=True)
    held_out = list(
        zip(images[test][rank::ranks].split(60), labels[test][rank::ranks].split(60), strict=True)
    )

    torch.manual_seed(0)
    plan = [memfit.Accumulation(micro_batch_size=8)]
    engine = memfit.Engine(
        lenet5().to(device),
        plan + [memfit.Sharding(args.sharding)] if ranks > 1 else plan,
        optimizer=lambda parameters: torch.optim.Adam(parameters),
        loss=loss,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=5e-3, total_steps=args.epochs * len(loader)
        ),
        scheduler_interval="update",
    )
    result = engine.fit(loader, args.epochs, validate=held_out, metrics={"accuracy": accuracy})
    if rank == 0:
        print(f"{ranks} x {48 // ranks // 8} micro-batches  {engine.optimizer_step} updates  ", end="")
        print(f"last loss {result.loss:.6f}  accuracy {engine.metrics['accuracy']:.4f}")
    if ranks > 1:
        dist.destroy_process_group()


main()
