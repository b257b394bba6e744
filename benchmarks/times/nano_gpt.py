"""Train a GPT in nanoGPT's style: autocast to bfloat16, AdamW in two groups, compiled or not."""

import argparse
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


def new_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))))


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.gelu = new_gelu if args.llm_c else partial(F.gelu, approximate="tanh")
        width, self.heads, self.drop = args.width, args.heads, args.dropout
        self.dropout = nn.Dropout(args.dropout)
        self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=args.bias) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=args.bias)
        self.out = nn.Linear(width, width, bias=args.bias)
        self.up = nn.Linear(width, 4 * width, bias=args.bias)
        self.down = nn.Linear(4 * width, width, bias=args.bias)
        self.plain = args.attention == "plain"
        if self.plain:
            self.register_buffer("mask", torch.ones(args.context, args.context).tril())

    def attention(self, x):
        batch, length, width = x.shape
        parts = self.qkv(x).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        drop = self.drop if self.training else 0
        if self.plain:
            scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
            found = scores.masked_fill(self.mask[:length, :length] == 0, -torch.inf).softmax(-1) @ v
        else:
            found = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        return self.dropout(self.out(found.transpose(1, 2).contiguous().view(batch, length, width)))

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.dropout(self.down(self.gelu(self.up(self.ln_2(x)))))


class GPT(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Embedding(args.context, args.width)
        self.dropout = nn.Dropout(args.dropout)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.ln = nn.LayerNorm(args.width, bias=args.bias)
        self.head = nn.Linear(args.width, args.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.llm_c = args.llm_c

    def forward(self, tokens, targets):
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(at))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return (logits, loss) if self.llm_c else loss


def train_on_one_batch(step, args):
    """Train as llm.c's script: Adam in one group, on a batch that stays on the GPU, which each step waits for."""
    optimizer = torch.optim.Adam(step.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(args.vocabulary, (args.batch_size * args.context + 1,))
    shape = (args.batch_size, args.context)
    tokens, targets = (part.view(shape).to("cuda") for part in (tokens[:-1], tokens[1:]))
    for _ in range(args.steps):
        with torch.autocast("cuda", torch.bfloat16):
            _, loss = step(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        print(f"loss {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bias", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--bfloat16", action="store_true", help="weights in bfloat16")
    parser.add_argument("--precision", choices=["autocast", "tf32", "float32"], default="autocast")
    parser.add_argument("--attention", choices=["fastest", "efficient", "math", "plain"], default="fastest")
    parser.add_argument("--fused", action="store_true", help="AdamW in one kernel")
    parser.add_argument("--clip", action="store_true", help="the norm of the gradients")
    parser.add_argument("--llm-c", action="store_true", help="as llm.c's train_gpt2.py of May 2024")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    torch.backends.cuda.matmul.allow_tf32 = args.precision != "float32"
    torch.backends.cudnn.allow_tf32 = True
    if args.attention in ("efficient", "math"):
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(args.attention == "efficient")
    autocast = args.precision == "autocast"
    model = GPT(args).to("cuda", torch.bfloat16 if args.bfloat16 else torch.float32)
    step = torch.compile(model) if args.compile else model
    if args.llm_c:
        train_on_one_batch(step, args)
        return
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=args.fused or None)
    step = torch.compile(model) if args.compile else model
    for _ in range(args.steps):
        for _ in range(args.accumulation):
            text = torch.randint(args.vocabulary - 50, (args.batch_size, args.context + 1))
            tokens = text[:, :-1].contiguous().pin_memory().to("cuda", non_blocking=True)
            targets = text[:, 1:].contiguous().pin_memory().to("cuda", non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext():
                loss = step(tokens, targets) / args.accumulation
            loss.backward()
        if args.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"loss {loss.item():.4f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
