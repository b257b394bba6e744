"""Two ranks of Accelerate or Lightning train as one process: partial windows and token weights included."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.process, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"
SCRIPT = """
import os, runpy, sys
sys.path.insert(0, {examples!r})
import language_model, torch
language_model.samples.__defaults__ = (16, 32)  # 8 batches
language_model.PLAN = language_model.PLAN | {{"batches_per_update": {batches}}}
model = runpy.run_path({script!r})["model"]
if os.environ.get("RANK", "0") == "0":
    torch.save(getattr(model, "module", model).state_dict(), "trained.pt")
"""
SAMPLER = "torch.utils.data.DistributedSampler(samples(), 2, int(__import__('os').environ['RANK']), False)"
ON_TWO_RANKS = {
    "accelerate": {"Accelerator(PLAN": "Accelerator(PLAN, cpu=True"},
    "lightning": {
        "batch_size=2": f"batch_size=2, sampler={SAMPLER}",  # Lightning's own shuffles
        "Trainer(": "Trainer(accelerator='cpu', devices=2, strategy='ddp', use_distributed_sampler=False, ",
    },
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def train(folder, script, batches, *launcher):
    """Return the parameters that an example trains, with so many batches for each update."""
    folder.mkdir()
    text = SCRIPT.format(examples=str(EXAMPLES), script=str(script), batches=batches)
    (folder / "script.py").write_text(text)
    command = [sys.executable, *launcher, "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "trained.pt")


@pytest.mark.parametrize("trainer", ON_TWO_RANKS)
def test_two_ranks_train_as_one_process_on_the_data_of_both(tmp_path, trainer):
    alone = train(tmp_path / "alone", EXAMPLES / "with_engine.py", 6)
    script = tmp_path / "ranks.py"
    text = (EXAMPLES / f"with_{trainer}.py").read_text()
    for on_one, on_two in ON_TWO_RANKS[trainer].items():
        text = text.replace(on_one, on_two)
    script.write_text(text)
    together = train(tmp_path / "together", script, 3, *TORCHRUN)
    assert together.keys() == alone.keys()
    for name, parameter in alone.items():
        torch.testing.assert_close(together[name], parameter, rtol=0, atol=2.4e-7, msg=name)
