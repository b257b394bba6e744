"""Jobs that are read from scripts: a job's loss on the script's batch is the script's, bit for bit."""

import importlib.util
import runpy
import sys

import pytest
import torch
from msgspec import json

from memfit.patching.installed_hooks import InstalledHooks
from memfit.records import JobObservation
from memfit.scaffold.job_file import text_of_job
from memfit.scaffold.observer import JobObserver

HEAD = """
import argparse
import torch
import torch.nn.functional as F
from contextlib import nullcontext
from dataclasses import dataclass
from torch import nn

class Net(nn.Module):
    def __init__(self, inside, outside=3, *, activation=nn.ReLU):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inside, 8), activation(), nn.Linear(8, outside))

    def forward(self, x, labels=None):
        scores = self.layers(x)
        return scores if labels is None else F.cross_entropy(scores, labels)

def compute_loss(model, batch, smoothing):
    return F.cross_entropy(model(batch["x"]), batch["labels"], label_smoothing=smoothing)

@dataclass
class Config:
    inside: int = 4
    activation: type = nn.ReLU

def build(config):
    return Net(config.inside, activation=config.activation)

seen = {}
"""
BATCH = "x, labels = torch.randn(5, 4), torch.randint(3, (5,))"

LOOPS = {
    "a criterion": f"""
        model, criterion = Net(4), nn.CrossEntropyLoss(label_smoothing=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        {BATCH}
        outputs = model(x)
        optimizer.zero_grad()
        print(outputs.shape)
        loss = criterion(outputs, labels)
        seen.update(batch=(x, labels), loss=loss)
        loss.backward()
        optimizer.step()
        """,
    "the model returns the loss": f"""
        args = argparse.Namespace(width=4)
        net = Net(args.width)
        optimizer = torch.optim.AdamW(net.parameters())
        {BATCH}
        loss = net(x, labels=labels)
        seen.update(batch=(x, labels), loss=loss)
        loss.backward()
        optimizer.step()
        """,
    "autocast and a scale": f"""
        args = argparse.Namespace(fp16=True)
        model, scaler = Net(4), torch.amp.GradScaler("cpu", enabled=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        {BATCH}
        with torch.autocast("cpu", dtype=torch.bfloat16) if args.fp16 else nullcontext():
            outputs = model(x)
            loss = F.cross_entropy(outputs, labels)
        seen.update(batch=(x, labels), loss=loss)
        scaler.scale(loss).backward()
        optimizer.step()
        """,
    "a function that computes the loss, of a dictionary": f"""
        model, smoothing = build(Config(activation=nn.Tanh)), 0.2
        optimizer = torch.optim.Adam(model.parameters())
        {BATCH}
        batch = {{"x": x, "labels": labels}}
        loss = compute_loss(model, batch, smoothing)
        seen.update(batch=batch, loss=loss)
        loss.backward()
        optimizer.step()
        """,
    "what the model needs is made first": f"""
        width, layers = 4, []
        for number in range(3):
            layers.append(nn.Linear(width, 2 * width))
            width *= 2
        layers += [nn.Linear(width, 3)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        {BATCH}
        loss = F.cross_entropy(model(x), labels)
        seen.update(batch=(x, labels), loss=loss)
        loss.backward()
        optimizer.step()
        """,
    "losses that are added up": f"""
        model = Net(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        {BATCH}
        weights = [0.5, 2.0]
        loss = 0
        scores = model(x)
        for weight in weights:
            loss = loss + weight * F.cross_entropy(scores, labels)
        seen.update(batch=(x, labels), loss=loss)
        loss.backward()
        optimizer.step()
        """,
    "all in one statement": f"""
        model = Net(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        {BATCH}
        seen.update(batch=(x, labels), loss=F.cross_entropy(model(x), labels))
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
        """,
    "settings that the script changes, and a loss that it keeps": f"""
        args = argparse.Namespace(wide=True, width=0, text="long " * 99)
        if args.wide:
            args.width = 4
        heads = [nn.Identity() if args.wide else nn.ReLU()]
        model = nn.Sequential(*heads, Net(args.width) if args.wide else Net(9))
        optimizer = torch.optim.SGD(params=model.parameters(), lr=0.1)
        state = argparse.Namespace()
        {BATCH}
        scores, state.loss = model(x), 0
        state.loss = F.cross_entropy(input=scores, target=labels)
        seen.update(batch=(x, labels), loss=state.loss)
        state.loss.backward()
        optimizer.step()
        """,
    "parts are frozen, in bfloat16": f"""
        model = Net(4).to(torch.bfloat16)
        model.layers[0].requires_grad_(False)
        optimizer = torch.optim.SGD((each for each in model.parameters() if each.requires_grad), lr=0.1)
        {BATCH}
        x = x.bfloat16()
        loss = F.cross_entropy(model(x), labels)
        seen.update(batch=(x, labels), loss=loss)
        loss.backward()
        optimizer.step()
        """,
    "a trainer of the script's own": f"""
        class Trainer:
            def __init__(self, model, settings):
                self.model, self.settings = model, settings
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.settings["lr"])

            def step(self, x, labels):
                loss = F.cross_entropy(self.model(x), labels, reduction=self.settings["reduction"])
                seen.update(batch=(x, labels), loss=loss)
                loss.backward()
                self.optimizer.step()

        trainer = Trainer(Net(4), {{"lr": 0.1, "reduction": "sum"}})
        {BATCH}
        trainer.step(x, labels)
        """,
}


