"""How long the host takes: the formula, the measurement's file, and `memfit doctor --time`."""

import subprocess
import sys
from dataclasses import replace

import pytest

from memfit.cli.main import run_command
from memfit.errors import TargetError, UnsuitableEnvironmentError
from memfit.ghost.build.torch_install import find_torch
from memfit.records import ASSUMED_HOST_TIMES, MEASURED_OF_HOST, HostTimes, HostUnits, Provenance
from memfit.run import measure_host_times as host_times
from memfit.timing import saved_host_times as saved

TORCH = find_torch().version
MEASURED = HostTimes(replace(ASSUMED_HOST_TIMES.one, operations=1e-6), "a test", measured=True)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def measured(cache, monkeypatch):
    """Have the process on the ghost answer at once; return its commands."""
    commands = []

    def run(command, **_):
        commands.append(command)
        printed = '{"operations": 1e-6, "python_calls": 2e-6}'
        return subprocess.CompletedProcess(command, 0, stdout=printed, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_a_step_takes_what_its_parts_take():
    one = HostUnits(python_calls=1.0, operations=10.0, launches=100.0)
    step = HostUnits(python_calls=3, operations=2, launches=1, gradients=50)
    assert HostTimes(one, "").step_seconds(step) == 3 + 20 + 100
    assert HostTimes(one, "").step_seconds(HostUnits()) == 0


def test_checkpointing_in_part_takes_the_host_longer_than_whole_modules():
    """The order, and about the ratios, that were measured."""
    plain = HostUnits(python_calls=700, operations=500, autograd_nodes=390, gradients=100)
    again = replace(plain, python_calls=1200, operations=620, autograd_nodes=650)
    ways = (
        plain,
        replace(again, checkpointed_tensors=220, checkpointed_regions=8),
        replace(again, checkpointed_tensors=220, checkpointed_regions=8, watched_operations=800),
    )
    seconds = [ASSUMED_HOST_TIMES.step_seconds(way) for way in ways]
    assert 2 < seconds[1] / seconds[0] < 3
    assert 4 < seconds[2] / seconds[0] < 6


def test_the_driver_is_assumed_and_all_else_is_without_a_measurement():
    assert MEASURED.provenance("operations") is Provenance.MEASURED
    assert MEASURED.provenance("launches") is Provenance.ASSUMED
    assert ASSUMED_HOST_TIMES.provenance("operations") is Provenance.ASSUMED


def test_what_was_measured_is_kept(measured, cache):
    first = host_times.measure_host_times()
    assert (first.one.operations, first.measured) == (1e-6, True)
    assert saved.saved_host_times(TORCH) == first
    files = [path.name for path in cache.rglob("*") if path.is_file()]
    assert files == [saved.host_times_file(TORCH).name]
    assert len(measured) == 1


def test_another_torch_or_processor_has_no_measurement(measured, monkeypatch, tmp_path):
    host_times.measure_host_times()
    assert saved.saved_host_times("2.0.0") is None
    processor = tmp_path / "cpuinfo"
    processor.write_text("model name : Another CPU @ 3 GHz\n")
    monkeypatch.setattr(saved, "_CPU_INFO", processor)
    assert saved.saved_host_times(TORCH) is None
    assert "Another_CPU_3_GHz" in saved.host_times_file(TORCH).name


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"one": {"operations": "x"}, "source": ""}'])
@pytest.mark.usefixtures("measured")
def test_a_damaged_file_is_ignored_and_replaced(content):
    host_times.measure_host_times()
    path = saved.host_times_file(TORCH)
    path.write_text(content)
    assert saved.saved_host_times(TORCH) is None
    assert host_times.measure_host_times() == saved.saved_host_times(TORCH)


def test_a_measurement_that_cannot_be_written_whole_leaves_the_file_before_it(measured, monkeypatch):
    host_times.measure_host_times()
    before = saved.host_times_file(TORCH).read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memfit.atomic_files.os.fsync", full)
    with pytest.raises(Exception, match="No space left"):
        host_times.measure_host_times()
    assert saved.host_times_file(TORCH).read_bytes() == before
    assert len(list(saved.host_times_file(TORCH).parent.iterdir())) == 1


def test_a_failure_quotes_the_process(cache, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="one\nRuntimeError: no\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(TargetError, match="RuntimeError: no"):
        host_times.measure_host_times()
    assert saved.saved_host_times(TORCH) is None


@pytest.mark.parametrize(("load", "warns"), [(99.0, True), (0.1, False)])
def test_doctor_says_that_a_busy_machine_is_to_be_measured_again(monkeypatch, capsys, load, warns):
    def without_card():
        raise UnsuitableEnvironmentError("No GPU.")

    monkeypatch.setattr("memfit.run.measure_host_times.measure_host_times", lambda: ASSUMED_HOST_TIMES)
    monkeypatch.setattr("memfit.run.measure_kernel_times.measure_kernel_times", without_card)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    assert run_command(["doctor", "--time"]) == 0
    assert ("measure again when it is" in capsys.readouterr().err) == warns


@pytest.mark.process
@pytest.mark.slow
def test_doctor_measures_this_machine_on_the_ghost_and_prints_a_table(cache):
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "doctor", "--time"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kinds = {line.split("  ")[0]: line.split()[-1] for line in done.stdout.splitlines()}
    for name in MEASURED_OF_HOST:
        assert kinds[name.replace("_", " ")] == "measured"
    assert kinds["launches"] == kinds["library calls"] == "assumed"
    times = saved.saved_host_times(TORCH)
    assert times is not None
    assert all(getattr(times.one, name) > 0 for name in ("python_calls", "operations", "watched_operations"))
