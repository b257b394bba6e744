"""The engine's peaks equal those of handwritten loops on the ghost: some of benchmarks/engine_memory.py."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "engine_memory.py"
SAMPLE = [
    "accumulation of 4",
    "fp16 autocast, accumulation, clipped",
    "bf16, float32 masters",
    "checkpointed, bf16 autocast, accumulation, clipped",
]


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location(BENCHMARK.stem, BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_peaks_equal_those_of_the_best_handwritten_loop(benchmark):
    for _, strategy, peaks in benchmark.measure(["gpt"], SAMPLE):
        by_hand = peaks.pop("by hand")["allocated"]
        excess = {entry: figures["allocated"] - by_hand for entry, figures in peaks.items()}
        assert set(excess.values()) <= {0, benchmark.LOSS}, (strategy, excess)
