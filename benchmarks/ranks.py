"""Time dry runs of jobs on many GPUs, and check what they answer.

    python benchmarks/ranks.py [--only llama,pipeline]

llama: a 70 B Llama shape over 64 GPUs, under FSDP2 with checkpointing, in 90 s and 8 GiB of host memory.
rank_jobs/llama70b.py builds the model on the meta device, shards it, and initialises its shards on the GPU.

pipeline: every distinct role of a pipeline of eight stages (examples/distributed/pipeline.py), in 60 s.

The processor time, of memfit and the processes that it starts, depends less than the wall time on what else
the machine does. Exits with 1 if a figure is not as required, or if a job made no training step. accuracy.py
has published figures.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import GIB, MEMFIT, ROOT, command_line, lacks_steps, parts, table_head, table_line

PAGE = os.sysconf("SC_PAGE_SIZE")
RSS_FIELD = 23
"""Index of the resident pages in /proc/PID/stat; that of the parent's process id is 3 (proc(5))."""
ROLES = {(0,), (1, 2, 3, 4, 5, 6), (7,)}
COLUMNS = "job", "answer", "wall time", "processor time", "host memory", "as required"


@dataclass(frozen=True, slots=True)
class RankRun:
    """What one command of memfit gave."""

    answer: dict[str, Any]
    """The public JSON."""
    printed: str
    """The script's output and memfit's summary."""
    seconds: float
    """Wall time of the whole command."""
    processor_seconds: float
    """Processor time of memfit and the processes that it started and waited for."""
    host_bytes: int
    """The largest sum of the resident memory of memfit and its descendants, looked up every 0.1 s."""


def dry_run(script: Path, *options: str) -> RankRun:
    """Dry-run a script to its end, under options such as ``--nproc 8``.

    Raises:
        SystemExit: memfit gave no answer, or the script failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder, "report.json"), Path(folder, "output")
        command = [*MEMFIT, "dry-run", "--to-end", "--json", str(report), *options]
        begun, busy, most = time.perf_counter(), _processor_seconds(), 0
        with output.open("w") as printed:
            process = subprocess.Popen(
                [*command, "--", str(script)], stdout=printed, stderr=printed, cwd=folder
            )
            while process.poll() is None:
                most = max(most, _resident(process.pid))
                time.sleep(0.1)
        seconds, text = time.perf_counter() - begun, output.read_text()
        if process.returncode or not report.exists():
            raise SystemExit(f"{' '.join(command)} {script} ended with {process.returncode}:\n{text[-2000:]}")
        busy = _processor_seconds() - busy
        return RankRun(json.loads(report.read_text()), text, seconds, busy, most)


def _processor_seconds() -> float:
    """Return the processor time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _resident(root: int) -> int:
    """Return the resident bytes of a process and its descendants."""
    parents, resident = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # a name may contain spaces
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        process = int(stat.parent.name)
        parents[process], resident[process] = int(fields[3 - 2]), int(fields[RSS_FIELD - 2]) * PAGE
    family = {root}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(resident.get(process, 0) for process in family)


def llama() -> tuple[RankRun, str, list[str]]:
    """Run the first rank; return the run, its answer, and how it fails."""
    script = ROOT / "benchmarks/rank_jobs/llama70b.py"
    run = dry_run(script, "--gpu", "H100", "--nproc", "8", "--nnodes", "8")
    parameters = run.printed.split(" parameters")[0].split()[-1]
    failed = ["more than 90 s"] * (run.seconds > 90)  # noqa: PLR2004
    failed += ["more than 8 GiB of host memory"] * (run.host_bytes > 8 * GIB)
    failed += ["no training step"] * lacks_steps(run.answer, trains=True)
    needs = f"{run.answer['peak']['process'] / GIB:.2f} GiB"
    return run, f"rank 0 of 64 needs {needs}; {parameters} parameters in all", failed


def pipeline() -> tuple[RankRun, str, list[str]]:
    """Run the eight ranks; return the run, its answer, and how it fails."""
    script = ROOT / "examples/distributed/pipeline.py"
    run = dry_run(script, "--gpu", "H100", "--nproc", "8", "--all-ranks")
    roles = {(role["rank"], *role["also"]) for role in run.answer["ranks"]}
    failed = ["other roles than the first, the middle and the last stage"] * (roles != ROLES)
    failed += ["more than 60 s"] * (run.seconds > 60)  # noqa: PLR2004
    failed += ["no training step"] * lacks_steps(run.answer, trains=True)
    shown = "; ".join(", ".join(map(str, role)) for role in sorted(roles))
    return run, f"roles {shown}", failed


JOBS = {"llama": llama, "pipeline": pipeline}


def main() -> int:
    """Print a row for each job; return 1 if a figure is not as required."""
    parser = command_line(__doc__)
    parser.add_argument("--only", type=parts, default=[*JOBS], metavar="JOBS", help="separated by commas")
    chosen = parser.parse_args().only
    if unknown := sorted(set(chosen) - set(JOBS)):
        parser.error(f"no job {', '.join(unknown)}; there are {', '.join(JOBS)}")
    print(table_head(COLUMNS, "llrrrl"), flush=True)
    all_failed = []
    for name in chosen:
        run, answer, failed = JOBS[name]()
        all_failed += failed
        figures = f"{run.seconds:.1f} s", f"{run.processor_seconds:.1f} s", f"{run.host_bytes / GIB:.2f} GiB"
        print(table_line((name, answer, *figures, " and ".join(failed) or "yes")), flush=True)
    return int(bool(all_failed))


if __name__ == "__main__":
    sys.exit(main())
