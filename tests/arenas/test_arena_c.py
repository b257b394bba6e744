"""The arena's C code, used by several threads, under sanitizers."""

from pathlib import Path

import pytest

from memfit.arenas.arena_library import LIBRARY
from support.sanitized_build import run_under

pytestmark = pytest.mark.process

PARTS = [LIBRARY.sources / name for name in ("arena.c", "sorted_pairs.c", "step_recorder.c")]
CHECK = Path(__file__).with_name("check_arena.c")


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_blocks_of_many_threads_are_never_overwritten(tmp_path, sanitizers):
    program = tmp_path / "check"
    output = run_under(sanitizers, program, [CHECK, *PARTS], f"-I{LIBRARY.sources}", arguments=("1", "60"))
    placed, overlapping, recorded = (int(part.split()[0]) for part in output.split(", "))
    assert min(placed, overlapping, recorded) > 200  # otherwise the check tried too little
