"""Compare step times that others published for real cards with what memfit predicts for the same scripts.

    python benchmarks/times.py [--rows REGEX] [--without-own] [--peer] [--traces FOLDER] [--json FILE]

benchmarks/times.toml holds the rows, their sources and what they assume; blind rows are reported apart. Each
distinct script runs once under `memfit dry-run`, for its card; --traces keeps what the ghost records, so that
a later call only predicts.
--peer runs it again under PyTorch's RuntimeEstimator, for the cards of its table of data sheets.
Exits with 1 when a script fails, or its peak differs from its author's by more than times.toml allows.
"""

import math
import re
import shlex
import statistics
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring import command_line, memfit_json, table, with_packages, write_json, write_or_print

if TYPE_CHECKING:
    from memfit.devices import Device
    from memfit.records import WholeStep

HERE = Path(__file__).parent
_PEERS_CARDS = {"H100-80GB": "NVIDIA H100", "A100-80GB": "NVIDIA A100", "L4": "NVIDIA L4"}
"""Names in PyTorch's table of data sheets. Source: torch/_inductor/analysis/device_info.py, 2.14.1."""


@dataclass(frozen=True)
class TimedRow:
    """One published step time and the script that should take as long; times.toml explains the fields."""

    source: str
    card: str
    script: str
    run: str
    published: float
    unit: str
    counts: str
    torch: str
    tf32: bool
    per: int = 1
    ranks: int = 1
    ghost: str = ""
    memory: str = ""
    plan: str = ""
    allocated: int | None = None
    reserved: int | None = None
    reserved_within: float = 1.5
    explained: str = ""
    within: float = 0.05
    packages: tuple[str, ...] = ()
    blind: str = ""
    pair: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The published seconds of a step."""
        if self.unit == "ms":
            return self.published / 1e3
        return (1 if self.unit == "steps/s" else self.per) / self.published

    @property
    def cards(self) -> str:
        """The card, how many of them, and whether the row is blind."""
        cards = f"{self.ranks} x {self.card}" if self.ranks > 1 else self.card
        return f"{cards}, blind" if self.blind else cards

    @property
    def job(self) -> tuple[str, ...]:
        """The options of the dry run, the script and its arguments."""
        memory = ("--memory", self.memory) if self.memory else ()
        ranks = ("--nproc", str(self.ranks)) if self.ranks > 1 else ()
        plan = ("--plan", str(HERE / "times" / "plans" / self.plan)) if self.plan else ()
        script = str((HERE / "times" / self.script).resolve())
        options = ("--gpu", self.ghost or self.card, *memory, *ranks, *plan)
        return (*options, "--", script, *shlex.split(self.run))


@dataclass(frozen=True)
class TimedResult:
    """A row with what memfit predicts."""

    row: TimedRow
    predicted: float
    """Seconds of a step."""
    low: float
    """The interval that should hold nine rows of ten is from ``low`` to ``high``."""
    high: float
    roofline: float
    """Seconds by the data sheet alone, at least 5 us an operation: what memfit predicted before."""
    allocated: int
    """The peak of the dry run, bytes."""
    peer: float | None = None
    """Seconds by the roofline of PyTorch's RuntimeEstimator."""

    @property
    def error(self) -> float:
        """How much longer the predicted step is, relative to the published one."""
        return self.predicted / self.row.seconds - 1

    @property
    def held(self) -> bool:
        """Whether the interval contains the published time."""
        return self.low <= self.row.seconds <= self.high

    @property
    def memory_error(self) -> float | None:
        """How much more the script allocates than its author counted, relative; None if they did not."""
        return None if self.row.allocated is None else self.allocated / self.row.allocated - 1


@dataclass(frozen=True)
class Ratio:
    """The times of two rows that differ in one technique, per sample: the second's over the first's."""

    what: str
    published: float
    predicted: float