def observed(tmp_path, loop):
    """Run a script that ends with a loop, and return what came of watching it, and what it has seen."""
    lines = "\n".join(f"    {line[8:]}" for line in loop.strip("\n").split("\n"))
    script, file = tmp_path / "train.py", tmp_path / "job.json"
    script.write_text(f'{HEAD}\nif __name__ == "__main__":\n{lines}\n')
    hooks = InstalledHooks()
    JobObserver(file).install(hooks)
    try:
        torch.manual_seed(3)
        seen = runpy.run_path(str(script), run_name="__main__")["seen"]
    finally:
        hooks.remove()
    return json.decode(file.read_bytes(), type=JobObservation), seen


@pytest.fixture
def job_file(tmp_path, monkeypatch):
    """Return the function that imports the file of a job, beside its script."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def imported(job):
        path = tmp_path / "job.py"
        path.write_text(text_of_job(job, ["train.py"]))
        spec = importlib.util.spec_from_file_location("job", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.delitem(sys.modules, "train", raising=False)
        spec.loader.exec_module(module)
        return module

    return imported


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_the_job_computes_the_loss_of_the_script(tmp_path, job_file, loop):
    found, seen = observed(tmp_path, loop)
    assert not found.reason

    module = job_file(found.job)
    torch.manual_seed(3)
    job = module.make_job()

    assert torch.equal(job.loss(job.model, seen["batch"]), seen["loss"])
    assert job.loss(job.model, module.batch(7)).requires_grad


def test_settings_of_the_optimizer_and_the_norm_of_gradients(tmp_path, job_file):
    found, _ = observed(
        tmp_path,
        f"""
        model = Net(4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.8, 0.9), fused=True)
        {BATCH}
        F.cross_entropy(model(x), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        """,
    )
    job = job_file(found.job).make_job()
    group = job.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["fused"], job.max_grad_norm) == (2e-3, (0.8, 0.9), True, 0.5)
    assert group["weight_decay"] == 0.01


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("model.layers[0].weight.grad.add_(1.0)", True),
        ("nn.utils.clip_grad_value_(model.parameters(), 0.1)", True),
        ("nn.utils.clip_grad_norm_(model.parameters(), 0.1)", False),
    ],
)
def test_a_loop_that_changes_gradients_is_named(tmp_path, line, changes):
    found, _ = observed(
        tmp_path,
        f"""
        model = Net(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        {BATCH}
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        {line}
        optimizer.step()
        """,
    )
    assert any("The script changes gradients" in each for each in found.job.open) is changes


def test_the_learning_rate_is_that_before_a_scheduler_warms_up(tmp_path, job_file):
    found, _ = observed(
        tmp_path,
        f"""
        model = Net(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.001)
        {BATCH}
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
        """,
    )
    assert job_file(found.job).make_job().optimizer.param_groups[0]["lr"] == 1.0


def test_numbers_stay_below_what_they_are_used_for(tmp_path, job_file):
    found, _ = observed(
        tmp_path,
        """
        model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(24, 9))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        words, labels, shares = torch.randint(50, (2, 6)), torch.randint(9, (2,)), torch.rand(2)
        scores = model(words)
        loss = F.nll_loss(scores, target=labels) + F.binary_cross_entropy(scores[:, 0].sigmoid(), shares)
        loss.backward()
        optimizer.step()
        """,
    )
    assert found.job.batch == "torch.randint(50, (size, 6)), torch.randint(9, (size,)), torch.rand(size)"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("loss = F.cross_entropy(model(x), labels) / 4", "divided"),
        ("torch.optim.lr_scheduler.StepLR(optimizer, 3); loss = model(x).sum()", "a StepLR"),
        ("weights = torch.ones(3); loss = F.cross_entropy(model(x), labels, weights)", "If weights is not"),
        ("hook = object(); loss = model(x).sum() + (0 if hook else 1)", "Define hook (a object)"),
    ],
)
def test_what_is_left_to_the_user_is_named(tmp_path, line, said):
    found, _ = observed(
        tmp_path,
        f"""
        model = Net(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        {BATCH}
        {line}
        loss.backward()
        optimizer.step()
        """,
    )
    assert any(said in each for each in found.job.open)
    assert said in text_of_job(found.job, ["train.py"]).replace("\n  ", " ")


def test_a_script_with_two_optimizers_is_refused(tmp_path):
    found, _ = observed(
        tmp_path,
        f"""
        model = Net(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other = torch.optim.SGD(model.layers[0].parameters(), lr=0.1)
        {BATCH}
        model(x).sum().backward()
        optimizer.step()
        """,
    )
    assert found.job is None
    assert "memfit saw 1 and 2" in found.reason
