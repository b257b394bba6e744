"""A run that evaluates and saves, watched beside the prediction of a shortened one."""

from pathlib import Path

import pytest

from memfit.records import Action, Mark, MarkKind, Stage
from memfit.watching import messages
from memfit.watching.comparison import Comparison
from memfit.watching.measured_stages import MeasuredPeak, MeasuredStages
from memfit.watching.prediction import Prediction, StepMemory
from support.stage_marks import LETTERS
from support.traces import BASE, freed, trace_of

EXAMPLE = (Path(__file__).parents[2] / "examples" / "whole_run.py").read_text()
REAL = """
    import gc, runpy, sys
    import memfit, torch
    for mistake in ([], ["--mistake", "saving"], ["--mistake", "evaluation"]):
        sys.argv[1:] = ["--epochs", "2", "--samples", "384", *mistake]
        with memfit.watch("run.memfit"):
            runpy.run_path("example.py", run_name="__main__")
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        print("memfit: over", file=sys.stderr)
"""


@pytest.mark.warm
def test_stages_are_compared_with_their_prediction(dry_run, rehearse):
    predicted = dry_run(EXAMPLE, "--epochs", "2", options=("--whole", "-o", "run.memfit"))
    assert predicted.answer["steps"] == 6
    (predicted.folder / "example.py").write_text(EXAMPLE)
    done = rehearse(REAL)
    assert done.returncode == 0, done.stderr
    source = "(predicted: exact on the ghost)"
    lines = [line for line in done.stderr.splitlines() if line.startswith("memfit:")]
    assert lines == [
        f"memfit: step 30 · peak 181.6 MiB measured · 181.6 MiB predicted · +0.00 % {source}",
        "memfit: stage            predicted           measured",
        "memfit: training         181.6 MiB          181.6 MiB  +0.00 %",
        "memfit: evaluation       161.6 MiB  at most 181.6 MiB",
        "memfit: saving           148.5 MiB  at most 181.6 MiB",
        "memfit: training, later  181.6 MiB  at most 181.6 MiB",
        "memfit: over",
    ]
