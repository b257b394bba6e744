"""QLoRA: a Llama with 4-bit weights, LoRA adapters and a paged 8-bit AdamW, with TRL's SFTTrainer."""

import argparse
import tempfile

import torch
from bitsandbytes.nn import Linear4bit
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = [f"word{number}" for number in range(1000)]


def build_tokenizer():
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<unk>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )


def quantize(module):
    """Replace every linear layer of the decoder by a 4-bit one, as loading a checkpoint in 4 bits does."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear):
            replacement = Linear4bit(
                child.in_features,
                child.out_features,
                bias=child.bias is not None,
                compute_dtype=torch.bfloat16,
                compress_statistics=True,
                quant_type="nf4",
            )
            replacement.load_state_dict(child.state_dict())
            setattr(module, name, replacement)
        else:
            quantize(child)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    args = parser.parse_args()

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    quantize(model.model)
    model = model.to("cuda")
    model.is_loaded_in_4bit = True
    model = prepare_model_for_kbit_training(model)
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, adapters)
    model.print_trainable_parameters()

    texts = [" ".join(WORDS[(row * 13 + at) % 1000] for at in range(100 + row)) for row in range(300)]
    with tempfile.TemporaryDirectory() as folder:
        options = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=args.per_device_train_batch_size,
            optim="paged_adamw_8bit",
            gradient_checkpointing=True,
            max_length=512,
            bf16=True,
            logging_steps=1,
            report_to="none",
        )
        data = Dataset.from_dict({"text": texts})
        trainer = SFTTrainer(
            model=model, args=options, train_dataset=data, processing_class=build_tokenizer()
        )
        trainer.train()
    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
