"""Peaks of two small networks, plain and checkpointed: equal to the byte to those of a real GPU.

They depend on one assumed size, the workspace of a 64-to-64-channel weight gradient (ghost/workspaces.toml);
all other bytes are PyTorch's own.
"""

import json
import re
from pathlib import Path

import pytest

from support import warm_process

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parents[1] / "examples" / "small_checkpointed.py"

# MiB of max_memory_allocated: input 1x3x224x224, each network is built while the previous one is alive.
# Published with an article on checkpointing small networks; card and versions are not stated.
PUBLISHED = {
    ("residual", "plain"): 180.2099609375,
    ("residual", "checkpointed, non-reentrant"): 157.41796875,
    ("residual", "checkpointed, reentrant"): 169.9501953125,
    ("straight", "plain"): 130.78662109375,
    ("straight", "checkpointed, non-reentrant"): 131.64794921875,
    ("straight", "checkpointed, reentrant"): 143.89794921875,
}


@pytest.mark.parametrize("variant", ["non-reentrant", "reentrant"])
@pytest.mark.parametrize("network", ["residual", "straight"])
def test_peaks_equal_the_published_ones(network, variant, tmp_path):
    options = ["--network", network, *["--reentrant"] * (variant == "reentrant")]
    command = ("dry-run", "--workspaces", "rules", "--json", "answer.json", SCRIPT, *options)
    done = warm_process.memfit(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    peaks = dict(re.findall(r"^(plain|checkpointed) +([\d.]+) MiB$", done.stdout, re.MULTILINE))
    assert float(peaks["plain"]) == PUBLISHED[network, "plain"]
    assert float(peaks["checkpointed"]) == PUBLISHED[network, f"checkpointed, {variant}"]
    terms = {term["name"]: term for term in json.loads((tmp_path / "answer.json").read_text())["terms"]}
    assert terms["workspaces"]["bytes"] == 58_720_256
    assert terms["workspaces"]["provenance"] == "assumed"
