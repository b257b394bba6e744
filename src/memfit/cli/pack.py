"""``memfit pack``."""

from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import memfit
from memfit.atomic_files import check_output_paths
from memfit.cli.command_output import Output, write_result
from memfit.cli.options import OUTPUT, Fail, Json, json_output_file, option_read_by
from memfit.errors import UsageError
from memfit.units import parse_bytes


def pack(
    path: Path,
    /,
    *,
    capacity: Annotated[int | None, option_read_by(parse_bytes)] = None,
    seconds: float = 10.0,
    csv: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Json = None,
    fail: Fail = False,
) -> int:
    """Plan an offset for every buffer of a recorded step, and report how much memory the plan needs.

    memfit packs the last complete training step, or the whole run if it has no training steps.

    Args:
        path: A trace written by memfit (run.memfit), a memory snapshot written by PyTorch (snapshot.pickle),
            or a table of buffers (.csv) with the columns id, lower, upper and size. 'lower' and
            'upper' are times: a buffer is live in the half-open interval [lower, upper).
        capacity: Stop the search as soon as the buffers fit within this size, for example 8GiB. For a .csv
            table, give a plain number in the units of the table. By default, memfit searches for the smallest
            size.
        seconds: Stop the search after this many seconds.
        csv: Write a table of all buffers and their offsets to this file.
        fail: Exit with code 1 if memfit finds no packing that fits within --capacity.
    """
    from memfit.atomic_files import write_output_file
    from memfit.packing.best_packing import pack_buffers
    from memfit.packing.csv_table import packing_to_csv, read_buffers_csv
    from memfit.report.terminal.packing_sizes import PackingSizes
    from memfit.report.terminal.progress_line import show_progress_line

    if fail and capacity is None:
        raise UsageError("--fail needs a capacity to compare with. Add one, for example --capacity 8GiB.")
    check_output_paths({"--csv": csv, "--json": json_output_file(json)}, {"the input": path})
    with show_progress_line() as show:
        is_table = path.suffix.lower() == ".csv"
        run = partial(pack_buffers, read_buffers_csv(path)) if is_table else partial(memfit.pack, path)
        packing = run(capacity, seconds=seconds, on_progress=lambda what: show(f"memfit: packing, {what}"))
    table: Output = (csv, lambda path: write_output_file(path, packing_to_csv(packing.parts).encode()))
    write_result(PackingSizes.of(packing, capacity), json, table)
    return int(fail and capacity is not None and packing.height > capacity)
