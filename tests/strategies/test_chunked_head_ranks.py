"""``memfit.ChunkedHead`` on two gloo ranks: gradients are those of one process, reduced once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("chunked_head_ranks.py")


@pytest.mark.slow
def test_data_parallel_and_sharded_models_have_the_gradients_of_one_process(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, tmp_path / "store", str(rank), "2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][1] + outputs[1][1]
    for printed, _ in outputs:
        found, refused = json.loads(printed)
        assert [*refused] == ["fsdp2 of the head", "ddp of the head", "fsdp2, outside"]
        assert all("is wrapped or sharded itself" in message for message in refused.values())
        assert len(found) == 4
        assert max(found.values()) <= 1e-15, found
