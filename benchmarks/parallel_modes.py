"""Run each parallel mode of PyTorch on the ghost, as some ranks of a job, and print what memfit answers.

    python benchmarks/parallel_modes.py [SCRIPT[:VARIANT] ...] [--ranks R/N,...] [--markdown FILE]

The scripts of ``parallel_modes/`` use PyTorch as users do. ``R/N`` is rank R of a job of N; ``all/N`` runs
all of them, and ``real/N`` starts them all at once, with torchrun or, for those of ``LAUNCHED``,
``accelerate launch``. Printed are the verdict, PyTorch's peak on the rank that needs most, the bytes at
this peak that no object explains, and the last lines of a run that fails. The table has a row for each mode
and a column for each of ``--ranks``: that peak, or, for ``real/N``, whether each rank that also ran as
``R/N`` or in ``all/N`` had these peaks, allocated and reserved. Exits with 1 if not, if a run fails that
``REFUSED`` does not list, if one of those succeeds, or if one that trains, as all but those of
``collectives.py`` do, fits without having made a training step. Scripts whose package is not installed are
skipped by name.
"""

import ast
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from measuring import command_line, lacks_steps, memfit_json, parts, table, write_json

import memfit
from memfit.records import GroupBy

SCRIPTS = Path(__file__).parent / "parallel_modes"
RANKS = ("0/2", "1/2", "0/8", "3/8", "7/8")
LIMIT = 150.0
"""Seconds for one run: none of them may wait for another rank."""
REFUSED = {
    "collectives:any_source": "ProcessGroupNCCL does not support recvAnysource",
    "collectives:split": "No device associated with the default pg",
    "collectives:symmetric_memory": "the ghost does not implement cuMemExportToShareableHandle",
}
"""Variant -> the reason why memfit refuses it, or why the script fails on a card, too."""
_WRAPPED = (
    "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap=Block --use_fsdp"
)
LAUNCHED = {
    "libraries:launched_ddp": "--multi_gpu --mixed_precision=bf16",
    "libraries:launched_accumulating": "--multi_gpu --mixed_precision=fp16",
    "libraries:launched_fsdp1": f"{_WRAPPED} --mixed_precision=bf16",
    "libraries:launched_fsdp1_flat": f"{_WRAPPED} --fsdp_use_orig_params=false",
    "libraries:launched_fsdp2": f"{_WRAPPED} --fsdp_version=2 --mixed_precision=bf16",
}
"""Variant -> the options of ``accelerate launch`` that it runs with."""
AT_LEAST_4 = ("fsdp2:three_dimensions",)
"""Modes that do not run as two ranks."""
NEEDS = {"deepspeed_engines": "deepspeed"}
"""Script -> the package that it needs and memfit's own environment lacks."""


@dataclass(frozen=True)
class Answer:
    """What memfit said about one variant, as one rank."""

    variant: str
    rank: str
    verdict: str
    allocated: int
    unknown: int
    seconds: float
    said: str
    peaks: dict[int, tuple[int, int]]
    """By rank that ran: most bytes allocated, and reserved, if all GPU work is done at once."""

    @property
    def expected(self) -> bool:
        """Whether the run ended as ``REFUSED`` says."""
        reason = REFUSED.get(self.variant)
        return self.verdict == "fits" if reason is None else reason in self.said


def variants(script: Path) -> Iterator[str]:
    """Yield the functions of a script that it runs by name: those that take the device alone, or nothing.

    >>> {"data_parallel:static_graph", "data_parallel:join"} <= set(variants(SCRIPTS / "data_parallel.py"))
    True
    """
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("partial("):
            if (name := ast.unparse(node.targets[0])).islower():
                yield f"{script.stem}:{name}"
        elif isinstance(node, ast.FunctionDef):
            required = len(node.args.args) - len(node.args.defaults)
            if not node.args.kwarg and [each.arg for each in node.args.args[:required]] in ([], ["device"]):
                yield f"{script.stem}:{node.name}"


