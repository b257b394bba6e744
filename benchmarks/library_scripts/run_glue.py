"""Fine-tune a BERT classifier on sentence pairs, with transformers' Trainer and evaluation."""

import argparse
import tempfile

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


def build_tokenizer(words):
    vocabulary = {word: index for index, word in enumerate([*SPECIAL.values(), *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max_seq_length", type=int, default=128)
    parser.add_argument("--per_device_train_batch_size", type=int, default=32)
    args = parser.parse_args()

    set_seed(42)
    words = [f"word{number}" for number in range(1000)]
    tokenizer = build_tokenizer(words)
    rows = np.random.default_rng(0)

    def sentences(count):
        return [" ".join(rows.choice(words, rows.integers(5, 120))) for _ in range(count)]

    def make(count):
        columns = {"sentence1": sentences(count), "sentence2": sentences(count)}
        return Dataset.from_dict({**columns, "label": rows.integers(0, 2, count)})

    def preprocess(batch):
        length = args.max_seq_length
        return tokenizer(batch["sentence1"], batch["sentence2"], max_length=length, truncation=True)

    train, validation = (make(count).map(preprocess, batched=True) for count in (1600, 160))
    model = AutoModelForSequenceClassification.from_config(BertConfig(num_labels=2))

    def accuracy(predictions):
        return {"accuracy": float((predictions.predictions.argmax(1) == predictions.label_ids).mean())}

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=args.per_device_train_batch_size,
                num_train_epochs=3,
                fp16=True,
                eval_strategy="epoch",
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=train,
            eval_dataset=validation,
            processing_class=tokenizer,
            data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8),
            compute_metrics=accuracy,
        )
        trainer.train()
        print(trainer.evaluate())
    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")


if __name__ == "__main__":
    main()
