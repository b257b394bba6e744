"""A sequence classifier: a bidirectional GRU over sentences of different lengths, packed, in mixed precision."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence


class Classifier(nn.Module):
    def __init__(self, words=20000, embedding=300, hidden=256, classes=5):
        super().__init__()
        self.embed = nn.Embedding(words, embedding, padding_idx=0)
        self.gru = nn.GRU(embedding, hidden, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, words, lengths):
        packed = pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        _, last = self.gru(packed)
        return self.head(torch.cat([last[-2], last[-1]], dim=1))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=128)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda"
model = Classifier().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for step in range(args.steps):
    lengths = torch.randint(10, 121, (args.batch_size,))
    words = torch.randint(1, 20000, (args.batch_size, int(lengths.max())))
    words[torch.arange(words.shape[1]) >= lengths[:, None]] = 0
    classes = torch.randint(5, (args.batch_size,), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(words.to(device), lengths), classes)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {loss.item():.4f}")

print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
