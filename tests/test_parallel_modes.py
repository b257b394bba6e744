"""Two ways of using several GPUs: a sample of benchmarks/parallel_modes.py."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import measuring
import pytest

from support import warm_process

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
_WITH_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed (pip install deepspeed)"
)


@pytest.fixture(scope="module")
def benchmark():
    """Import benchmarks/parallel_modes.py, a script outside any package."""
    path = ROOT / "benchmarks/parallel_modes.py"
    spec = importlib.util.spec_from_file_location("parallel_modes", path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # its dataclass looks itself up
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "subprocess", SimpleNamespace(run=warm_process.run))
        yield module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "rank"),
    [
        ("data_parallel:static_graph", "1/2"),
        ("fsdp2:three_dimensions", "5/8"),
        pytest.param("deepspeed_engines:zero2_fused_adam", "1/2", marks=_WITH_DEEPSPEED),
    ],
)
def test_a_parallel_mode_fits_and_all_of_its_memory_is_explained(benchmark, variant, rank, tmp_path):
    answer = benchmark.run(variant, rank, tmp_path)
    assert (answer.verdict, answer.unknown, answer.expected) == ("fits", 0, True), answer.said
    assert answer.allocated > 64 << 20  # cuBLAS's workspace alone
