"""memfit's own loop: what the other scripts of this folder are compared with."""

import torch
from language_model import PLAN, LanguageModel, samples, tokens

import memfit

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = LanguageModel().to(device)
engine = memfit.Engine(
    model,
    PLAN,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    loss=lambda model, batch: ((loss := model(**to_device(batch))["loss"]) * (count := tokens(batch)), count),
)


def to_device(batch):
    return {name: tensor.to(device) for name, tensor in batch.items()}


engine.fit(torch.utils.data.DataLoader(samples(), batch_size=2))
