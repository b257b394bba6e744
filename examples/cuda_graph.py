"""Train an MLP by replaying one CUDA graph that holds the forward, the backward and the optimizer."""

import torch
from torch import nn

WARM_UP, STEPS, BATCH, WIDTH = 3, 10, 256, 2048


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    images = torch.empty(BATCH, 784, device="cuda")
    labels = torch.empty(BATCH, dtype=torch.long, device="cuda")

    def train_step():
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # allocate what lives on before the graph takes over
        for _ in range(WARM_UP):
            train_step()
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train_step()

    for step in range(STEPS):
        images.copy_(torch.rand(BATCH, 784))
        labels.copy_(torch.randint(10, (BATCH,)))
        graph.replay()
        print(f"step {step}  loss {loss.item():.4f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
