"""What a rank holds under FSDP2, in the optimizer's step: parameters, gradients and state fall as 1/N.

The network of rank_jobs/uneven.py has no dimension that the number of ranks divides. Each parameter is split
along its first dimension into N chunks of ceil(rows / N) rows, of which the last may be shorter or empty, as
``torch.chunk`` does. A rank keeps its chunk of a parameter padded to the first chunk's size, and its gradient
in a buffer of that size; AdamW's state has the rows of the chunk itself. Source: ``_init_sharded_param`` in
torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``foreach_reduce`` in _fsdp_collectives.py, PyTorch 2.14.
"""

import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path

from rank_tables.rank_run import ROOT, dry_run
from rank_tables.row import Row

import memfit
from memfit.records import GroupBy

COLUMNS = ("rank", "parameters", "gradients", "optimizer state", "1/N of the parameters", "padding")
WORLDS = ((2, 1), (8, 1), (8, 8), (8, 128))
"""GPUs of a machine, and machines."""

FLOAT32 = 4
_BLOCK = [(1000,), (1000,), (2731, 1000), (2731,), (1000, 2731)]
SHAPES = [(32767, 1000), *3 * _BLOCK, (32767, 1000), (32767,)]
"""Those of rank_jobs/uneven.py's parameters."""


def rows() -> Iterator[Row]:
    """Run the first and the last rank of each job."""
    for nproc, nnodes in WORLDS:
        for rank in (0, nproc * nnodes - 1):
            yield compared(nproc, nnodes, rank)


def compared(nproc: int, nnodes: int, rank: int) -> Row:
    """Run a rank, and compare what it holds with the closed form."""
    ranks = nproc * nnodes
    held, wanted = _held(nproc, nnodes, rank), expected(ranks, rank)
    share = sum(map(prod, SHAPES)) * FLOAT32 / ranks
    cells = [f"{held[name]:,} B" for name in COLUMNS[1:4]]
    cells += [f"{share:,.1f} B", f"{held['parameters'] - share:,.1f} B"]
    failure = "" if held == wanted else f"not as in closed form: {wanted}"
    return Row((f"{rank:,} of {ranks:,}", *cells), failure)


def expected(ranks: int, rank: int) -> dict[str, int]:
    """Return the bytes of each category on a rank, in closed form."""
    padded = state = 0
    for count, *others in SHAPES:
        chunk = -(-count // ranks)
        padded += chunk * prod(others)
        state += 2 * max(0, min(chunk, count - rank * chunk)) * prod(others)
    held = {"parameters": padded, "gradients": padded, "optimizer state": state}
    return {name: count * FLOAT32 for name, count in held.items()}


def _held(nproc: int, nnodes: int, rank: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "rank.memfit")
        options = ("--gpu", "H100", "--nproc", f"{nproc}", "--nnodes", f"{nnodes}", "--rank", f"{rank}")
        dry_run(ROOT / "benchmarks/rank_jobs/uneven.py", options=(*options, "-o", str(trace)))
        held = memfit.explain(trace, at="optimizer").held.rows[GroupBy.CATEGORY]
    sizes = {row.name: row.bytes for row in held}
    return {name: sizes.get(name, 0) for name in ("parameters", "gradients", "optimizer state")}
