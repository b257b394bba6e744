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
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12, help="of 64 features each")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--evaluate", action="store_true", help="and save, after each epoch")
    args = parser.parse_args()

    set_seed(0)
    if args.model == "bert":
        config = BertConfig(
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            hidden_size=64 * args.heads,
            intermediate_size=256 * args.heads,
        )
        model, classes = BertForSequenceClassification(config), 2
    else:
        config = GPT2Config(n_layer=args.layers, n_head=args.heads, n_embd=64 * args.heads)
        model, classes = GPT2LMHeadModel(config), 0

    def sentences(samples):
        return RandomSentences(samples, args.sequence_length, model.config.vocab_size, classes=classes)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=args.batch_size,
                per_device_eval_batch_size=4 * args.batch_size,
                max_steps=args.steps,
                learning_rate=5e-5,
                bf16=args.bf16,
                logging_steps=1,
                eval_strategy="epoch" if args.evaluate else "no",
                save_strategy="epoch" if args.evaluate else "no",
                report_to="none",
            ),
            train_dataset=sentences(args.samples),
            eval_dataset=sentences(4 * args.samples) if args.evaluate else None,
        )
        trainer.train()

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
