"""A loop of HuggingFace Accelerate, under a plan."""

import torch
from language_model import PLAN, LanguageModel, samples, tokens

import memfit

torch.manual_seed(0)
accelerator = memfit.accelerate.Accelerator(PLAN)
model = LanguageModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = torch.utils.data.DataLoader(samples(), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch)["loss"], weight=tokens(batch))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
