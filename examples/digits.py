"""LeNet-5 on scikit-learn's handwritten digits, in batches of 32 and of 4 x 8: to the same accuracy.

Trained with memfit; each run is saved, loaded into a fresh network and evaluated on digits that it has not seen.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

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


def make_engine(device, plan, updates):
    torch.manual_seed(0)
    model = lenet5().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=updates)
    return memfit.Engine(
        model, plan, optimizer=optimizer, loss=loss, scheduler=scheduler, scheduler_interval="update"
    )


@torch.no_grad()
def accuracy(model, images, labels):
    return (model(images).argmax(1) == labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=args.device).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, device=args.device)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)
    data = TensorDataset(images[train], labels[train])

    for name, plan in {
        "32": None,
        "4 x 8": memfit.Accumulation(micro_batch_size=8, global_batch_size=32),
    }.items():
        loader = DataLoader(data, batch_size=32, shuffle=True)
        updates = args.epochs * len(loader)
        engine = make_engine(args.device, plan, updates)
        engine.fit(loader, args.epochs)
        with tempfile.TemporaryDirectory() as folder:
            engine.save(Path(folder) / "lenet5")
            reloaded = make_engine(args.device, plan, updates)
            reloaded.load(Path(folder) / "lenet5")
        reached = accuracy(reloaded.model, images[test], labels[test])
        print(f"batches of {name:5}  {engine.optimizer_step} updates  accuracy {reached:.4f}")


main()
