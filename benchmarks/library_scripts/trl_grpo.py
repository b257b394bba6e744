"""Reinforcement learning of a small Qwen2 from a length reward, with TRL's GRPOTrainer."""

import argparse
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from trl import GRPOConfig, GRPOTrainer

WORDS = [f"word{number}" for number in range(1000)]


def build_tokenizer():
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<unk>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )


def reward_length(completions, **kwargs):
    return [-abs(40.0 - len(completion.split())) for completion in completions]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_generations", type=int, default=4)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--max_completion_length", type=int, default=64)
    args = parser.parse_args()

    prompts = [" ".join(WORDS[(row * 11 + at) % 1000] for at in range(20 + row % 20)) for row in range(100)]
    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward_length,
            args=GRPOConfig(
                output_dir=folder,
                num_generations=args.num_generations,
                per_device_train_batch_size=args.per_device_train_batch_size,
                max_completion_length=args.max_completion_length,
                bf16=True,
                logging_steps=1,
                report_to="none",
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=build_tokenizer(),
        )
        trainer.train()
    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
