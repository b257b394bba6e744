r"""Dry-run training scripts as the examples of twelve libraries write them, and check the report's rows.

    python benchmarks/library_scripts.py [SCRIPT ...] [--skip-missing] [--markdown FILE] [--json FILE]

The scripts are in benchmarks/library_scripts/. They run unmodified: random weights, tokenizers and data sets
that they build themselves, no download. Each runs twice on the ghost, once as a user would run it and once
under ``attribution_truth.py``. The benchmark checks that

- the script reaches its third training step, after the number of backwards that its settings imply;
- the steps and the peak are those that the script itself counts and PyTorch reports, to the byte;
- every peak that the script prints on its way is one that the trace had;
- at each backward, and after each optimizer step but the last, no row differs from the truth by 1 % of the
  peak or more.

Without --markdown the tables go to standard output. Exits with 1 if a check fails, and, unless
--skip-missing is given, if a package is missing. Needs, in the versions that the results were made with:

    pip install transformers==5.23.0 datasets==5.2.0 trl==1.16.0 peft==0.21.2 bitsandbytes==0.50.2 \
        accelerate==1.15.0 diffusers==0.42.1 timm==1.0.31 torchvision==0.29.1 lightning==2.6.6 \
        ultralytics==8.4.190 gymnasium==1.4.0
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from measuring import ROOT, command_line, memfit_json, table, write_json

import memfit
from memfit.allocator.timeline import memory_timeline
from memfit.analysis.attribution import attribute_allocations
from memfit.records import Attribution, Category, MarkKind, Trace
from memfit.units import format_bytes

HERE = ROOT / "benchmarks/library_scripts"
TRUTH = ROOT / "tests/support/attribution_truth.py"
STEPS = 3
LARGE = 0.01
"""The share of the peak from which a row is listed, and a difference from the truth is a failure."""
LIMIT = 900
"""Seconds that one run may take."""
ROWS = {
    "saved": (Category.ACTIVATION,),
    "parameters": (Category.PARAMETER,),
    "copies": (Category.COPY,),
    "buffers": (Category.BUFFER,),
    "inputs": (Category.INPUT, Category.HELD),
    "gradients": (Category.GRADIENT,),
    "optimizer state": (Category.OPTIMIZER_STATE,),
}
"""Name in the truth -> categories; the truth does not separate inputs from what else the script holds."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "YOLO_OFFLINE": "true"}


@dataclass(frozen=True, slots=True)
class LibraryScript:
    """A script, the packages it needs besides torch, and its backwards up to the end of the third step."""

    name: str
    packages: tuple[str, ...]
    backwards: int = STEPS
    options: tuple[str, ...] = ()
    """memfit's options, for a script that the ghost's default values end."""


