"""``memfit replay``, and the replay that ``memfit allocator`` shares with it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from memfit.atomic_files import check_outputs
from memfit.cli.console import write_result
from memfit.cli.options import OUTPUT, TARGET, json_file, memory_or_none

if TYPE_CHECKING:
    from memfit.records import AllocatorComparison


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
    """Predict the memory that a recorded run needs under other allocator settings, or on another GPU.

    The script does not run again: memfit replays its allocations through a model of PyTorch's allocator.

    Args:
        path: A trace written by memfit (run.memfit), or a memory snapshot written by PyTorch
            (snapshot.pickle).
        alloc_conf: A value for PYTORCH_ALLOC_CONF, for example expandable_segments:True; repeat the option to
            compare several. The comparison always includes the settings that the run was recorded with.
        gpu: Assume this GPU instead of the one that the run was recorded for.
        memory: Assume this much GPU memory instead of the GPU's own, for example 12GiB.
        in_use: Assume that the desktop or other jobs already use this much GPU memory, for example 1.5GiB.
        json: Write the result as JSON to this file. With -, print the JSON instead of the summary.
        fail: Exit with code 1 unless the run fits under every setting compared, including the recorded one.
    """
    check_outputs({"--json": json_file(json)}, {"the input": path})
    comparison = compare(path, alloc_conf or [], gpu, memory, in_use, smallest=False)
    write_result(comparison, json)
    return int(fail and not all(row.replay.fits for row in comparison.outcomes))


def compare(
    path: Path,
    settings: list[str] | None,
    gpu: str | None,
    memory: str | None,
    in_use: str | None,
    *,
    smallest: bool,
) -> "AllocatorComparison":
    """Replay a run under allocator settings, with a progress line.

    Args:
        path: a trace or a snapshot.
        settings: values of PYTORCH_ALLOC_CONF; None for those that memfit considers worth trying.
        gpu: name of the GPU; None for the run's own.
        memory: the GPU's memory, as text with a unit; None for its own.
        in_use: memory that other processes use, as text with a unit; None for the run's own.
        smallest: whether to search for the smallest GPU that each setting fits on.
    """
    from memfit import api
    from memfit.report.terminal.progress_line import progress_line

    trace = api.read(path)
    with progress_line() as show:
        return api.replay(
            trace,
            settings,
            gpu=gpu,
            memory=memory_or_none(memory),
            in_use=memory_or_none(in_use),
            smallest=smallest,
            on_progress=lambda name: show(f"memfit: replaying under {name}"),
        )
