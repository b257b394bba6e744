"""Train a language model on sentences of very different lengths; a batch is padded to its longest sentence."""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--sentences", type=int, default=1600)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--vocabulary", type=int, default=1024)
parser.add_argument("--width", type=int, default=256)
args = parser.parse_args()

# Most sentences have up to 129 tokens, every hundredth 257, and one near the end 513.
torch.manual_seed(0)
lengths = [89 + number % 41 for number in range(args.sentences)]
lengths[::100] = [257] * len(lengths[::100])
lengths[-20] = 513
sentences = [torch.randint(1, args.vocabulary, (length,)) for length in lengths]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.width, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(args.width, 4, batch_first=True, dropout=0.0) for _ in range(2)
        )
        self.head = nn.Linear(args.width, args.vocabulary)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def collate(batch):
    return pad_sequence(batch, batch_first=True)


loader = DataLoader(sentences, batch_size=args.batch_size, collate_fn=collate)
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

for batch in loader:
    batch = batch.cuda()
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")