def read_rows(chosen: str = "") -> tuple[tuple[TimedRow, ...], list[dict[str, Any]]]:
    """Read times.toml; return the rows whose source, card, script or arguments match, and the sources."""
    sources = tomllib.loads((HERE / "times.toml").read_text())["source"]
    known = {field.name for field in fields(TimedRow)}
    rows = []
    for source in sources:
        for row in source["rows"]:
            every = {name: value for name, value in {**source, **row}.items() if name in known}
            lists = {name: tuple(every.pop(name, ())) for name in ("pair", "packages")}
            rows.append(TimedRow(source=source["name"], **lists, **every))
    text = {row: f"{row.source} {row.cards} {row.script} {row.run}" for row in rows}
    return tuple(row for row in rows if re.search(chosen, text[row])), sources


def _file_name(row: TimedRow) -> str:
    ranks = f" {row.ranks} ranks" if row.ranks > 1 else ""
    named = f"{row.ghost or row.card} {row.memory} {Path(row.script).name} {row.run}{row.plan}{ranks}"
    return re.sub(r"[^\w.]+", "-", named)


def record(row: TimedRow, folder: Path) -> tuple[Path, int]:
    """Run a row's script on the ghost, unless its trace is in the folder; return the trace and the peak.

    Raises:
        SystemExit: the script failed, or does not fit.
    """
    name = _file_name(row)
    trace, peak = folder / f"{name}.memfit", folder / f"{name}.bytes"
    if not (trace.exists() and peak.exists()):
        answer, done = memfit_json(
            "dry-run", "-o", str(trace), *row.job, environment=with_packages(row.packages)
        )
        if answer is None or answer["verdict"] not in ("fits", "tight") or not answer["steps"]:
            raise SystemExit(f"{' '.join(row.job)} did not run on the ghost:\n{done.stderr[-2000:]}")
        peak.write_text(str(answer["peak"]["allocated"]))
    return trace, int(peak.read_text())


def ask_peer(row: TimedRow, folder: Path) -> float | None:
    """Return the seconds of a row by PyTorch's RuntimeEstimator, or from the folder; None if it fails.

    It is a dispatch mode, under which nothing is compiled, and knows three of these cards, and one rank.
    """
    card = _PEERS_CARDS.get(row.card)
    if card is None or row.plan or row.ranks > 1 or "--compile" in row.run:
        return None
    kept = folder / f"{_file_name(row)}.peer"
    if not kept.exists():
        options, script = row.job[: row.job.index("--")], row.job[row.job.index("--") + 1 :]
        wrapper = str(HERE / "times" / "runtime_estimator.py")
        job = (*options, "--", wrapper, card, *script)
        _, done = memfit_json("dry-run", *job, environment=with_packages(row.packages))
        found = re.search(r"^RuntimeEstimator, .*: (\S+) (\S+)$", done.stderr, re.MULTILINE)
        if found is None:
            print(f"RuntimeEstimator failed:\n{done.stderr[-600:]}", file=sys.stderr)
        kept.write_text("" if found is None else " ".join(found.groups()))
    until_update, whole = map(float, kept.read_text().split() or ("nan", "nan"))
    seconds = (until_update if row.counts == "forward+backward" else whole) / 1e3
    return None if math.isnan(seconds) else seconds


