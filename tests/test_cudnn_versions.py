"""benchmarks/cudnn_versions.py: its jobs are published rows, and its tables say what was measured."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from support.modules_by_path import module_of

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
versions = module_of(BENCHMARKS / "cudnn_versions.py")
MIB = 1 << 20
KEY = ("H100", "regnet_y_128gf", 64)


def result(libraries, version, *, reserved=300, error="", spaces=((50, 80),)):
    workspaces = tuple(
        versions.Workspace(f"forward {number}", used * MIB, offered * MIB)
        for number, (used, offered) in enumerate(spaces)
    )
    sizes = (reserved * MIB, 200 * MIB)
    return versions.Result(*KEY, libraries, version, *sizes, error, workspaces)


def convolution(data_type):
    x = SimpleNamespace(sizes=(8, 3, 32, 32), data_type=data_type)
    return SimpleNamespace(x=x, w=SimpleNamespace(sizes=(16, 3, 3, 3)), operation="forward", stride=(2, 2))


def engine(workspace, *notes):
    return SimpleNamespace(workspace=workspace, numerical_notes=sum(1 << note for note in notes))


def test_every_job_is_a_published_row():
    assert set(versions.ROWS) <= set(versions.PUBLISHED)


def test_columns_are_in_the_order_of_versions_and_a_cell_is_empty_without_a_result():
    some = [result("installed", 92400), result("9.8.0.87", 90800, reserved=310)]
    header, _, row = versions._reserved_table(some)
    assert header == "| card | job | batch | published, device | 9.8.0 | 9.24.0 |"
    assert row == "| H100 | regnet_y_128gf | 64 | 29,541 | 200 / 310 | 200 / 300 |"
    assert versions._cells(some[:1], ("H100", "regnet_y_128gf", 128), versions._reserved) == [""]


def test_a_run_without_enough_memory_is_named():
    assert versions._reserved(result("x", 90800, error="CUDA out of memory")).endswith(", out of memory")


def test_the_tables_sum_workspaces_and_name_the_convolutions_that_use_most():
    found = result("x", 90800, spaces=((50, 80), (70, 75), (10, 90), (5, 5), (20, 20)))
    assert versions._sum_table([found])[2].endswith("| 155 / 70 / 90 |")
    named = [row.split(" | ")[3] for row in versions._largest_table([found])[2:]]
    assert named == ["forward 1", "forward 0", "forward 4", "forward 2"]


@pytest.mark.parametrize(("data_type", "allow_tf32", "used"), [(0, False, 3), (0, True, 2), (2, False, 2)])
def test_pytorch_takes_the_first_engine_that_its_settings_allow(data_type, allow_tf32, used):
    own, fallback = (engine(1, 1), engine(2, 0)), (engine(3), engine(9, 1))
    found = versions._workspace(convolution(data_type), own, fallback, allow_tf32=allow_tf32)
    assert (found.used, found.offered) == (used, 9)
    assert found.convolution == "forward, 3x32x32 by 16x3x3x3, stride 2"
