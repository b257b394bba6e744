"""Run the examples of some trainers in one process: `run_trainers.py FILE NAME...` writes what they train."""

import os
import runpy
import sys
import tempfile
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"

if __name__ == "__main__":
    file, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    sys.path.insert(0, str(EXAMPLES))
    os.chdir(tempfile.mkdtemp())
    models = {name: runpy.run_path(str(EXAMPLES / f"with_{name}.py"))["model"] for name in names}
    torch.save({name: model.state_dict() for name, model in models.items()}, file)
