"""Train the GPT of gpt.py with its head in chunks: logits and their gradient never exist whole."""

import argparse

import torch
from gpt import GPT
from torch import nn

import memfit


class ChunkedGPT(GPT):
    def __init__(self, chunks, **options):
        super().__init__(**options)
        self.loss = memfit.ChunkedHead(self.head, chunks)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.loss(self.ln(x), targets)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--chunks", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    model = ChunkedGPT(args.chunks, context=args.context).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    for step in range(args.steps):
        text = torch.randint(50257, (args.batch_size, args.context + 1)).to("cuda")
        optimizer.zero_grad(set_to_none=True)  # before the forward, which computes the head's gradients
        loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step}  loss {loss.item():.4f}  {torch.cuda.max_memory_allocated():,} B")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
