"""Classify scikit-learn's handwritten digits with a multilayer perceptron."""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--hidden", type=int, default=4096)
args = parser.parse_args()

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train_images, test_images, train_labels, test_labels = train_test_split(images, labels, random_state=0)
loader = DataLoader(TensorDataset(train_images, train_labels), args.batch_size, shuffle=True)

model = nn.Sequential(
    nn.Linear(64, args.hidden),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(args.hidden, args.hidden),
    nn.ReLU(),
    nn.Linear(args.hidden, 10),
).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
criterion = nn.CrossEntropyLoss()

for epoch in range(args.epochs):
    model.train()
    total = 0.0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)

    model.eval()
    with torch.no_grad():
        predicted = model(test_images.to(device)).argmax(dim=1).cpu()
    accuracy = (predicted == test_labels).float().mean().item()
    print(f"epoch {epoch}  loss {total / len(train_images):.4f}  accuracy {accuracy:.3f}")

print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