def predict(trace: Path, row: TimedRow, *, without_own: bool) -> tuple[float, float, float, float]:
    """Return the seconds of a recorded step on a card, their interval, and the data sheet's seconds."""
    from memfit.devices import find_device
    from memfit.records import Phase
    from memfit.timing.step_time import step_time
    from memfit.trace.trace_file import read_trace

    recorded = read_trace(trace)
    step, labels = recorded.step, recorded.labels
    if step is None:
        raise SystemExit(f"{trace} holds no second training step")
    if row.counts == "forward+backward":
        passes = (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)
        order = zip(step.order, step.labels, strict=True)
        waits = {at for at, each in enumerate(step.operations) if each.name == "cuda.synchronize"}
        emptying = Phase.INPUT  # of the allocator's cache, whose frees wait before the timed part
        phases = ((each, labels[each[1]].phase) for each in order)
        kept = [
            each for each, phase in phases if phase in passes or (each[0] in waits and phase is not emptying)
        ]
        order, places = tuple(at for at, _ in kept), tuple(label for _, label in kept)
        step = replace(step, order=order, labels=places, after=())
    found = step_time(step, labels, find_device(row.card), without_own=without_own)
    if found is None:
        raise SystemExit(f"{trace}: the time of its step is not known")
    return found.seconds, found.low, found.high, roofline_seconds(step, find_device(row.card))


def roofline_seconds(step: "WholeStep", device: "Device") -> float:
    """Return the seconds of a step by the data sheet: full arithmetic rate or bandwidth, at least 5 us."""
    from memfit.timing.collective_times import link_bytes
    from memfit.timing.kernel_work import work_of

    single = "tf32" if step.tf32 else "fp32"
    names = {"float32": single, "float32 by tf32": single, "bfloat16": "bf16", "float16": "fp16"}
    seconds = []
    for operation in step.operations:
        tensors = (*operation.operands, *operation.results)
        wide = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}
        moved = operation.moved or sum(prod(each.shape) * wide.get(each.dtype, 1) for each in tensors)
        dtype = work_of(operation).dtype  # of a product, that of its matrices, whatever the result's
        rate = device.rate(names.get(dtype, dtype))
        traffic = moved / device.memory_bandwidth
        if operation.ranks > 1:
            traffic = link_bytes(operation) / device.peer_bandwidth
        seconds.append(max(operation.flops / rate, traffic, 5e-6))
    return sum(seconds[at] for at in step.order)


def ratios(results: Iterable[TimedResult]) -> list[Ratio]:
    """Return the ratios of the pairs that are among the results."""
    named: defaultdict[str, list[TimedResult]] = defaultdict(list)
    for result in results:
        for name in result.row.pair:
            named[name].append(result)
    found = []
    for name, pair in named.items():
        if len(pair) == 2:  # noqa: PLR2004 - a row that was not chosen leaves one
            first, second = pair
            samples = first.row.per / second.row.per
            published = samples * second.row.seconds / first.row.seconds
            found.append(Ratio(name, published, samples * second.predicted / first.predicted))
    return found


def summary(results: Sequence[TimedResult]) -> list[tuple[str, ...]]:
    """Return, for each card and for all, the rows, the median and 90 % error, and how many intervals held."""
    by_card: defaultdict[str, list[TimedResult]] = defaultdict(list)
    every: defaultdict[str, list[TimedResult]] = defaultdict(list)
    for result in results:
        by_card[result.row.cards].append(result)
        several = ", several cards" if result.row.ranks > 1 else ""
        every[f"all{several}{', blind' if result.row.blind else ''}"].append(result)
    lines = []
    for card, found in {**by_card, **every}.items():
        errors = sorted(abs(result.error) for result in found)
        ninth = errors[max(round(0.9 * len(errors)) - 1, 0)]
        held = sum(result.held for result in found) / len(found)
        signed = statistics.median(result.error for result in found)
        shown = (f"{part:.1%}" for part in (statistics.median(errors), ninth, held))
        plain = statistics.median(abs(each.roofline / each.row.seconds - 1) for each in found)
        lines.append((card, str(len(found)), *shown, f"{signed:+.1%}", f"{plain:.1%}"))
    return lines


