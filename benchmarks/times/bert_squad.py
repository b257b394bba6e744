"""Fine-tune BERT for question answering on random sequences of 384 tokens.

With ``--half``, the model is in float16, and Adam updates a float32 copy of it, as apex.amp's level O2 does.
"""

import argparse

import torch
from data_parallel import data_parallel
from transformers import BertConfig, BertForQuestionAnswering

LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--base", action="store_true", help="BERT base instead of large")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    torch.backends.cuda.matmul.allow_tf32 = True
    config = BertConfig(**({} if args.base else LARGE))
    with torch.device("cuda"):
        model = BertForQuestionAnswering._from_config(config, attn_implementation="eager").train()
    weights = list(model.parameters())
    masters = weights
    if args.half:
        masters = [weight.detach().clone() for weight in weights]
        model.half()
    model = data_parallel(model)
    optimizer = torch.optim.Adam(masters, lr=3e-5, fused=True)
    data = torch.randint(30522, (3 * args.batch_size, 384))

    for step in range(args.steps):
        tokens = data[step % 3 :: 3].to("cuda")
        mask = torch.ones_like(data[::3]).to("cuda")
        segments = torch.zeros_like(data[::3]).to("cuda")
        first = torch.randint(384, (args.batch_size,)).to("cuda")
        last = torch.randint(384, (args.batch_size,)).to("cuda")
        loss = model(tokens, mask, segments, start_positions=first, end_positions=last).loss
        if args.half:
            (loss.float() * 2**16).backward()
            for master in masters:
                master.grad = torch.empty_like(master)
            torch._foreach_copy_([master.grad for master in masters], [weight.grad for weight in weights])
            torch._foreach_mul_([master.grad for master in masters], 2**-16)
        else:
            loss.backward()
        if bool(torch.nn.utils.clip_grad_norm_(masters, 1.0).isfinite()):
            optimizer.step()
        if args.half:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
        optimizer.zero_grad()
        for weight in weights:
            weight.grad = None

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
