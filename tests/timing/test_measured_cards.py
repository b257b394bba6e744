"""Files of `memfit doctor --time`, read by the fit: rows of kernels that the fitted formulas predict."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from memfit.devices import find_device
from memfit.records import KernelMeasurement, Operand, Operation, TimedKernel
from memfit.timing.kernel_times import KernelTimes, find_coefficients, kernel_table, measured_device

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FIELDS = -1, -1, (), (), (), 0, 0


def operation(name, *shapes, dtype="float32"):
    first, *_, last = tensors = [Operand(shape, dtype) for shape in shapes]
    assert first
    return Operation(
        name, *FIELDS, dtype, False, 0.0, 0, operands=tuple(tensors[:-1]), results=(last,), launches=1
    )


SQUARE = (4096, 4096)
PRODUCT = operation("aten.mm.default", SQUARE, SQUARE, SQUARE)
SOFTMAX = operation("aten._softmax.default", (65536, 1024), (65536, 1024))
VIEW = replace(operation("aten.view.default", SQUARE, SQUARE), launches=0)


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from measured_cards import READERS
    from measured_kernels import rows_by_kind

    def read(*kernels):
        found = KernelMeasurement("NVIDIA L4", "580.1", "13.0", "2.14.1", "2026-11-30", kernels)
        (tmp_path / "doctor").mkdir()
        (tmp_path / "doctor" / "L4.json").write_bytes(msgspec.json.encode(found))
        return rows_by_kind(tmp_path, READERS)

    return read


@pytest.mark.parametrize("tf32", [False, True])
def test_kernels_of_a_measured_card_are_rows_that_their_formula_predicts(read, tf32):
    from fit_kernel_times import predicted

    card, kind = find_device("L4"), "product_16" if tf32 else "product_32"
    seconds = KernelTimes(card, tf32=tf32).of(PRODUCT).seconds
    rows = read(*[TimedKernel("", (VIEW, PRODUCT), 2 * seconds, tf32)] * 6)
    assert list(rows) == [kind]
    assert len(rows[kind]["L4"]) == 6
    row = rows[kind]["L4"][0]
    assert row.seconds == pytest.approx(2 * predicted(row, find_coefficients(kind, card).values))


def test_what_runs_several_kinds_of_kernels_is_no_row(read):
    both = TimedKernel("", (PRODUCT, SOFTMAX), 1.0)
    rows = read(*[both] * 6, *[TimedKernel("", (SOFTMAX, SOFTMAX), 2.0)] * 6)
    assert list(rows) == ["softmax"]
    assert [len(row.works) for row in rows["softmax"]["L4"]] == [2] * 6
    assert {row.seconds for row in rows["softmax"]["L4"]} == {2.0}


def test_cards_that_only_the_tables_know():
    assert measured_device("GH200").multiprocessors == find_device("H100").multiprocessors
    assert measured_device("RTX PRO 6000").compute_capability == (12, 0)
    sources = kernel_table()["source"]
    for kind in kernel_table()["kind"].values():
        for entry in kind.get("card", {}).values():
            assert set(entry["source"].split("+")) <= set(sources)
            assert entry["rows"] > 0
            assert entry["median"] <= entry["spread"]