def markdown(results: Sequence[TimedResult], sources: Iterable[Mapping[str, Any]]) -> str:
    """Return the tables of rows, cards and ratios, and the sources."""
    rows = []
    for result in results:
        row, memory = result.row, result.memory_error
        times = (f"{1e3 * row.seconds:,.1f}", f"{1e3 * result.predicted:,.1f}", f"{result.error:+.1%}")
        between, bytes_ = f"{1e3 * result.low:,.0f} to {1e3 * result.high:,.0f}", ""
        if memory is not None:
            bytes_ = f"{memory:+.2%}"
        plain = f"{result.roofline / row.seconds - 1:+.1%}"
        script = " ".join(filter(None, (Path(row.script).name, row.run, row.plan)))
        rows.append((row.source, row.cards, script, *times, between, plain, bytes_))
    columns = (
        "source",
        "card",
        "script",
        "published, ms",
        "predicted",
        "error",
        "interval",
        "data sheet",
        "allocated",
    )
    pairs = [(each.what, f"{each.published:.3f}", f"{each.predicted:.3f}") for each in ratios(results)]
    used = {result.row.source for result in results}
    cited = [
        f"- {source['name']}: {source['cite']}. Assumed: {source['assumed']}."
        + (f" Blind: first predicted on {source['blind']}." if "blind" in source else "")
        for source in sources
        if source["name"] in used
    ]
    compared = [result for result in results if result.peer is not None]
    medians = {
        "PyTorch's RuntimeEstimator": [(each.peer or 0) / each.row.seconds - 1 for each in compared],
        "the data sheet": [each.roofline / each.row.seconds - 1 for each in compared],
        "memfit": [each.error for each in compared],
    }
    peers = [
        (name, str(len(off)), f"{statistics.median(map(abs, off)):.1%}", f"{statistics.median(off):+.1%}")
        for name, off in medians.items()
        if off
    ]
    parts = (
        "# Step times: published, and predicted on the ghost",
        "What these rows can and cannot show: docs/time.md. `data sheet`: full rates, 5 us an operation.",
        table(columns, "lllrrrrrr", rows),
        table(
            ("card", "rows", "median error", "90 %", "held", "signed", "data sheet, median"),
            "lrrrrrr",
            summary(results),
        ),
        *([table(("on the same rows", "rows", "median error", "signed"), "lrrr", peers)] if peers else []),
        table(("technique, time per sample", "published", "predicted"), "lrr", pairs),
        "\n".join(cited),
    )
    return "\n\n".join(parts) + "\n"


def measure(
    rows: Iterable[TimedRow], folder: Path, *, without_own: bool, with_peer: bool
) -> list[TimedResult]:
    """Record and predict every row."""
    results = []
    for row in rows:
        trace, allocated = record(row, folder)
        found = predict(trace, row, without_own=without_own)
        peer = ask_peer(row, folder) if with_peer else None
        results.append(result := TimedResult(row, *found, allocated, peer))
        print(
            f"{row.source} {row.cards} {row.run} {row.plan}: {result.error:+.1%}",
            file=sys.stderr,
            flush=True,
        )
    return results


def main() -> None:
    """Run the benchmark."""
    parser = command_line(__doc__, results=True)
    parser.add_argument("--rows", default="", metavar="REGEX", help="of source, card, script and arguments")
    parser.add_argument("--without-own", action="store_true", help="as if no card had tables of its own")
    parser.add_argument("--peer", action="store_true", help="also ask PyTorch's RuntimeEstimator")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="keep traces, and use those there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this file")
    options = parser.parse_args()
    rows, sources = read_rows(options.rows)
    with tempfile.TemporaryDirectory() as new:
        folder = options.traces or Path(new)
        folder.mkdir(parents=True, exist_ok=True)
        results = measure(rows, folder, without_own=options.without_own, with_peer=options.peer)
    write_or_print(options.markdown, markdown(results, sources))
    found = [asdict(each) | {"seconds": each.row.seconds, "error": each.error} for each in results]
    write_json(options.json, {"rows": found, "ratios": [asdict(each) for each in ratios(results)]})
    missed = [each.row.run for each in results if abs(each.memory_error or 0) > each.row.within]
    if missed:
        raise SystemExit(f"These allocate more or less than their authors counted: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
