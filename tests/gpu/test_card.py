"""On a real GPU: a recording equals PyTorch's own counts there, and the ghost's prediction."""

import re
import sys
from pathlib import Path

import pytest

import memfit
from memfit.card.context_measurement import measure_context
from memfit.card.detect_card import detect_card
from memfit.devices import find_device
from memfit.errors import MemfitError, UnknownDeviceError

pytestmark = [pytest.mark.gpu, pytest.mark.process]
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def card():
    """Return the GPU of this machine; skip the test, with the reason, if there is none."""
    try:
        found = detect_card("test a GPU")
    except MemfitError as error:
        pytest.skip(str(error))
    assert not found.rehearsal
    return found


def test_a_recording_equals_the_peaks_that_the_script_prints(card, tmp_path, capfd):
    answer = memfit.record(EXAMPLES / "linear1024.py", steps=None, output=tmp_path / "run.memfit")
    printed = capfd.readouterr().out
    own = dict(re.findall(r"^peak (allocated|reserved) ([\d,]+) B$", printed, re.MULTILINE))
    assert answer.peak_allocated == int(own["allocated"].replace(",", ""))
    assert answer.peak_reserved == int(own["reserved"].replace(",", ""))
    assert answer.device.machine == "card"
    assert answer.device.name == card.name
    assert answer.peak_process.provenance == "measured"
    assert answer.peak_process.bytes > answer.peak_reserved


def test_the_ghost_predicts_the_recorded_peaks(card):
    try:
        gpu = find_device(card.name).name
    except UnknownDeviceError as error:
        pytest.skip(str(error))
    real = memfit.record(EXAMPLES / "linear1024.py")
    predicted = memfit.dry_run(EXAMPLES / "linear1024.py", gpu=gpu, memory=real.device.total.bytes)
    assert (predicted.peak_allocated, predicted.peak_reserved) == (real.peak_allocated, real.peak_reserved)


def test_the_context_grows_from_stage_to_stage(card):
    report = measure_context()
    outside = [stage.outside for stage in report.stages]
    assert outside[0] > 0
    assert outside == sorted(outside)
    print(report, file=sys.stderr)
