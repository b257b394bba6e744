"""Fine-tune a model of Llama 3.2 3B's size in bfloat16 on random tokens, in full or by an adapter of PEFT."""

import argparse

import torch
import torch.nn.functional as F
from peft import (
    IA3Config,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PromptTuningConfig,
    RoadConfig,
    VeraConfig,
    get_peft_model,
)
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

MLP = ["gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "lora": LoraConfig(task_type="CAUSAL_LM", r=32, lora_alpha=64),
    "lora-mlp": LoraConfig(task_type="CAUSAL_LM", r=10, lora_alpha=20, target_modules=MLP),
    "dora": LoraConfig(task_type="CAUSAL_LM", r=32, lora_alpha=64, use_dora=True),
    "ia3": IA3Config(),
    "loha": LoHaConfig(r=32, alpha=64, target_modules=["q_proj", "v_proj"]),
    "oft": OFTConfig(r=32, oft_block_size=0, target_modules=["q_proj", "v_proj"]),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=200),
    "road": RoadConfig(variant="road_2", group_size=64),
    "vera": VeraConfig(r=256, vera_dropout=0.0, d_initial=0.1, save_projection=True),
}


def summed_loss(logits, targets):
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=["full", *ADAPTERS])
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=210)
    parser.add_argument("--compile", action="store_true", help="every layer, and the loss")
    parser.add_argument("--chunked-loss", action="store_true", help="of 8 chunks")
    parser.add_argument("--checkpointing", action="store_true", help="of every layer")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        tie_word_embeddings=True,
        use_cache=args.method != "full",  # transformers' default, with which layers copy keys and values
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    full = args.method == "full"
    if not full:
        model = get_peft_model(model, ADAPTERS[args.method])
    model.train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.1, fused=full or None)
    loss_of, chunks = summed_loss, 8 if args.chunked_loss else 1
    if args.checkpointing:
        for layer in model.model.layers:
            layer.forward = checkpointed(layer.forward)
    if args.compile:
        for layer in model.model.layers:
            layer.compile()
        loss_of = torch.compile(loss_of)

    for _ in range(args.steps):
        tokens = torch.randint(128000, (args.batch_size, args.sequence)).to("cuda")
        labels = tokens.clone()
        optimizer.zero_grad()
        if full:
            hidden = model.model(input_ids=tokens).last_hidden_state
            logits = [model.lm_head(few) for few in hidden.flatten(0, 1).chunk(chunks)]
            if chunks == 1:
                logits = [logits[0].float()]
            targets = labels.roll(-1, 1).flatten().chunk(chunks)
            loss = sum(loss_of(*few) for few in zip(logits, targets)) / labels.numel()
            del hidden, logits
        else:
            mask = torch.ones_like(tokens)
            items = mask.sum().item()
            loss = model(
                input_ids=tokens,
                attention_mask=mask,
                labels=labels,
                num_items_in_batch=items,
            ).loss
        loss.backward()
        if not full:
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        print(f"loss {loss.item():.4f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


def checkpointed(forward):
    return lambda *inputs, **options: checkpoint(forward, *inputs, use_reentrant=False, **options)


if __name__ == "__main__":
    main()
