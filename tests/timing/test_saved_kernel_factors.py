"""A card that `memfit doctor --time` measured: factors by kind, their file, and what they do to a step."""

import subprocess
import tomllib
from dataclasses import replace

import msgspec
import pytest

from memfit.card.detect_card import Card
from memfit.cli.doctor import doctor
from memfit.devices import find_device
from memfit.errors import TargetError, UnknownDeviceError, UnsuitableEnvironmentError
from memfit.planning.run_changes_on_ghost import kernel_time_estimator
from memfit.records import (
    ASSUMED_HOST_TIMES,
    DeviceUse,
    EventLabel,
    Figure,
    KernelMeasurement,
    Operand,
    Operation,
    Phase,
    Provenance,
    TimedKernel,
    WholeStep,
)
from memfit.run import measure_kernel_times as measuring
from memfit.timing.kernel_times import Basis, KernelFactor, KernelTimes
from memfit.timing.saved_kernel_factors import kernel_factors, kernel_times_file, saved_kernel_factors
from memfit.timing.step_time import step_time, step_time_of_trace
from support.traces import trace_of

H100 = find_device("H100-80GB")
TORCH = "2.14.1+cu130"


def product(size, dtype="bfloat16"):
    square = Operand((size, size), dtype)
    fields = "aten.mm.default", -1, -1, (), (), (), 2 * size**3, 0, dtype, False, 0.0, 0
    return Operation(*fields, operands=(square, square), results=(square,), launches=1)


def softmax(rows):
    scores = Operand((rows, 1024), "float32")
    fields = "aten._softmax.default", -1, -1, (), (), (), 0, 0, "float32", False, 0.0, 0
    return Operation(*fields, operands=(scores,), results=(scores,), launches=1)


def timed(*kernels):
    """Return a measurement of an H100 on which operations took so many times as long as predicted."""
    times = KernelTimes(H100)
    found = tuple(TimedKernel("", (each,), times.of(each).seconds * ratio) for each, ratio in kernels)
    return KernelMeasurement("NVIDIA H100 80GB HBM3", "580.1", "13.0", TORCH, "2026-11-30", found)


MEASURED = timed(*((product(size), ratio) for size, ratio in ((4096, 1.2), (2048, 1.1), (1024, 1.32))))


def test_a_kind_takes_the_median_longer_and_the_others_are_as_far_off():
    factors = kernel_factors(MEASURED, H100)
    assert factors.keys() == {"product, 16 bits"}
    assert factors["product, 16 bits"] == KernelFactor(pytest.approx(1.2), pytest.approx(0.1), 3)
    alone = kernel_factors(timed((softmax(65536), 0.8)), H100)
    assert alone == {"softmax": KernelFactor(pytest.approx(0.8), 0.05, 1)}  # one tells nothing of others


def test_several_kernels_count_for_the_longest():
    times = KernelTimes(H100)
    both = product(8192), softmax(64)
    seconds = 2 * sum(times.of(each).seconds for each in both)
    factors = kernel_factors(replace(MEASURED, kernels=(TimedKernel("", both, seconds),)), H100)
    assert factors == {"product, 16 bits": KernelFactor(pytest.approx(2), 0.05, 1)}


def test_kernels_of_a_measured_kind_take_as_much_longer_and_others_do_not():
    plain, corrected = KernelTimes(H100), KernelTimes(H100, factors=kernel_factors(MEASURED, H100))
    for dtype in ("bfloat16", "float16"):
        one, other = plain.of(product(3000, dtype)), corrected.of(product(3000, dtype))
        assert other.seconds == pytest.approx(1.2 * one.seconds)
        assert (other.basis, other.spread) == (Basis.MEASURED, pytest.approx(0.1))
    for each in (product(3000, "float32"), softmax(4096)):
        assert corrected.of(each) == plain.of(each)


