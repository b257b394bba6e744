"""A small language model and its data: sequences with different numbers of tokens to predict."""

import torch
from torch import nn
from torch.nn import functional as F

PLAN = {"checkpointing": ["layers.*"], "batches_per_update": 3, "max_grad_norm": 0.5}


class LanguageModel(nn.Module):
    def __init__(self, classes=256, width=64, layers=4):
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids, labels, **given):
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
        return {
            "loss": loss / given.get("num_items_in_batch", (labels != -100).sum())
        }  # Trainer may pass them


def tokens(batch):
    return (batch["labels"] != -100).sum()


def samples(count=14, length=32):
    """Return 14 sequences: 7 batches of 2, and so windows of 3, 3 and 1 batches."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(256, (count, length + 1), generator=generator)
    found = [{"input_ids": row[:-1], "labels": row[1:].clone()} for row in drawn]
    for index, each in enumerate(found):
        each["labels"][: index * 2] = -100
    return found
