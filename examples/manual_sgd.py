"""Gradient descent by hand: no optimizer, the parameters are updated in place."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
device = "cuda"
learning_rate = 1e-3

x = torch.linspace(-3, 3, 100_000, device=device).unsqueeze(1)
y = torch.sin(x)

model = nn.Sequential(nn.Linear(1, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1))
model = model.to(device)

for step in range(20):
    loss = F.mse_loss(model(x), y)
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= learning_rate * parameter.grad
    print(f"step {step}  loss {loss.item():.4f}")

print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
