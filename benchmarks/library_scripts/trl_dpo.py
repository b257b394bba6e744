"""Preference training of a small GPT-NeoX, with TRL's DPOTrainer and a reference model."""

import argparse
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

WORDS = [f"word{number}" for number in range(1000)]


def build_tokenizer():
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<unk>", "<bos>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
    )


def sentence(start, length):
    return " ".join(WORDS[(start + at) % 1000] for at in range(length))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--hidden_size", type=int, default=1024)
    args = parser.parse_args()

    preferences = Dataset.from_list(
        [
            {
                "prompt": sentence(row, 40),
                "chosen": " " + sentence(row * 3, 60 + row % 90),
                "rejected": " " + sentence(row * 7, 40 + row % 70),
            }
            for row in range(200)
        ]
    )
    config = GPTNeoXConfig(
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=16,
        num_attention_heads=16,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    with tempfile.TemporaryDirectory() as folder:
        trainer = DPOTrainer(
            model=model,
            ref_model=reference,
            args=DPOConfig(
                output_dir=folder,
                beta=args.beta,
                per_device_train_batch_size=args.per_device_train_batch_size,
                gradient_checkpointing=False,
                bf16=True,
                logging_steps=1,
                report_to="none",
            ),
            train_dataset=preferences,
            processing_class=build_tokenizer(),
        )
        trainer.train()
    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
