"""``memfit replay`` and ``memfit allocator``: a recorded run under allocator settings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

import memfit
from memfit.atomic_files import check_output_paths
from memfit.cli.command_output import write_result
from memfit.cli.options import Fail, Json, ReplayTarget, json_output_file

if TYPE_CHECKING:
    from memfit.records import AllocatorComparison


def replay(
    path: Path,
    /,
    *,
    alloc_conf: Annotated[list[str] | None, Parameter(allow_leading_hyphen=True)] = None,
    target: ReplayTarget = ReplayTarget(),
    json: Json = None,
    fail: Fail = False,
) -> int:
    """Predict the memory that a recorded run needs under other allocator settings, or on another GPU.

    The script does not run again: memfit replays its allocations through a model of PyTorch's allocator.

    Args:
        path: A trace written by memfit (run.memfit), or a memory snapshot written by PyTorch
            (snapshot.pickle).
        alloc_conf: A value for PYTORCH_ALLOC_CONF, for example expandable_segments:True; repeat the option to
            compare several. The comparison always includes the settings that the run was recorded with.
        fail: Exit with code 1 unless the run fits under every setting compared, including the recorded one.
    """
    comparison = _compared(path, alloc_conf or [], target, json, smallest=False)
    return int(fail and not all(row.replay.fits for row in comparison.outcomes))


def allocator(
    path: Path,
    /,
    *,
    target: ReplayTarget = ReplayTarget(),
    json: Json = None,
) -> int:
    """For each allocator setting, report how much memory a recorded run reserves and which GPU is big enough.

    memfit replays the recorded allocations under each allocator setting worth trying. For each setting, it
    reports how much memory PyTorch reserves and how much time the calls to the CUDA driver take per step.
    memfit recommends a setting that makes the run fit or, if the run fits already, lowers the reserved memory
    by at least 1 %. It never recommends a setting that slows a training step by more than 1 ms.

    Args:
        path: A trace written by memfit (run.memfit), or a memory snapshot written by PyTorch
            (snapshot.pickle).
    """
    _compared(path, None, target, json, smallest=True)
    return 0


def _compared(
    path: Path, settings: list[str] | None, target: ReplayTarget, json: str | None, *, smallest: bool
) -> "AllocatorComparison":
    """Replay a run under allocator settings, with a progress line, and print what comes of it.

    Args:
        path: a trace or a snapshot.
        settings: values of PYTORCH_ALLOC_CONF; None for those that memfit considers worth trying.
        target: the GPU.
        json: as for ``write_result``.
        smallest: whether to search for the smallest GPU that each setting fits on.
    """
    from memfit.report.terminal.progress_line import show_progress_line

    check_output_paths({"--json": json_output_file(json)}, {"the input": path})
    trace = memfit.read(path)
    with show_progress_line() as show:
        comparison = memfit.replay(
            trace,
            settings,
            **vars(target),
            smallest=smallest,
            on_progress=lambda name: show(f"memfit: replaying under {name}"),
        )
    write_result(comparison, json)
    return comparison
