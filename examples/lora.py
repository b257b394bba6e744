"""Fine-tune a small Llama with LoRA, or with QLoRA: its weights in 4 bits and a paged 8-bit AdamW."""

import argparse
import tempfile

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig


def save_pretrained(folder):
    """Stand in for a download: random weights."""
    config = LlamaConfig(
        vocab_size=16_000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--four-bit", action="store_true")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    torch.manual_seed(0)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            device_map={"": 0},
            quantization_config=quantization if args.four_bit else None,
        )
    print(f"loaded {torch.cuda.memory_allocated():,} B")
    if args.four_bit:
        model = prepare_model_for_kbit_training(model)
    lora = LoraConfig(r=args.rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = (bnb.optim.PagedAdamW8bit if args.four_bit else torch.optim.AdamW)(parameters, lr=2e-4)

    model.train()
    for step in range(args.steps):
        tokens = torch.randint(16_000, (args.batch_size, args.sequence_length), device="cuda")
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
