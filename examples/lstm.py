"""A character model: two LSTM layers, trained by truncated backpropagation through time."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class CharacterModel(nn.Module):
    def __init__(self, characters=96, embedding=128, hidden=512, layers=2):
        super().__init__()
        self.embed = nn.Embedding(characters, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=layers, dropout=0.2, batch_first=True)
        self.head = nn.Linear(hidden, characters)

    def forward(self, text, state=None):
        out, state = self.lstm(self.embed(text), state)
        return self.head(out), state


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--length", type=int, default=256)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda"
model = CharacterModel().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
text = torch.randint(96, (args.batch_size, args.steps * args.length + 1))

state = None
for step in range(args.steps):
    piece = text[:, step * args.length : (step + 1) * args.length + 1].to(device)
    logits, state = model(piece[:, :-1], state)
    loss = F.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    state = tuple(part.detach() for part in state)
    print(f"step {step}  loss {loss.item():.4f}")

print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
