"""Run the examples of some trainers in one process: `run_trainers.py FILE NAME...` writes what they train.

In float32 they run as they are; in bfloat16 on 12 sequences, which fill their windows, and again with as many
tokens to predict in each.
"""

import functools
import os
import runpy
import sys
import tempfile
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"


def counting_all_tokens(samples):
    return [{**each, "labels": each["labels"].clamp(min=0)} for each in samples]


def trained(names):
    return {name: runpy.run_path(str(EXAMPLES / f"with_{name}.py"))["model"].state_dict() for name in names}


if __name__ == "__main__":
    file, names = Path(sys.argv[1]).resolve(), sys.argv[2:]
    sys.path.insert(0, str(EXAMPLES))
    os.chdir(tempfile.mkdtemp())
    import language_model

    parameters = {"float32": trained(names)}
    import transformers  # whose first use replaces it in sys.modules
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # it keeps one precision for a process
    language_model.PLAN = {**language_model.PLAN, "precision": "bf16"}
    language_model.samples = functools.partial(language_model.samples, 12)
    transformers.TrainingArguments = functools.partial(transformers.TrainingArguments, use_cpu=True)
    parameters["bfloat16"] = trained(names)
    found = counting_all_tokens(language_model.samples())
    language_model.samples = lambda: found
    parameters["bfloat16, equal weights"] = trained(names)
    torch.save(parameters, file)
