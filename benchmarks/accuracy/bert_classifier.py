"""Fine-tune a BERT-large classifier with the transformers Trainer on random sequences of 512 tokens.

``--as-in-2022`` restores three behaviours of January 2022: ``zero_grad`` fills gradients with zeros (PyTorch
before 2.0), softmax saves its input as well as its output (before 1.11, pytorch/pytorch#65242), and AdamW
updates the parameters one by one.
"""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import (
    AttentionInterface,
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)


class Sequences(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        return {"input_ids": torch.randint(100, 30000, (512,)), "labels": torch.tensor(0)}


class OldSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores):
        probabilities = scores.softmax(-1)
        ctx.save_for_backward(scores, probabilities)
        return probabilities

    @staticmethod
    def backward(ctx, gradient):
        _, probabilities = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, probabilities, -1, torch.float32)


def old_attention(module, query, key, value, mask, scaling=None, dropout=0.0, **_):
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if mask is not None:
        scores = scores + mask
    # Autocast used to pass softmax a float32 copy, and softmax saved that copy.
    weights = torch.nn.functional.dropout(OldSoftmax.apply(scores.float()), dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class OldClassifier(BertForSequenceClassification):
    def zero_grad(self, set_to_none=False):
        super().zero_grad(set_to_none=set_to_none)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--adafactor", action="store_true")
    parser.add_argument("--as-in-2022", action="store_true", dest="old")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    AttentionInterface.register("old", old_attention)
    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    config._attn_implementation = "old" if args.old else "eager"
    model = (OldClassifier if args.old else BertForSequenceClassification)(config).to("cuda")
    adamw = None
    if not args.adafactor:
        adamw = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0, foreach=not args.old)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=args.batch_size,
            gradient_accumulation_steps=args.accumulation,
            gradient_checkpointing=args.checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": True},
            fp16=args.fp16,
            optim="adafactor",
            max_steps=args.steps,
            save_strategy="no",
            report_to="none",
        )
        Trainer(model=model, args=settings, train_dataset=Sequences(), optimizers=(adamw, None)).train()

    print(f"peak allocated {torch.cuda.max_memory_allocated():,} B")
    print(f"peak reserved {torch.cuda.max_memory_reserved():,} B")


if __name__ == "__main__":
    main()
