"""Fine-tune a model of Llama 3.2 3B's size in bfloat16 on random tokens, by an adapter of PEFT.

A batch is padded to its longest sequence, so that attention gets a mask.
"""

import argparse

import torch
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=ADAPTERS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[219, 213, 207, 201], help="of a batch")
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
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model = get_peft_model(model, ADAPTERS[args.method]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    longest = torch.arange(max(args.lengths))

    for _ in range(args.steps):
        tokens = torch.randint(128000, (len(args.lengths), max(args.lengths))).to("cuda")
        mask = (longest < torch.tensor(args.lengths)[:, None]).long().to("cuda")
        labels = tokens.clone()
        for at, length in enumerate(args.lengths):
            labels[at, length + 1 :] = -100
        items = mask.sum().item()
        optimizer.zero_grad()
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels, num_items_in_batch=items).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"loss {loss.item():.4f}")
        loss.item()

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