def run(variant: str, rank: str, folder: Path) -> Answer:
    """Run a variant as one rank of a job, or as all of them."""
    script, name = variant.split(":")
    own, ranks = rank.split("/")
    trace = folder / "run.memfit"
    trace.unlink(missing_ok=True)
    which = ["--all-ranks"] if own == "all" else ["--rank", own]
    counted = () if own == "real" else ("--nproc", ranks, *which)
    by = LAUNCHED.get(variant, "").split()
    launch = ("accelerate", "launch", *by) if by and own != "real" else ()
    file = str(SCRIPTS / f"{script}.py")
    job = ("--gpu", "H100", *counted, "--to-end", "-o", str(trace), *launch, file, name)
    limit = LIMIT if own.isdecimal() else LIMIT * int(ranks)
    began = time.monotonic()
    try:
        real = ("accelerate.commands.launch", *by, "--num_processes")
        real = real if by else ("torch.distributed.run", "--nproc-per-node")
        launcher = ("-m", *real, ranks) if own == "real" else ()
        answer, done = memfit_json("dry-run", *job, launcher=launcher, folder=folder, seconds=limit)
    except subprocess.TimeoutExpired:
        return Answer(variant, rank, "hangs", 0, 0, limit, "", {})
    seconds = time.monotonic() - began
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if answer is None:
        return Answer(variant, rank, f"exit {done.returncode}", 0, 0, seconds, lines[-1] if lines else "", {})
    unknown = 0
    if trace.exists() and answer["peak"]["allocated"]:
        held = memfit.explain(trace).held.rows[GroupBy.CATEGORY]
        unknown = sum(row.bytes for row in held if row.name in ("unknown", "before the history"))
    verdict = answer["verdict"] if not done.returncode else f"exit {done.returncode}"
    if verdict == "fits" and lacks_steps(answer, trains=script != "collectives"):
        verdict = "fits, 0 steps"
    said = "" if not done.returncode else " | ".join(lines[-3:])
    peak, peaks = answer["peak"], {}
    for row in answer["ranks"] or [{"rank": int(own), "also": (), "peak": answer["range"] or peak}]:
        sizes = (row["peak"][name] for name in ("allocated", "reserved"))
        least = tuple(each if isinstance(each, int) else each["least"] for each in sizes)
        peaks |= dict.fromkeys((row["rank"], *row["also"]), least)
    return Answer(variant, rank, verdict, peak["allocated"], unknown, seconds, said, peaks)


def compared(real: Answer, answers: Iterable[Answer]) -> str:
    """Say whether ranks had the same peaks as real processes and as one process that stands for a rank.

    >>> one = Answer("plain", "1/2", "fits", 7, 0, 1.0, "", {1: (7, 8)})
    >>> compared(Answer("plain", "real/2", "fits", 7, 0, 1.0, "", {0: (7, 8), 1: (7, 8)}), [one])
    'equal'
    >>> compared(Answer("plain", "real/2", "fits", 7, 0, 1.0, "", {0: (7, 8), 1: (7, 9)}), [one])
    'differs'
    """
    ranks = real.rank.removeprefix("real")
    alone = [each.peaks.items() for each in answers if each.rank.endswith(ranks) and each is not real]
    if not alone or not real.peaks:
        return "-"
    return "equal" if all(peaks <= real.peaks.items() for peaks in alone) else "differs"


def markdown(answers: Sequence[Answer], ranks: Sequence[str]) -> str:
    """Return the table of a file in ``results/``."""
    rows = []
    for variant in dict.fromkeys(each.variant for each in answers):
        own = {each.rank: each for each in answers if each.variant == variant}
        cells = {rank: f"{each.allocated:,}" for rank, each in own.items()}
        cells |= {rank: compared(own[rank], own.values()) for rank in own if rank.startswith("real")}
        verdict = "; ".join(sorted({each.verdict for each in own.values()}))
        verdict = f"refused: {REFUSED[variant]}" if variant in REFUSED else verdict
        shown = (cells.get(rank, "-") for rank in ranks)
        rows.append((variant, *shown, max(each.unknown for each in own.values()), verdict))
    return table(("mode", *ranks, "unexplained", "verdict"), f"l{'r' * len(ranks)}rl", rows) + "\n"


def main() -> int:
    """Run the variants and print a table; return 1 if one did not end as expected."""
    parser = command_line(__doc__, results=True)
    parser.add_argument("variants", nargs="*", help="SCRIPT or SCRIPT:VARIANT (default: all)")
    parser.add_argument("--ranks", type=parts, default=RANKS, metavar="R/N,...")
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    known = [each for path in sorted(SCRIPTS.glob("*.py")) if path.stem != "jobs" for each in variants(path)]
    chosen = [
        each for each in known if not arguments.variants or {each, each.split(":")[0]} & {*arguments.variants}
    ]
    for script, package in NEEDS.items():
        if not find_spec(package) and (absent := [each for each in chosen if each.startswith(f"{script}:")]):
            print(f"skipped, as {package} is not installed: {', '.join(absent)}")
            chosen = [each for each in chosen if each not in absent]
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        for variant in chosen:
            for rank in arguments.ranks:
                if variant in AT_LEAST_4 and rank.endswith("/2"):
                    continue
                answer = run(variant, rank, Path(folder))
                answers.append(answer)
                print(
                    f"{variant:44} {rank:>5}  {answer.verdict:10} {answer.allocated:13,} B  unknown "
                    f"{answer.unknown:9,} B  {answer.seconds:5.1f} s"
                    f"{'' if answer.expected else '  UNEXPECTED'}  {answer.said[:300]}",
                    flush=True,
                )
    written = markdown(answers, arguments.ranks)
    if arguments.markdown:
        arguments.markdown.write_text(written)
    write_json(arguments.json, [asdict(answer) for answer in answers])
    return int("differs" in written or not all(answer.expected for answer in answers))


if __name__ == "__main__":
    sys.exit(main())
