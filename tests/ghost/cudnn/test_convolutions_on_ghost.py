"""PyTorch chooses among cuDNN's engine configurations on the ghost as it would on a card."""

import json

import pytest

import memfit

CHOICES = """
import itertools, json
from torch import nn

labels = itertools.count(1)
settings = ("allow_tf32", "deterministic", "benchmark")
defaults = {name: getattr(torch.backends.cudnn, name) for name in settings}

def workspaces(width, **settings):
    "Workspace bytes of a convolution's forward and its two gradients, after PyTorch's choice."
    for name, value in (defaults | settings).items():
        setattr(torch.backends.cudnn, name, value)
    x = torch.zeros(1, 64, 224, width, device="cuda", requires_grad=True)
    layer = nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda()
    for label in itertools.islice(labels, 2):
        before = len(ghost.workspace_uses())
        ghost.set_label(label)  # the log leaves out repetitions under one label
        layer(x).backward(torch.ones_like(x))
        shown = [space.size for space in ghost.workspace_uses()[before:]]
    return shown

def firsts():
    return [answer.configurations[0].workspace for answer in ghost.workspaces._answers.values()]

results = {
    "default": workspaces(224),
    "no TF32": workspaces(224, allow_tf32=False),
    "no TF32, deterministic": workspaces(224, allow_tf32=False, deterministic=True),
}
known = len(firsts())
results["timed"] = workspaces(225, benchmark=True)
results["first of the timed"] = firsts()[known::2]  # every second question asks for the fallbacks
results["version"] = max(answer.version for answer in ghost.workspaces._answers.values())
results["notes"] = list(ghost.workspaces.notes())
print(json.dumps(results))
"""


def test_pytorch_chooses_the_first_engine_that_its_settings_allow(on_ghost):
    results = json.loads(on_ghost(CHOICES).splitlines()[-1])
    if not results["version"]:
        pytest.skip(f"the installed cuDNN cannot be queried: {results['notes']}")
    assert results["timed"] == results["first of the timed"], "all take equally long: the first is chosen"
    assert [provenance for provenance, _ in results["notes"]] == ["simulated", "assumed"]
    assert "benchmark" in results["notes"][1][1]
    if results["version"] != 92_400:
        pytest.skip(f"the figures are those of cuDNN 9.24.0; the installed version is {results['version']}")
    assert results["default"] == [12_992_528, 25_837_584, 28_787_243]
    assert results["no TF32"] == [409_856, 409_856]  # and 0 for the weight gradient, by atomic additions
    assert results["no TF32, deterministic"] == [409_856, 409_856, 288]


POINTWISE = """
import torch
layer = torch.nn.Conv2d(3, 4, 1).cuda()
layer(torch.zeros(6, 3, 6, 6, device="cuda")).sum().backward()
"""


@pytest.mark.process
@pytest.mark.parametrize("gpu", ["H100-80GB", pytest.param("RTX-5090", marks=pytest.mark.slow)])
def test_pytorch_learns_for_which_architecture_a_plans_kernels_are(gpu, tmp_path):
    script = tmp_path / "pointwise.py"
    script.write_text(POINTWISE)
    assert memfit.dry_run(script, gpu=gpu).end.exception == ""
