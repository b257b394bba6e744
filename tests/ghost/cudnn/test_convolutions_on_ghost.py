"""What PyTorch makes of cuDNN's offers on the ghost: it chooses among them as it would on a card."""

import json

import pytest

CHOICES = """
import itertools, json
from torch import nn

labels = itertools.count(1)
settings = ("allow_tf32", "deterministic", "benchmark")
defaults = {name: getattr(torch.backends.cudnn, name) for name in settings}

def worked_in(width, **settings):
    "Bytes that a convolution's forward and its two gradients work in, once chosen."
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

told = {
    "default": worked_in(224),
    "no TF32": worked_in(224, allow_tf32=False),
    "neither TF32 nor chance": worked_in(224, allow_tf32=False, deterministic=True),
}
known = len(firsts())
told["timed"] = worked_in(225, benchmark=True)
told["first of the timed"] = firsts()[known::2]  # each is asked with the fallbacks behind it
told["version"] = max(answer.version for answer in ghost.workspaces._answers.values())
told["notes"] = list(ghost.workspaces.notes())
print(json.dumps(told))
"""


def test_pytorch_takes_the_first_that_its_own_settings_allow(on_ghost):
    told = json.loads(on_ghost(CHOICES).splitlines()[-1])
    if not told["version"]:
        pytest.skip(f"the installed cuDNN cannot be asked: {told['notes']}")
    assert told["timed"] == told["first of the timed"], "what takes as long as any is the first"
    assert [provenance for provenance, _ in told["notes"]] == ["simulated", "assumed"]
    assert "benchmark" in told["notes"][1][1]
    if told["version"] != 92_400:
        pytest.skip(f"the figures are those of cuDNN 9.24.0; here it is {told['version']}")
    assert told["default"] == [12_992_528, 25_837_584, 28_787_243]
    assert told["no TF32"] == [409_856, 409_856]  # and 0 for the weight gradient, by atomic additions
    assert told["neither TF32 nor chance"] == [409_856, 409_856, 288]
