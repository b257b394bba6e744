"""Train a compiled MLP with mode="reduce-overhead": PyTorch captures CUDA graphs of it by itself."""

import torch
from torch import nn

STEPS, BATCH, WIDTH = 5, 128, 1024


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fast = torch.compile(model, mode="reduce-overhead")

    for step in range(STEPS):
        images = torch.rand(BATCH, 784, device="cuda")
        labels = torch.randint(10, (BATCH,), device="cuda")
        loss = nn.functional.cross_entropy(fast(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
