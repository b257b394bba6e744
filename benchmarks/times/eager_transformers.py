"""Run forwards and backwards of language models in float32 with eager attention and dropout.

The author timed the model's forward and the backward, each from an idle GPU, and not the loss; the cache of the
allocator was emptied before each forward. Gradients add up from step to step:
the optimizer has one small parameter, and only marks where a step ends.
"""

import argparse
import gc

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoModelForPreTraining, BertConfig, GPT2Config, OPTConfig

CONFIGS = {
    "bert-large": BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "gpt2-large": GPT2Config(n_embd=1280, n_layer=36, n_head=20),
    "gpt3-xl": GPT2Config(n_embd=3072, n_layer=24, n_head=24, n_positions=2048),
    "gpt3-2.7b": GPT2Config(n_embd=2560, n_layer=32, n_head=32, n_positions=2048),
    "opt-1.3b": OPTConfig(hidden_size=2048, ffn_dim=8192, num_hidden_layers=24, num_attention_heads=32),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    torch.backends.cudnn.allow_tf32 = False
    config = CONFIGS[args.model]
    kind = AutoModelForPreTraining if args.model == "bert-large" else AutoModelForCausalLM
    with torch.device("cuda"):
        model = kind.from_config(config, attn_implementation="eager").train()
    marks = torch.optim.SGD([next(weight for weight in model.parameters() if weight.dim() == 1)], lr=1e-6)
    tokens = torch.ones(args.batch_size, args.sequence, dtype=torch.int64, device="cuda")

    options = {} if args.model == "bert-large" else {"use_cache": False}
    for _ in range(args.steps):
        gc.collect()
        torch.cuda.empty_cache()
        result = model(tokens, **options)
        torch.cuda.synchronize()
        logits = result["prediction_logits" if args.model == "bert-large" else "logits"]
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), tokens.view(-1))
        del result, logits
        loss.backward()
        del loss
        torch.cuda.synchronize()
        marks.step()

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
