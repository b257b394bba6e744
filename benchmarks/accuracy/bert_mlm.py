"""Train BERT-base as a masked language model on random sequences of 512 tokens.

The loop never clears the gradients; they accumulate from step to step.
"""

import argparse

import torch
from transformers import BertConfig, BertForMaskedLM


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--attention", default=None)
    args = parser.parse_args()

    torch.manual_seed(1234)
    config = BertConfig()
    if args.attention:
        config._attn_implementation = args.attention
    model = BertForMaskedLM(config).to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=args.fp16)
    tokens = torch.randint(config.vocab_size, (args.batch_size, 512))
    labels = torch.randint(config.vocab_size, (args.batch_size, 512))

    def step(data):
        with torch.autocast("cuda", torch.float16, enabled=args.fp16):
            outputs = model(**data)
        loss = outputs.loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    for _ in range(args.steps):
        step({"input_ids": tokens.to("cuda"), "labels": labels.to("cuda")})

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
