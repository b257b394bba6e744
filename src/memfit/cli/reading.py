"""The commands that read a kept trace: each calls functions of api.py and prints what they return."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from memfit.cli.console import stdout, write_difference, write_explanation

TARGET = Group("The GPU", sort_key=1)
OUTPUT = Group("Output", sort_key=2)


def explain(  # noqa: PLR0913 - one parameter an option
    path: Path,
    /,
    *,
    at: str = "peak",
    by: Literal["category", "module", "line", "op"] | None = None,
    json: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    snapshot: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    html: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    source: Annotated[bool, Parameter(group=OUTPUT)] = True,
    chrome: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    csv: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    fragmentation: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Say who holds the memory of a run, when, and from which line.

    Args:
        path: A trace (run.memfit) or a memory snapshot that PyTorch wrote (snapshot.pickle).
        at: The moment: peak; forward, loss, backward, optimizer or another phase; or a training step (2).
            Of a phase or a step, when it holds most.
        by: Sum what is allocated then by category, module, line or op; rows sum to all of it.
        json: Write the result as JSON to this file, or - for standard output.
        snapshot: Write the trace as a snapshot for PyTorch's own viewer (memory_viz) to this file.
        html: Write a report to look at in a browser, one file that loads nothing, to this file.
        source: Have file names and lines in the report; --no-source leaves them out.
        chrome: Write the timeline by category as a Chrome trace, for Perfetto, to this file.
        csv: Write a table of all allocations to this file.
        fragmentation: Say, too, what of the reserved memory was not asked for, at the peaks and at the end:
            rounding, holes, cached segments; and which blocks keep the largest holes.
    """
    from memfit import api

    trace = api.read(path)
    found = api.explain(trace, at, fragments=fragmentation)
    if snapshot is not None:
        api.write_snapshot(trace, snapshot)
    if html is not None:
        api.write_html(trace, found.summary, html, source=source)
    if chrome is not None:
        api.write_bytes(chrome, api.chrome_trace(trace))
    if csv is not None:
        api.write_bytes(csv, api.table(trace).encode())
    write_explanation(found, json, by)
    return 0


def diff(
    before: Path,
    after: Path,
    /,
    *,
    at: str = "peak",
    by: Literal["category", "module", "line", "op"] = "category",
    json: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
) -> int:
    """Say what changed between two runs: who holds what, at the same moment of each.

    Args:
        before: A trace, or a memory snapshot that PyTorch wrote.
        after: Another.
        at: The moment, as for explain.
        by: Sum what is allocated then by category, module, line or op.
        json: Write the result as JSON to this file, or - for standard output.
    """
    from memfit import api

    write_difference(api.diff(before, after, at, by), json)
    return 0


def replay(
    path: Path,
    /,
    *,
    alloc_conf: Annotated[list[str] | None, Parameter(negative="", allow_leading_hyphen=True)] = None,
    gpu: Annotated[str | None, Parameter(group=TARGET)] = None,
    memory: Annotated[str | None, Parameter(group=TARGET)] = None,
    in_use: Annotated[str | None, Parameter(group=TARGET)] = None,
    json: Annotated[str | None, Parameter(group=OUTPUT, allow_leading_hyphen=True)] = None,
    fail: Annotated[bool, Parameter(negative="", group=OUTPUT)] = False,
) -> int:
    """Say how a trace would fare under other allocator settings, or on another GPU.

    Nothing is run again: what the script asked for goes through a model of PyTorch's allocator.

    Args:
        path: A trace (run.memfit) or a memory snapshot that PyTorch wrote (snapshot.pickle).
        alloc_conf: A value of PYTORCH_ALLOC_CONF; again for more. The trace's own is always there.
        gpu: The GPU, instead of the one that the trace was made for.
        memory: Memory of the GPU instead of its own: 12GiB.
        in_use: Memory that a desktop or another job already holds: 1.5GiB.
        json: Write the result as JSON to this file, or - for standard output.
        fail: Exit with 1 if one of them does not fit.
    """
    return _replay(path, alloc_conf or [], gpu, memory, in_use, json, fail=fail, smallest=False)


