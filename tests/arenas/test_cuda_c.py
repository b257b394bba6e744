"""The C code of the arena and the CUDA heaps, on a fake CUDA that aborts if its rules are broken."""

from pathlib import Path

import pytest

from memfit.arenas.arena_library import LIBRARY
from support.sanitized_build import run_under

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
PARTS = [
    path
    for path in LIBRARY.sources.glob("*.c")
    if path.name not in {"cpu_allocator.c", "throw_torch_errors.c"}
]


@pytest.mark.parametrize(
    ("sanitizers", "threads", "rounds"),
    [
        ("address,undefined", 1, 500),
        pytest.param("address,undefined", 3, 250, marks=pytest.mark.slow),
        ("thread", 3, 80),
    ],
)
def test_memory_belongs_to_one_allocation_at_a_time(tmp_path, sanitizers, threads, rounds):
    sources = [HERE / "check_cuda.c", HERE / "fake_cuda.c", *PARTS]
    arguments = (str(threads), "1", str(rounds))
    flags = (f"-I{LIBRARY.sources}", "-rdynamic", "-ldl")
    output = run_under(sanitizers, tmp_path / "check", sources, *flags, arguments=arguments)
    placed, out_of_memory, used_elsewhere, reused, trimmed, captured = map(int, output.split())
    # Each case occurred; how often depends on the threads.
    assert min(placed, out_of_memory, used_elsewhere, reused) > 100
    assert min(trimmed, captured) >= 20
