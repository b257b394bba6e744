"""HuggingFace's Trainer, under a plan."""

import torch
from language_model import PLAN, LanguageModel, samples
from transformers import Trainer, TrainingArguments

import memfit

torch.manual_seed(0)
model = LanguageModel()
arguments = TrainingArguments(
    "trainer-output", num_train_epochs=1, per_device_train_batch_size=2, train_sampling_strategy="sequential",
    lr_scheduler_type="constant", save_strategy="no", report_to=[], **memfit.transformers.arguments(PLAN),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
callbacks = [memfit.transformers.PlanTrainerCallback(PLAN)]
Trainer(model, arguments, None, samples(), callbacks=callbacks, optimizers=(optimizer, None)).train()