def allocator(
    path: Path,
    /,
    *,
    gpu: Annotated[str | None, Parameter(group=TARGET)] = None,
    memory: Annotated[str | None, Parameter(group=TARGET)] = None,
    in_use: Annotated[str | None, Parameter(group=TARGET)] = None,
    json: Annotated[str | None, Parameter(group=OUTPUT, allow_leading_hyphen=True)] = None,
) -> int:
    """Try the allocator settings that are worth trying: what each reserves, and the smallest GPU for it.

    Recommended is only what reserves less than now and is no slower.

    Args:
        path: A trace (run.memfit) or a memory snapshot that PyTorch wrote (snapshot.pickle).
        gpu: The GPU, instead of the one that the trace was made for.
        memory: Memory of the GPU instead of its own: 12GiB.
        in_use: Memory that a desktop or another job already holds: 1.5GiB.
        json: Write the result as JSON to this file, or - for standard output.
    """
    return _replay(path, None, gpu, memory, in_use, json, fail=False, smallest=True)


def pack(
    path: Path,
    /,
    *,
    capacity: str | None = None,
    seconds: float = 10.0,
    csv: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Annotated[str | None, Parameter(group=OUTPUT, allow_leading_hyphen=True)] = None,
    fail: Annotated[bool, Parameter(negative="", group=OUTPUT)] = False,
) -> int:
    """Say how small memory is if the offset of each buffer is planned from when it lives.

    Args:
        path: A trace (run.memfit), a memory snapshot that PyTorch wrote (snapshot.pickle), or a table of
            buffers (its name ends in .csv) with the columns id, lower, upper and size: each lives in
            [lower, upper).
        capacity: What is enough: 8GiB, or a number in the table's units. By default as little as is found.
        seconds: How long it may look.
        csv: Write each buffer with its offset to this file.
        json: Write the result as JSON to this file, or - for standard output.
        fail: Exit with 1 if what was found is above the capacity.
    """
    from memfit import api
    from memfit.cli.console import write_packing
    from memfit.errors import UsageError
    from memfit.report.terminal.progress_line import progress_line
    from memfit.units import parse_bytes

    if fail and capacity is None:
        raise UsageError("--fail needs a capacity to fail at: --capacity 8GiB.")
    if csv is not None and csv.resolve() == path.resolve():
        raise UsageError(f"--csv {csv} is what is read: name another file to write to.")
    for output in (None if json == "-" else json, csv):
        if output is not None:
            api.check_output(Path(output))
    room = None if capacity is None else parse_bytes(capacity)
    with progress_line() as show:
        run = api.pack_table if path.suffix.lower() == ".csv" else api.pack
        found = run(path, room, seconds=seconds, on_progress=lambda what: show(f"memfit: packing, {what}"))
    if csv is not None:
        api.write_bytes(csv, api.packed_table(found.parts).encode())
    write_packing(found, room, json)
    return int(fail and room is not None and found.height > room)


def _replay(  # noqa: PLR0913 - what two commands share
    path: Path,
    confs: list[str] | None,
    gpu: str | None,
    memory: str | None,
    in_use: str | None,
    json: str | None,
    *,
    fail: bool,
    smallest: bool,
) -> int:
    from memfit import api
    from memfit.report.schema.replay_schema import to_json
    from memfit.report.terminal.allocator_comparison import print_comparison
    from memfit.report.terminal.progress_line import progress_line
    from memfit.units import parse_bytes

    trace = api.read(path)
    with progress_line() as show:
        result = api.replay(
            trace,
            confs,
            gpu=gpu,
            memory=None if memory is None else parse_bytes(memory),
            in_use=None if in_use is None else parse_bytes(in_use),
            smallest=smallest,
            on_progress=lambda name: show(f"memfit: replaying under {name}"),
        )
    if json == "-":
        sys.stdout.write(to_json(result).decode() + "\n")
    else:
        if json is not None:
            api.write_bytes(Path(json), to_json(result) + b"\n")
        print_comparison(result, stdout())
    return int(fail and not all(row.replay.fits for row in result.outcomes))
