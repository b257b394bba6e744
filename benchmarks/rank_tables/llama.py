"""A 70 B Llama shape over 64 GPUs, under FSDP2 with checkpointing: answered in 90 s and 8 GiB of host memory.

rank_jobs/llama70b.py builds the model on the meta device, shards it, and initialises its shards on the GPU.
The processor time, of memfit and the processes that it starts, depends less than the wall time on what else
the machine does.
"""

from collections.abc import Iterator

from rank_tables.rank_run import GIB, ROOT, dry_run
from rank_tables.row import Row

COLUMNS = ("rank", "needs", "parameters in all", "wall time", "processor time", "host memory")
SECONDS, HOST_BYTES = 90, 8 * GIB


def rows() -> Iterator[Row]:
    """Run the first rank."""
    options = ("--gpu", "H100", "--nproc", "8", "--nnodes", "8")
    run = dry_run(ROOT / "benchmarks/rank_jobs/llama70b.py", options=options)
    parameters = run.printed.split(" parameters")[0].split()[-1]
    cells = (
        f"{run.answer['peak']['process'] / GIB:.2f} GiB",
        parameters,
        f"{run.seconds:.1f} s",
        f"{run.processor_seconds:.1f} s",
        f"{run.host_bytes / GIB:.2f} GiB",
    )
    missed = [f"more than {SECONDS} s"] * (run.seconds > SECONDS)
    missed += [f"more than {HOST_BYTES // GIB} GiB of host memory"] * (run.host_bytes > HOST_BYTES)
    yield Row(("0 of 64", *cells), " and ".join(missed))
