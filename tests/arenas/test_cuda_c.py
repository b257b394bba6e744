"""The arena and the heaps for CUDA in C, against a fake CUDA that aborts when its rules are broken."""

from pathlib import Path

import pytest

from memfit.arenas.native import LIBRARY
from support.sanitized_build import run_under

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
PARTS = [path for path in LIBRARY.sources.glob("*.c") if path.name not in {"cpu_allocator.c", "throw_oom.c"}]


@pytest.mark.parametrize(
    ("sanitizers", "threads", "rounds"),
    [("address,undefined", 1, 500), ("address,undefined", 3, 250), ("thread", 3, 80)],
)
def test_memory_belongs_to_one_allocation_at_a_time(tmp_path, sanitizers, threads, rounds):
    sources = [HERE / "check_cuda.c", HERE / "fake_cuda.c", *PARTS]
    arguments = (str(threads), "1", str(rounds))
    flags = (f"-I{LIBRARY.sources}", "-rdynamic", "-ldl")
    output = run_under(sanitizers, tmp_path / "check", sources, *flags, arguments=arguments)
    placed, out_of_memory, used_elsewhere, used_again, trimmed, captured = map(int, output.split())
    assert (
        min(placed, out_of_memory, used_elsewhere, used_again) > 100
    )  # each was tried; how often depends on the threads
    assert min(trimmed, captured) >= 20
