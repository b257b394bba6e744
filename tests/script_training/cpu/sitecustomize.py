"""The CPU stands in for CUDA devices in each Python process whose ``PYTHONPATH`` contains this folder.

At its end, a process with ``MEMFIT_TEST_DIGEST`` writes a digest of what its optimizers have trained to the
file of that name.
"""

import atexit
import hashlib
import os
import sys
from pathlib import Path

from memfit.patching.after_import import call_after_import

TRAINED = []


def begin():
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from memfit.patching.installed_hooks import InstalledHooks
    from memfit.verification.make_runs_comparable import install_cpu_stand_in

    install_cpu_stand_in(InstalledHooks())
    register_optimizer_step_post_hook(note)
    torch.manual_seed(0)
    torch.set_num_threads(1)


def note(optimizer, *_):
    if not any(optimizer is each for each in TRAINED):
        TRAINED.append(optimizer)


def write_digest():
    digest = hashlib.sha256()
    for optimizer in TRAINED:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                torch = sys.modules["torch"]
                content = parameter.detach().contiguous().reshape(-1).view(torch.uint8)
                digest.update(content.numpy().tobytes())
    Path(os.environ["MEMFIT_TEST_DIGEST"]).write_text(f"{len(TRAINED)} {digest.hexdigest()}")


if os.environ.get("MEMFIT_TEST_DIGEST"):
    call_after_import("torch", begin)
    atexit.register(write_digest)
