"""Run the examples of some trainers in one process: `run_trainers.py FILE NAME...`.

Writes what each has trained, and the most bytes that PyTorch allocated on the GPU meanwhile, if there is one.
"""

import gc
import os
import runpy
import sys
import tempfile
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"


def run(name):
    """Return what an example trained, and its peak."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    made = runpy.run_path(str(EXAMPLES / f"with_{name}.py"))
    peak = torch.cuda.max_memory_allocated() - before if torch.cuda.is_available() else None
    state = made["model"].state_dict()
    return {each: tensor.cpu() for each, tensor in state.items()}, peak


if __name__ == "__main__":
    file, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    sys.path.insert(0, str(EXAMPLES))
    os.chdir(tempfile.mkdtemp())
    torch.save({name: run(name) for name in names}, file)
