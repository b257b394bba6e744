"""Every distinct role of a pipeline of eight stages (examples/distributed/pipeline.py), in 60 s."""

from collections.abc import Iterator

from rank_tables.rank_run import GIB, ROOT, dry_run
from rank_tables.row import Row

COLUMNS = ("roles", "wall time", "processor time", "host memory")
SECONDS, ROLES = 60, {(0,), (1, 2, 3, 4, 5, 6), (7,)}


def rows() -> Iterator[Row]:
    """Run the eight ranks."""
    options = ("--gpu", "H100", "--nproc", "8", "--all-ranks")
    run = dry_run(ROOT / "examples/distributed/pipeline.py", options=options)
    roles = {(role["rank"], *role["also"]) for role in run.answer["ranks"]}
    missed = ["other roles than the first, the middle and the last stage"] * (roles != ROLES)
    missed += [f"more than {SECONDS} s"] * (run.seconds > SECONDS)
    shown = "; ".join(", ".join(map(str, role)) for role in sorted(roles))
    cells = (f"{run.seconds:.1f} s", f"{run.processor_seconds:.1f} s", f"{run.host_bytes / GIB:.2f} GiB")
    yield Row((shown, *cells), " and ".join(missed))
