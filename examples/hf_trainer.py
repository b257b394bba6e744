"""Train a BERT classifier, or GPT-2, from a local configuration with transformers' Trainer."""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)


class RandomSentences(Dataset):
    def __init__(self, length, sequence_length, vocabulary, *, classes):
        self.tokens = torch.randint(vocabulary, (length, sequence_length))
        self.labels = torch.randint(classes, (length,)) if classes else self.tokens

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": self.labels[index]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["bert", "gpt2"], default="bert")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()

    set_seed(0)
    if args.model == "bert":
        model, classes = BertForSequenceClassification(BertConfig()), 2
    else:
        model, classes = GPT2LMHeadModel(GPT2Config()), 0
    dataset = RandomSentences(1000, args.sequence_length, model.config.vocab_size, classes=classes)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=args.batch_size,
                max_steps=args.steps,
                learning_rate=5e-5,
                bf16=args.bf16,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=dataset,
        )
        trainer.train()

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
