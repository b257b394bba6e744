"""A rank of N under FSDP2 holds its share of parameters, gradients and state, to the byte of padding.

support/rank_scripts/uneven.py trains a network whose dimensions are no multiples of N. FSDP2 splits each
parameter along its first dimension into N chunks of ceil(rows / N) rows, as ``torch.chunk`` does; the last
chunks may be shorter, or empty. A rank pads its chunk of a parameter to the size of the first one, and keeps
its gradient in a buffer of that size. AdamW's state has the rows of the chunk alone.

Source: ``_init_sharded_param`` in torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``foreach_reduce`` in
_fsdp_collectives.py, PyTorch 2.14.
"""

from math import prod
from pathlib import Path

import pytest

import memfit
from memfit.records import GroupBy
from support import warm_process

pytestmark = pytest.mark.process

SCRIPT = Path(__file__).parents[1] / "support" / "rank_scripts" / "uneven.py"
FLOAT32 = 4
BLOCK = [(1000,), (1000,), (2731, 1000), (2731,), (1000, 2731)]
SHAPES = [(32767, 1000), *3 * BLOCK, (32767, 1000), (32767,)]
"""Those of the script's parameters."""
WORLDS = [
    pytest.param(nproc, nnodes, rank, marks=[] if (nnodes, rank) == (128, 0) else pytest.mark.slow)
    for nproc, nnodes in ((2, 1), (8, 1), (8, 8), (8, 128))
    for rank in (0, nproc * nnodes - 1)
]
"""GPUs of a machine, machines, and the first or the last rank."""


def expected(ranks, rank):
    """Return the bytes of each category on a rank, in closed form."""
    padded = state = 0
    for count, *others in SHAPES:
        chunk = -(-count // ranks)
        padded += chunk * prod(others)
        state += 2 * max(0, min(chunk, count - rank * chunk)) * prod(others)
    held = {"parameters": padded, "gradients": padded, "optimizer state": state}
    return {name: count * FLOAT32 for name, count in held.items()}


@pytest.mark.parametrize(("nproc", "nnodes", "rank"), WORLDS)
def test_a_rank_holds_its_share_to_the_byte_of_padding(nproc, nnodes, rank, tmp_path):
    trace = tmp_path / "rank.memfit"
    job = ("--nproc", f"{nproc}", "--nnodes", f"{nnodes}", "--rank", f"{rank}", "--to-end", "-o", str(trace))
    done = warm_process.memfit("dry-run", "--gpu", "H100", *job, "--", str(SCRIPT), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    held = memfit.explain(trace, at="optimizer").held.rows[GroupBy.CATEGORY]
    sizes = {row.name: row.bytes for row in held}
    wanted = expected(nproc * nnodes, rank)
    assert {name: sizes.get(name, 0) for name in wanted} == wanted
