"""Owners of memory, against independent figures: two examples of benchmarks/attribution.py."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def benchmark():
    """Import benchmarks/attribution.py, a script outside any package."""
    spec = importlib.util.spec_from_file_location("attribution", ROOT / "benchmarks/attribution.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("example", ["gan", "amp_gradscaler"])
def test_saved_tensors_parameters_gradients_and_state_are_equal_to_the_byte(benchmark, example, tmp_path):
    found = benchmark.compare(ROOT / f"examples/{example}.py", tmp_path)
    assert found["differences"] == []
    assert found["backwards"] >= 3
    assert found["saved at the last"] > 1 << 20
    assert found["unknown share"] == 0
