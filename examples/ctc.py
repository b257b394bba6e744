"""A small speech recogniser: convolutions over a spectrogram, an LSTM, and the CTC loss."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Recogniser(nn.Module):
    def __init__(self, features=80, hidden=320, letters=29):
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(features, hidden, 5, stride=2, padding=2),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Conv1d(hidden, hidden, 5, padding=2),
            nn.ReLU(),
        )
        self.lstm = nn.LSTM(hidden, hidden, num_layers=3, bidirectional=True)
        self.head = nn.Linear(2 * hidden, letters)

    def forward(self, spectrogram):
        out, _ = self.lstm(self.front(spectrogram).permute(2, 0, 1))
        return F.log_softmax(self.head(out), dim=-1)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=16)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda"
model = Recogniser().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

for step in range(args.steps):
    spectrogram = torch.randn(args.batch_size, 80, 800, device=device)
    lengths = torch.randint(20, 100, (args.batch_size,), dtype=torch.int32)
    letters = torch.randint(1, 29, (int(lengths.sum()),), dtype=torch.int32)
    out = model(spectrogram)
    loss = F.ctc_loss(out, letters, [len(out)] * args.batch_size, lengths.tolist(), zero_infinity=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}  loss {loss.item():.4f}")

print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
