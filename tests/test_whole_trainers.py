"""`memfit dry-run --whole` on the training loops of libraries, against runs of the same scripts in full."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.warm]

TRANSFORMERS = (Path(__file__).parents[1] / "examples" / "hf_trainer.py").read_text()
LIGHTNING = """
import sys
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

samples, epochs = map(int, sys.argv[1:])


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256))
        self.head = nn.Linear(256, 10)

    def training_step(self, batch, index):
        return self.loss(*batch)

    def validation_step(self, batch, index):
        self.log("validation loss", self.loss(*batch))

    def loss(self, inputs, labels):
        return nn.functional.cross_entropy(self.head(self.features(inputs)), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def loader(samples, batch_size):
    return DataLoader(TensorDataset(torch.randn(samples, 64), torch.randint(10, (samples,))), batch_size)


fast = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(accelerator="gpu", devices=1, max_epochs=epochs, default_root_dir=".", **fast)
trainer.fit(Classifier(), loader(samples, 32), loader(64 * samples, 2048))
"""
FIGURES = ("name", "times", "allocated", "reserved", "process", "phase", "module", "line", "leaves")


def figures(run):
    return [{name: stage[name] for name in FIGURES} for stage in run.answer["stages"]]


def shortened(dry_run, script, arguments, full):
    """Return a shortened run, after comparing it with a run in full whose arguments make it as short."""
    short = dry_run(script, *arguments, options=("--whole",))
    in_full = dry_run(script, *full, options=("--to-end",))
    assert figures(short) == figures(in_full)
    assert short.answer["steps"] == in_full.answer["steps"] == 6
    assert short.answer["peak"] == in_full.answer["peak"]
    assert in_full.answer["shortened"] == []
    return short


def options(run):
    return {each["where"]: (each["to"], each["of"]) for each in run.answer["shortened"]}


def worst(run):
    stage = max(run.answer["stages"], key=lambda stage: stage["allocated"])
    return stage["name"], stage["module"], Path(stage["line"]).name


def line_of(script, text):
    (number,) = (number for number, line in enumerate(script.splitlines(), 1) if text in line)
    return f"script.py:{number}"


@pytest.mark.slow
def test_a_trainer_of_transformers_evaluates_and_saves(dry_run):
    small = ["--layers", "1", "--heads", "1", "--sequence-length", "64", "--batch-size", "2", "--evaluate"]
    full = (*small, "--samples", "6", "--steps", "6")
    run = shortened(dry_run, TRANSFORMERS, small, full)
    assert [stage["name"] for stage in run.answer["stages"]] == ["setup", "training", "evaluation", "saving"]
    assert [stage["times"] for stage in run.answer["stages"]] == [1, 2, 2, 2]
    embedding = "bert.embeddings.word_embeddings"  # its gradient
    assert worst(run) == ("training", embedding, line_of(TRANSFORMERS, "trainer.train()"))
    assert options(run)["TrainingArguments.max_steps"] == (6, 20)
    assert "TrainingArguments.max_steps 6 of 20" in run.out


@pytest.mark.slow
def test_a_fit_of_lightning_validates_and_saves(dry_run):
    run = shortened(dry_run, LIGHTNING, ("4096", "50"), ("96", "2"))
    # It validates two batches before it trains.
    assert [stage["name"] for stage in run.answer["stages"]] == ["setup", "evaluation", "training", "saving"]
    assert [stage["times"] for stage in run.answer["stages"]] == [1, 3, 2, 2]
    assert worst(run) == ("evaluation", "features.1", line_of(LIGHTNING, "self.head(self.features"))
    assert options(run)["Trainer.max_epochs"] == (2, 50)
    assert "MiB behind" not in run.out  # cuBLAS's workspace stays, which the training uses as well
