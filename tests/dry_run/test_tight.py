"""A run that fits only if an assumed term is right is tight, not fitting."""

from dataclasses import replace

import pytest

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.records import Figure, Provenance
from memfit.trace.trace_file import read_trace

pytestmark = [pytest.mark.process, pytest.mark.warm]
SCRIPT = "import torch; torch.ones(1 << 28, device='cuda')"  # 1 GiB; 0.5 GiB of context are assumed


@pytest.mark.parametrize(
    ("memory", "options", "verdict", "code"),
    [
        ("1630MiB", (), "tight", 0),  # 94 MiB are left, and the context may take 107.5 MiB more
        ("1630MiB", ("--fail",), "tight", 1),
        ("1645MiB", ("--fail",), "fits", 0),  # 109 MiB are left
    ],
)
def test_what_is_left_must_exceed_the_uncertainty(memory, options, verdict, code, dry_run):
    run = dry_run(SCRIPT, options=("--memory", memory, *options))
    assert (run.answer["verdict"], run.code) == (verdict, code), run.out
    assert run.answer["uncertainty"] == round(0.21 * (512 << 20))
    assert run.out.startswith(verdict.upper())


def test_a_measured_context_is_certain(dry_run):
    run = dry_run(SCRIPT, options=("--memory", "1630MiB", "-o", "run.memfit"))
    trace = read_trace(run.folder / "run.memfit")
    assert dry_run_of_trace(trace).verdict == "tight"
    measured = Figure(trace.device.context.bytes, Provenance.MEASURED, "nvml")
    certain = dry_run_of_trace(replace(trace, device=replace(trace.device, context=measured)))
    assert (certain.verdict, certain.uncertainty) == ("fits", 0)
