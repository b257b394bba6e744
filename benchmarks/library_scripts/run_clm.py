"""Train a GPT-2 from scratch on blocks of text, with transformers' Trainer."""

import argparse
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


def build_tokenizer(texts):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=["<unk>", "<eos>"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block_size", type=int, default=1024)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--max_steps", type=int, default=50)
    args = parser.parse_args()

    set_seed(42)
    words = [f"word{number}" for number in range(500)]
    texts = [" ".join(words[(line * 7 + at) % 500] for at in range(200)) for line in range(400)]
    tokenizer = build_tokenizer(texts)
    raw = Dataset.from_dict({"text": texts})
    tokenized = raw.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])

    def group_texts(rows):
        joined = {name: sum(rows[name], []) for name in ("input_ids", "attention_mask")}
        length = len(joined["input_ids"]) // args.block_size * args.block_size
        blocks = {
            name: [ids[at : at + args.block_size] for at in range(0, length, args.block_size)]
            for name, ids in joined.items()
        }
        blocks["labels"] = [list(ids) for ids in blocks["input_ids"]]
        return blocks

    train = tokenized.map(group_texts, batched=True, remove_columns=tokenized.column_names)
    model = AutoModelForCausalLM.from_config(GPT2Config())
    print(f"{sum(one.numel() for one in model.parameters()):,} parameters, {len(train)} blocks")

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=args.per_device_train_batch_size,
                max_steps=args.max_steps,
                bf16=True,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=train,
            processing_class=tokenizer,
            data_collator=default_data_collator,
        )
        trainer.train()
    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
