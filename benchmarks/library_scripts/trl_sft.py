"""Supervised fine-tuning of a small Llama on conversations, with TRL's SFTTrainer."""

import argparse
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

TEMPLATE = (
    "{% for message in messages %}<user> {{ message['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<user> {% endif %}"
)


def build_tokenizer(words):
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<unk>", "<eos>", "<user>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        chat_template=TEMPLATE,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--max_length", type=int, default=512)
    args = parser.parse_args()

    words = [f"word{number}" for number in range(1000)]
    tokenizer = build_tokenizer(words)
    texts = [" ".join(words[(row * 13 + at) % 1000] for at in range(50 + row % 400)) for row in range(200)]
    turns = [
        [{"role": "user", "content": text[:200]}, {"role": "assistant", "content": text}] for text in texts
    ]
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)

    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=args.per_device_train_batch_size,
                gradient_accumulation_steps=args.gradient_accumulation_steps,
                gradient_checkpointing=True,
                max_length=args.max_length,
                bf16=True,
                logging_steps=1,
                report_to="none",
            ),
            train_dataset=Dataset.from_dict({"messages": turns}),
            processing_class=tokenizer,
        )
        trainer.train()
    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