def test_a_step_rests_on_the_measurement():
    step, labels = WholeStep((product(8192),), (0, 0), (0, 0)), (EventLabel(Phase.FORWARD, "", "", -1),)
    plain = step_time(step, labels, H100, ASSUMED_HOST_TIMES)
    own = step_time(step, labels, H100, ASSUMED_HOST_TIMES, factors=kernel_factors(MEASURED, H100))
    assert own.basis == "measured on this card"
    assert own.seconds == pytest.approx(1.2 * plain.seconds, rel=1e-3)
    assert own.high / own.low < plain.high / plain.low


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))


@pytest.fixture
def card(cache, monkeypatch):
    """Have a card that the process measures at once."""
    found = Card("NVIDIA H100 80GB HBM3", "580.1", "13.0", rehearsal=False)
    done = subprocess.CompletedProcess([], 0, stdout=msgspec.json.encode(MEASURED).decode(), stderr="")
    monkeypatch.setattr(measuring, "detect_card", lambda _: found)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    return found


@pytest.mark.usefixtures("card")
def test_what_was_measured_is_kept_for_this_card_and_this_torch():
    assert measuring.measure_kernel_times() == MEASURED
    assert saved_kernel_factors(H100, TORCH) == kernel_factors(MEASURED, H100)
    times = KernelTimes(H100, factors=kernel_factors(MEASURED, H100))
    assert kernel_time_estimator(H100, TORCH)(product(512)) == times.of(product(512)).seconds
    step, labels = WholeStep((product(8192),), (0,), (0,)), (EventLabel(Phase.FORWARD, "", "", -1),)
    device = DeviceUse(H100.name, *[Figure(0, Provenance.EXACT)] * 2, 0)
    trace = trace_of([], step=step, labels=labels, device=device, versions={"torch": TORCH})
    assert step_time_of_trace(trace).basis == "measured on this card"
    assert saved_kernel_factors(H100, "2.13.0") == saved_kernel_factors(find_device("A100"), TORCH) == {}
    kernel_times_file(H100.name, TORCH).write_text("{")
    assert saved_kernel_factors(H100, TORCH) == {}


def test_the_ghost_and_unknown_cards_are_not_timed(card, monkeypatch):
    monkeypatch.setattr(measuring, "detect_card", lambda _: replace(card, rehearsal=True))
    with pytest.raises(UnsuitableEnvironmentError, match="without a real device: memfit's ghost"):
        measuring.measure_kernel_times()
    monkeypatch.setattr(measuring, "detect_card", lambda _: replace(card, name="Another card"))
    with pytest.raises(UnknownDeviceError, match="Another card"):
        measuring.measure_kernel_times()
    assert not kernel_times_file(H100.name, TORCH).exists()


@pytest.mark.usefixtures("card")
def test_a_failure_quotes_the_process(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="one\nRuntimeError: no\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(TargetError, match="H100-80GB:\none\nRuntimeError: no"):
        measuring.measure_kernel_times()


@pytest.fixture
def host(monkeypatch):
    """Have an idle machine whose host takes what is assumed."""
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr("memfit.run.measure_host_times.measure_host_times", lambda: ASSUMED_HOST_TIMES)


@pytest.mark.usefixtures("card", "host")
def test_doctor_prints_kinds_and_lines_to_contribute(capsys):
    assert doctor(time=True) == 0
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines() if "16 bits" in line] == [
        ["product,", "16", "bits", "3", "1.20", "10%"]
    ]
    lines = tomllib.loads(err[err.index("[measured") :])["measured"]["H100-80GB"]
    assert lines["product, 16 bits"] == {"ratio": 1.2, "spread": 0.1, "kernels": 3}
    assert lines["source"] == "memfit doctor --time, 2026-11-30, torch 2.14.1, CUDA 13.0, driver 580.1"


@pytest.mark.usefixtures("cache", "host")
def test_doctor_measures_the_host_alone_without_a_card(capsys, monkeypatch):
    def none(purpose):
        raise UnsuitableEnvironmentError(f"Cannot {purpose} without a GPU: none.")

    monkeypatch.setattr(measuring, "detect_card", none)
    assert doctor(time=True) == 0
    assert capsys.readouterr().err == "Only the host was measured. Cannot time kernels without a GPU: none.\n"
