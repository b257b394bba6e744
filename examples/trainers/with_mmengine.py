"""A runner of MMEngine, under a plan."""

import torch
from language_model import PLAN, LanguageModel, samples, tokens
from mmengine.model import BaseModel
from mmengine.runner import Runner

import memfit


class MMLanguageModel(LanguageModel, BaseModel):
    def forward(self, mode, **batch):
        return super().forward(**batch)


torch.manual_seed(0)
model, hook = MMLanguageModel(), memfit.mmengine.BatchWeightHook(tokens)
loader = torch.utils.data.DataLoader(samples(), batch_size=2)
wrapper = dict(type="PlanOptimWrapper", plan=PLAN, optimizer=dict(type="SGD", lr=0.1, momentum=0.9))
epochs = dict(by_epoch=True, max_epochs=1)
Runner(model, "output", loader, train_cfg=epochs, optim_wrapper=wrapper, custom_hooks=[hook]).train()