HUGGING_FACE = ("transformers", "datasets", "accelerate")
TRL = ("trl", *HUGGING_FACE)
SCRIPTS = (
    LibraryScript("run_clm", HUGGING_FACE),
    LibraryScript("run_glue", HUGGING_FACE),
    LibraryScript("trl_sft", TRL, backwards=6),  # two batches are accumulated
    LibraryScript("trl_dpo", TRL),
    # Of the mask of tokens up to the end of each completion, the ghost copies False; a completion has tokens.
    LibraryScript("trl_grpo", TRL, options=("--values", "grpo_trainer.py:1887=true")),
    LibraryScript("qlora_sft", ("bitsandbytes", "peft", *TRL)),
    LibraryScript("diffusers_unconditional", ("diffusers", "accelerate")),
    LibraryScript("timm_train", ("timm", "torchvision")),
    LibraryScript("torchvision_detection", ("torchvision",)),
    LibraryScript("lightning_fit", ("lightning", "torchvision")),
    # ultralytics counts the first step twice.
    LibraryScript("ultralytics_train", ("ultralytics",), backwards=4),
    LibraryScript("cleanrl_ppo", ("gymnasium",)),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the report at a moment of the run, and the truth, in bytes."""

    name: str
    moment: str
    ours: int
    truth: int


@dataclass(frozen=True, slots=True)
class Result:
    """What the runs of one script showed."""

    script: str
    versions: dict[str, str]
    verdict: str
    steps: int
    backwards: int
    allocated: int
    process: int
    rows: dict[str, int]
    """The terms of the report at the peak, of 1 % or more."""
    compared: tuple[Row, ...]
    """For each row, the moment at which it differs most from the truth."""
    notes: tuple[tuple[str, str], ...]
    """Text and place of each."""
    failures: tuple[str, ...]


def missing(packages: Iterable[str]) -> list[str]:
    """Return the packages that are not installed."""
    return [name for name in packages if not _version(name)]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def dry_run(options: Sequence[str], *script: str) -> tuple[dict[str, Any] | None, str]:
    """Dry-run a script; return the public JSON, or None if memfit wrote none, and the output."""
    found, done = memfit_json("dry-run", *options, "--", *script, environment=OFFLINE, seconds=LIMIT)
    return found, done.stdout + done.stderr


def measure(script: LibraryScript, folder: Path) -> Result:
    """Run a script both ways and compare."""
    path, kept, facts = str(HERE / f"{script.name}.py"), folder / "run.memfit", folder / "truth"
    kept.unlink(missing_ok=True)
    facts.unlink(missing_ok=True)
    report, output = dry_run((*script.options, "-o", str(kept)), path)
    if report is None:
        return _crashed(script, f"no report: {output[-300:]}")
    checked, _ = dry_run((*script.options, "--no-labels"), str(TRUTH), str(facts), path)
    trace = memfit.read(kept)
    line = memory_timeline(trace)
    compared: tuple[Row, ...] = ()
    failures = list(_ended_early(script, report, trace))
    peak = report["peak"]["allocated"]
    if checked is None or not facts.exists():
        failures.append("the run under attribution_truth.py failed")
    elif not failures:
        truth = json.loads(facts.read_text())
        compared = tuple(worst(rows(trace, attribute_allocations(trace, line), truth)))
        failures += [
            f"{row.name} at {row.moment}: {row.ours:,} B, truth {row.truth:,} B"
            for row in compared
            if abs(row.ours - row.truth) >= LARGE * peak
        ]
        failures += miscounted(script, checked, truth)
    peaks = set(np.maximum.accumulate(line.allocated).tolist())
    failures += [
        f"the script printed {number:,} B, which was never the peak"
        for number in printed_peaks(output)
        if number not in peaks
    ]
    return Result(
        script=script.name,
        versions={name: _version(name) for name in ("torch", *script.packages)},
        verdict=report["verdict"],
        steps=report["steps"],
        backwards=_backwards(trace),
        allocated=peak,
        process=report["peak"]["process"],
        rows={one["name"]: one["bytes"] for one in report["terms"] if one["bytes"] >= LARGE * peak},
        compared=compared,
        notes=tuple(_plain(one) for one in report["notes"]),
        failures=tuple(failures),
    )


def printed_peaks(output: str) -> list[int]:
    r"""Return the bytes that a script printed: at the end of lines, with thousands separators.

    >>> printed_peaks("step 0  1,024 B\r1/50 2,048 B\nbatch of 3 B\n")
    [1024, 2048]
    """
    lines = output.replace("\r", "\n")
    numbers = re.findall(r"\b(\d+(?:,\d{3})+) B$", lines, re.MULTILINE)
    return [int(number.replace(",", "")) for number in numbers]


def rows(trace: Trace, attribution: Attribution, truth: Mapping[str, list[dict[str, int]]]) -> Iterator[Row]:
    """Yield each row at each moment of the truth; backwards and steps are counted alike on both sides."""
    for kind, moment in ((MarkKind.BACKWARD, "backward"), (MarkKind.OPTIMIZER_STEP, "optimizer step")):
        marks = [mark.position - 1 for mark in trace.marks if mark.kind is kind]
        for number, (event, found) in enumerate(zip(marks, truth[moment], strict=False), 1):
            alive = attribution.alive(event)
            category, requested = attribution.category[alive], attribution.requested[alive]
            for name in found.keys() & ROWS.keys():
                ours = int(requested[np.isin(category, ROWS[name])].sum())
                yield Row(name, f"{moment} {number}", ours, found[name])


def miscounted(
    script: LibraryScript, report: Mapping[str, Any], truth: Mapping[str, list[dict[str, int]]]
) -> Iterator[str]:
    """Yield how the counts under ``attribution_truth.py`` differ from memfit's or from the expected."""
    end = truth["end"][0]
    counted = {"steps": end["steps"], "backwards": len(truth["backward"]), "peak": end["peak"]}
    expected = {"steps": STEPS, "backwards": script.backwards, "peak": report["peak"]["allocated"]}
    if counted != expected:
        yield f"the script counts {counted}, expected {expected}"


def worst(found: Iterable[Row]) -> Iterator[Row]:
    """Yield, for each name, the row that differs most from the truth."""
    by_name: dict[str, list[Row]] = {}
    for row in found:
        by_name.setdefault(row.name, []).append(row)
    for name in ROWS:
        if name in by_name:
            yield max(by_name[name], key=lambda row: abs(row.ours - row.truth))


def _ended_early(script: LibraryScript, report: Mapping[str, Any], trace: Trace) -> Iterator[str]:
    if report["steps"] != STEPS:
        end = report["end"]
        how = f"{end['reason']}, {end['exception']} {end['where']}".rstrip()
        yield f"{report['steps']} of {STEPS} steps: {how}"
    elif _backwards(trace) != script.backwards:
        yield f"{_backwards(trace)} backwards, {script.backwards} expected"


def _backwards(trace: Trace) -> int:
    return sum(mark.kind is MarkKind.BACKWARD for mark in trace.marks)


def _crashed(script: LibraryScript, text: str) -> Result:
    return Result(script.name, {}, "no report", 0, 0, 0, 0, {}, (), (), (text,))


def _plain(note: Mapping[str, str]) -> tuple[str, str]:
    where = re.sub(r"\S*/(?=\S+\.py:\d)", "", note["where"])
    return f"({note['provenance']}) {note['text']}", where


def grouped(notes: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the text of the first of all notes that differ in figures only, and how many they are."""
    alike: dict[str, list[str]] = {}
    for text, _ in notes:
        alike.setdefault(re.sub(r"[\d,]+", "", text), []).append(text)
    for texts in alike.values():
        others = f" ({len(texts)} such notes)" if len(texts) > 1 else ""
        yield f"- {texts[0]}{others}"


def overview(results: Iterable[Result]) -> str:
    """Return a table of one line per script as Markdown."""
    rows = []
    for result in results:
        largest = max(result.compared, key=lambda row: abs(row.ours - row.truth), default=None)
        difference = f"{largest.name}: {largest.ours - largest.truth:+,} B" if largest else ""
        failed = "; ".join(result.failures) or "nothing"
        rows.append((result.script, result.verdict, f"{result.allocated:,} B", difference, failed))
    return table(("script", "verdict", "allocated", "largest difference", "failed"), "llrll", rows) + "\n"


def tables(result: Result) -> str:
    """Return the figures of one script as Markdown."""
    packages = ", ".join(f"{name} {number}" for name, number in result.versions.items())
    counts = f"{result.verdict}, {result.steps} steps, {result.backwards} backwards"
    lines = [
        f"## {result.script}",
        "",
        f"{counts}; allocated {result.allocated:,} B, process {format_bytes(result.process)} ({packages})",
        "",
        table(("row", "at the peak"), "lr", ((name, f"{size:,}") for name, size in result.rows.items())),
        "",
        table(
            ("row", "at its largest difference", "memfit", "truth"),
            "llrr",
            ((row.name, row.moment, f"{row.ours:,}", f"{row.truth:,}") for row in result.compared),
        ),
        "",
        *grouped(result.notes),
        *(f"- **{failure}**" for failure in result.failures),
        "",
    ]
    return "\n".join(lines)


def document(results: Sequence[Result]) -> str:
    """Return an overview and the tables of all scripts as Markdown."""
    return "\n".join((overview(results), *map(tables, results)))


def write(results: Sequence[Result], markdown: Path | None, to_json: Path | None) -> None:
    """Write the results so far to the files that were asked for."""
    if markdown:
        markdown.write_text(document(results))
    write_json(to_json, [asdict(result) for result in results])


def main() -> int:
    """Run the scripts and print a table for each."""
    parser = command_line(__doc__, results=True)
    names = [script.name for script in SCRIPTS]
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--skip-missing", action="store_true", help="a missing package is no failure")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.scripts) - set(names)):
        parser.error(f"no script {', '.join(unknown)}; there are {', '.join(names)}")
    results, skipped = [], []
    with tempfile.TemporaryDirectory() as folder:
        for script in SCRIPTS:
            if arguments.scripts and script.name not in arguments.scripts:
                continue
            if absent := missing(script.packages):
                skipped.append(script.name)
                print(f"SKIPPED {script.name}: not installed: {', '.join(absent)}", file=sys.stderr)
                continue
            results.append(result := measure(script, Path(folder)))
            outcome = "; ".join(result.failures) or "as expected"
            print(f"{script.name:24} {result.verdict:10} {outcome}", file=sys.stderr, flush=True)
            write(results, arguments.markdown, arguments.json)
    if not arguments.markdown:
        print(document(results))
    if skipped:
        print(f"{len(skipped)} of {len(names)} scripts skipped: {', '.join(skipped)}", file=sys.stderr)
    failed = any(result.failures for result in results) or bool(skipped and not arguments.skip_missing)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
