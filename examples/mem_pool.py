"""Train an MLP, and evaluate it in a memory pool of its own: large batches that leave no cache behind."""

import torch
from torch import nn

EPOCHS, STEPS, BATCH, LARGE_BATCH, WIDTH = 2, 4, 256, 8192, 2048


def evaluate(model):
    with torch.no_grad():
        images = torch.rand(LARGE_BATCH, 784, device="cuda")
        labels = torch.randint(10, (LARGE_BATCH,), device="cuda")
        return nn.functional.cross_entropy(model(images), labels).item()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(EPOCHS):
        for _ in range(STEPS):
            images = torch.rand(BATCH, 784, device="cuda")
            labels = torch.randint(10, (BATCH,), device="cuda")
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            loss = evaluate(model)
        del pool  # its memory goes back to the device
        print(f"epoch {epoch}  loss {loss:.4f}  reserved {torch.cuda.memory_reserved() >> 20} MiB")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
