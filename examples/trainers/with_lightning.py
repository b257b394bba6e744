"""A LightningModule, under a plan."""

import torch
from language_model import PLAN, LanguageModel, samples, tokens
from lightning.pytorch import LightningModule, Trainer

import memfit


class LitLanguageModel(LanguageModel, LightningModule):
    def training_step(self, batch):
        return self(**batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


torch.manual_seed(0)
model, loader = LitLanguageModel(), torch.utils.data.DataLoader(samples(), batch_size=2)
arguments = memfit.lightning.arguments(PLAN, weight=tokens)
Trainer(max_epochs=1, logger=False, enable_checkpointing=False, **arguments).fit(model, loader)
