"""Run forwards and backwards of language models in float32 with eager attention and dropout.

NeuSight's author timed the model's forward and the backward, each from an idle GPU, and not the loss; the
allocator's cache was emptied before each forward. Gradients add up from step to step: the optimizer has one small
parameter, and only marks where a step ends. With ``--half``, as Hugging Face timed its attention: weights in
float16, the sum of the logits as loss, gradients cleared in each step, and the results of the last step alive.
Attention is that of transformers 4.38 to 4.45: OPT's copies its inputs and bounds its scores, GPT-2's masks by
``where``, BERT's adds a mask of zeros.
"""

import argparse
import gc
from functools import cache

import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoModelForPreTraining,
    BertConfig,
    GPT2Config,
    OPTConfig,
)
from transformers.masking_utils import AttentionMaskInterface, eager_mask

CONFIGS = {
    "bert-base": BertConfig(),
    "bert-large": BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "gpt2-large": GPT2Config(n_embd=1280, n_layer=36, n_head=20),
    "gpt3-xl": GPT2Config(n_embd=3072, n_layer=24, n_head=24, n_positions=2048),
    "gpt3-2.7b": GPT2Config(n_embd=2560, n_layer=32, n_head=32, n_positions=2048),
    "opt-350m": OPTConfig(
        hidden_size=1024,
        ffn_dim=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        word_embed_proj_dim=512,
        do_layer_norm_before=False,
    ),
    "opt-1.3b": OPTConfig(hidden_size=2048, ffn_dim=8192, num_hidden_layers=24, num_attention_heads=32),
}


def opt_attention(module, query, key, value, mask, scaling, dropout, **options):
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    if mask is None:
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
        return found.transpose(1, 2).contiguous(), None
    scores = query @ key.transpose(-1, -2) + mask
    least = torch.tensor(torch.finfo(scores.dtype).min, device=scores.device)
    weights = F.softmax(torch.max(scores, least), dim=-1, dtype=torch.float32).to(query.dtype)
    return (F.dropout(weights, dropout) @ value).transpose(1, 2), weights


@cache
def causal_mask(length):
    return torch.ones(length, length, dtype=torch.bool, device="cuda").tril()


def gpt2_attention(module, query, key, value, mask, scaling, dropout, **options):
    scores = query @ key.transpose(-1, -2)
    root, least = (
        torch.full([], number, dtype=scores.dtype, device=scores.device)
        for number in (value.shape[-1] ** 0.5, torch.finfo(scores.dtype).min)
    )
    scores = torch.where(causal_mask(scores.shape[-1]), scores / root, least)
    weights = F.dropout(scores.softmax(-1), dropout)
    return (weights @ value).transpose(1, 2), weights


@cache
def zeros(batch, length, dtype):
    return torch.zeros(batch, 1, 1, length, dtype=dtype, device="cuda")


def bert_attention(module, query, key, value, mask, scaling, dropout, **options):
    scores = query @ key.transpose(-1, -2) / value.shape[-1] ** 0.5
    scores = scores + zeros(len(scores), scores.shape[-1], scores.dtype)
    weights = F.dropout(scores.softmax(-1), dropout)
    return (weights @ value).transpose(1, 2), weights


ATTENTION = {"bert": bert_attention, "gpt2": gpt2_attention, "gpt3": gpt2_attention, "opt": opt_attention}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--half", action="store_true", help="as Hugging Face timed it")
    parser.add_argument("--attention", choices=["eager", "sdpa"], default="eager")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    torch.backends.cudnn.allow_tf32 = False
    config = CONFIGS[args.model]
    kind = AutoModelForPreTraining if args.model == "bert-large" else AutoModelForCausalLM
    attention = args.attention
    family = args.model.split("-")[0]
    if attention == "eager" or family == "opt":
        mask = eager_mask if family == "opt" and attention == "eager" else lambda *args, **options: None
        attention = "of_2024"
        AttentionInterface.register(attention, ATTENTION[family])
        AttentionMaskInterface.register(attention, mask)
    with torch.device("cuda"):
        model = kind.from_config(config, attn_implementation=attention).train()
    if args.half:
        model.half()
    marks = torch.optim.SGD([next(weight for weight in model.parameters() if weight.dim() == 1)], lr=1e-6)
    tokens = torch.ones(args.batch_size, args.sequence, dtype=torch.int64, device="cuda")

    options = {} if args.model == "bert-large" else {"use_cache": False}
    for _ in range(args.steps):
        if args.half:
            model.zero_grad()
        else:
            gc.collect()
            torch.cuda.empty_cache()
        result = model(tokens, **options)
        if not args.half:
            torch.cuda.synchronize()
        logits = result["prediction_logits" if args.model == "bert-large" else "logits"]
        if args.half:
            loss = logits.sum()
        else:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), tokens.view(-1))
            del result, logits
        loss.backward()
        if not args.half:
            del loss
            torch.cuda.synchronize()
        marks.step()

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
