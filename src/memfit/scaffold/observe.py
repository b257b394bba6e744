"""Watch a script until its first update, and leave the parts of its job in a file.

model = GPT(args.context)                       where it was created, and with which values
optimizer = AdamW(model.parameters(), 3e-4)     its class and settings
loss = model(batch)  ...  loss.backward()       the statements between these two calls
optimizer.step()                                the file is written
"""

import functools
import os
from pathlib import Path

from memfit.patching.after_import import after_import
from memfit.run.output import silence


def install(path: str) -> None:
    """Watch the script of this process.

    Args:
        path: of the file that receives an ``Observation`` as JSON.
    """
    silence()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # PyTorch's own switch: compiled code has no frames
    after_import("torch", functools.partial(_watch, Path(path)))


def _watch(path: Path) -> None:
    from memfit.patching.installed_hooks import InstalledHooks
    from memfit.scaffold.observer import JobObserver

    JobObserver(path).install(InstalledHooks())
