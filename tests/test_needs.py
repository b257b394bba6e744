"""What a script needs is the smallest GPU on which it runs, whichever GPU it ran on."""

import json
from pathlib import Path

import pytest

from memfit.units import GIB, MIB
from support.warm_process import memfit

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = (
    "mlp.py",
    "gan.py",
    "gpt.py",
    "lstm.py",
    "unet.py",
    "vit_l16.py",
    "resnet50.py",
    "hf_trainer.py",
    "accumulation.py",
    "amp_gradscaler.py",
)
IN_CI = {"gan.py"}
"""One that is quick; `make test-slow` runs the others."""
GPUS = (4, 8, 24, 80)


def needed(script, memory):
    done = memfit("dry-run", "--memory", memory, "--json", "-", EXAMPLES / script)
    found = json.loads(done.stdout)
    return found["verdict"], found["needs"]["bytes"], found["peak"]["process"]


@pytest.mark.parametrize(
    "script", [pytest.param(each, marks=[pytest.mark.slow] * (each not in IN_CI)) for each in SCRIPTS]
)
def test_a_script_needs_the_same_on_every_gpu(script):
    runs = [needed(script, f"{gibibytes}GiB") for gibibytes in GPUS]
    needs = [each for _, each, _ in runs]
    assert max(needs) - min(needs) <= 2 * MIB, needs
    for gibibytes, (verdict, each, takes) in zip(GPUS, runs, strict=True):
        fits = verdict in ("fits", "tight")
        assert fits is (each <= gibibytes * GIB)
        assert each <= takes or not fits
    # It runs on a GPU that has what it needs, and takes all of it.
    verdict, same, takes = needed(script, needs[-1])
    assert verdict in ("fits", "tight")
    assert takes == same == needs[-1]
