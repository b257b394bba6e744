"""Compare figures that others published for real cards with the same jobs on the ghost.

    python benchmarks/accuracy.py [--sets DE] [--markdown FILE] [--json FILE] [--runs FILE]
    python benchmarks/accuracy.py --sets J [--markdown FILE] [--chart FILE] [--runs FILE]

Without --markdown the table goes to standard output. benchmarks/accuracy/rows.toml holds the rows, their
sources and the explanations of differences; those of set Q are the rows of times.toml whose authors counted
reserved bytes. Set J, the memory of whole cards, runs only by itself: see published_cards.py. --runs caches
the results of runs in a file, so that a later call does not repeat them. Exits with 1 when a row differs by
more than rows.toml allows.
"""

import argparse
import json
import platform
import re
import shlex
import sys
import threading
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import distributions, version
from pathlib import Path

from measuring import (
    MIB,
    command_line,
    lacks_steps,
    memfit_json,
    table,
    with_packages,
    write_json,
    write_or_print,
)

HERE = Path(__file__).parent / "accuracy"
EMPTY: Mapping[str, str] = {}
MANY = 1000  # larger figures are shown without decimals
COLUMNS = (
    *("set", "job", "published", "ghost", "", "as the author's software", ""),
    "explanation of the difference",
)
BYTES = {"B": 1, "MiB": 1 << 20, "GiB": 1 << 30, "GB": 10**9}


@dataclass(frozen=True)
class Row:
    """One published figure and the run that should reproduce it; rows.toml explains the fields."""

    set: str
    what: str
    run: tuple[str, ...]
    figure: str
    published: float
    unit: str
    source: str
    within: float
    explained: str
    then: tuple[str, ...] = ()
    minus: tuple[str, ...] = ()
    outside: float = 0
    least: float | None = None
    per: int = 1
    over: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()

    @property
    def theirs(self) -> float:
        """The part of the published figure that belongs to PyTorch's allocator, in `unit`."""
        return (self.published - self.outside) / self.per

    def ours(self, runs: "Runs", *, then: bool) -> float:
        """Return the ghost's figure, in `unit`; with `then`, of a run that imitates the author's software."""
        extra = self.then if then else ()
        amount = runs.peaks(self, (*self.run, *extra))[self.figure]
        if self.minus:
            amount -= runs.peaks(self, (*self.minus, *extra))[self.figure]
        if self.over:
            return amount / runs.peaks(self, (*self.over, *extra))[self.figure]
        return amount / self.per / BYTES[self.unit]


@dataclass(frozen=True)
class RowResult:
    """A row with the ghost's figures."""

    row: Row
    today: float
    """The ghost's figure with the installed software, in the row's unit."""
    then: float | None
    """The ghost's figure with the row's `then` arguments; None if the row has none."""
    lower: float | None = None
    """The lower end of the ghost's range, of which ``today`` is the upper; None for a row without a range."""

    @property
    def difference(self) -> float:
        """Difference of the run closest to the author's, as `difference` gives it."""
        return difference(self.row, self.today if self.then is None else self.then)

    @property
    def met(self) -> bool:
        """Whether the difference is within the row's limit, and what was measured inside the range."""
        if self.row.least is None or self.lower is None:
            return abs(self.difference) <= self.row.within
        return self.lower <= self.row.least and 0 <= self.difference <= self.row.within


def difference(row: Row, value: float) -> float:
    """Return how much a value differs from the published figure: in percent of it, or in bytes (unit B)."""
    return value - row.theirs if row.unit == "B" else 100 * (value - row.theirs) / row.theirs


def rows(sets: str = "") -> tuple[tuple[Row, ...], dict[str, dict[str, str]]]:
    """Read rows.toml; return the rows of the given sets (letters; all by default) and the sources by name."""
    table = tomllib.loads((HERE / "rows.toml").read_text())
    lists = ("run", "then", "minus", "over", "options")
    chosen = (
        Row(**{name: tuple(value) if name in lists else value for name, value in row.items()})
        for row in table["row"]
        if not sets or row["set"] in sets
    )
    timed, cited = _timed_rows() if not sets or "Q" in sets else ((), {})
    return (*chosen, *timed), table["source"] | cited


def _timed_rows() -> tuple[tuple[Row, ...], dict[str, dict[str, str]]]:
    """Return set Q, two rows for each row of times.toml with reserved bytes, and its sources."""
    import times

    found, sources = times.read_rows()
    cited = {each["name"]: {"cite": each["cite"], "of": each["assumed"]} for each in sources}
    used: dict[str, dict[str, str]] = {}
    made = []
    for row in found:
        if row.reserved is None or row.allocated is None:
            continue
        used[row.source] = cited[row.source]
        for figure, published, within in (
            ("allocated", row.allocated, 0.1),
            ("reserved", row.reserved, row.reserved_within),
        ):
            made.append(
                Row(
                    set="Q",
                    what=f"{row.run}, {row.card}",
                    run=(f"../times/{row.script}", *shlex.split(row.run)),
                    figure=figure,
                    published=published / MIB,
                    unit="MiB",
                    source=row.source,
                    within=within,
                    explained=""
                    if figure == "allocated"
                    else row.explained or "another PyTorch than the author's",
                    options=("--gpu", row.card),
                    packages=row.packages,
                )
            )
    return tuple(made), used


class Runs:
    """The peaks of every script. Each runs once; a file, if given, caches the results."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known = json.loads(path.read_text()) if path is not None and path.exists() else {}

    def peaks(self, row: Row, run: tuple[str, ...]) -> dict[str, int]:
        """Return the peaks of one run: allocated, reserved and process; bytes."""
        return self.peaks_of(row.options, run, row.environment | with_packages(row.packages))

    def peaks_of(
        self, options: tuple[str, ...], run: tuple[str, ...], environment: Mapping[str, str] = EMPTY
    ) -> dict[str, int]:
        """Return the peaks of a script under options of a dry run; threads may call this side by side."""
        settings = [f"{name}={value}" for name, value in environment.items()]
        name = " ".join((*settings, *options, *run))
        if name not in self._known:
            found = dry_run(run, options, environment)
            with self._lock:
                self._known[name] = found
                if self._path is not None:
                    self._path.write_text(json.dumps(self._known, indent=1) + "\n")
        return self._known[name]


def dry_run(run: tuple[str, ...], options: tuple[str, ...], environment: Mapping[str, str]) -> dict[str, int]:
    """Run a script of benchmarks/accuracy/ to completion under `memfit dry-run`.

    Returns:
        Its peaks by name, and the figures it printed as `name 1.5 MiB`; bytes.
    """
    script, *arguments = run
    job = ("--steps", "1000000", *options, "--", str(HERE / script), *arguments)
    found, done = memfit_json("dry-run", *job, environment=environment)
    if found is None or found["verdict"] not in ("fits", "tight") or found["end"]["reason"] != "end":
        raise SystemExit(f"{' '.join(run)} did not run to completion on the ghost:\n{done.stderr[-2000:]}")
    if lacks_steps(found):
        raise SystemExit(f"{' '.join(run)} ran backward passes, and made no training step on the ghost.")
    printed = re.findall(r"^(\w+) +([\d.]+) MiB$", done.stdout, re.MULTILINE)
    own = {name: int(float(amount) * BYTES["MiB"]) for name, amount in printed}
    names = ("allocated", "reserved", "process")
    exact = {name: dict.fromkeys(("least", "most"), found["peak"][name]) for name in names}
    ranges = found["range"] or exact
    ends = {f"{end}_{name}": ranges[name][end] for name in names for end in ("least", "most")}
    return own | ends | {name: found["peak"][name] for name in names}


def measure(row: Row, runs: Runs) -> RowResult:
    """Run the scripts that a row needs."""
    lower = None
    if row.least is not None:
        lower = replace(row, figure=f"least_{row.figure}").ours(runs, then=False)
    return RowResult(row, row.ours(runs, then=False), row.ours(runs, then=True) if row.then else None, lower)


def markdown(results: Iterable[RowResult], sources: dict[str, dict[str, str]]) -> str:
    """Return the table, followed by its sources."""
    results, rows = tuple(results), []
    for result in results:
        row = result.row
        then = ("", "") if result.then is None else _shown(row, result.then)
        rows.append((row.set, *cells(result), *then, row.explained))
    used = dict.fromkeys((result.row.set, result.row.source) for result in results)
    cited = [f"- {letter}: {sources[name]['cite']}. {sources[name]['of']}." for letter, name in used]
    return "\n".join((table(COLUMNS, "llrrrrrl", rows), "", *cited, ""))


def cells(result: RowResult) -> tuple[str, str, str, str]:
    """Return a row's job, the published figure, the ghost's with today's software, and the difference."""
    row = result.row
    figure = "" if row.figure in row.what else f", {row.figure}"
    theirs, (ours, by) = _figure(row, row.theirs), _shown(row, result.today)
    if row.least is not None and result.lower is not None:
        theirs, ours = (f"{_figure(row, row.least)} to {theirs}", f"{_figure(row, result.lower)} to {ours}")
    return f"{row.what}{figure}", f"{theirs} {row.unit}", ours, by


def _shown(row: Row, value: float) -> tuple[str, str]:
    return _figure(row, value), _signed(row, difference(row, value))


def _figure(row: Row, value: float) -> str:
    digits = 3 if row.over else 2 if row.theirs < MANY else 0
    return f"{value:,.{digits}f}"


def _signed(row: Row, amount: float) -> str:
    return f"{amount:+,.0f} B" if row.unit == "B" else f"{amount:+.2f} %"


def versions() -> str:
    """Return the versions that the ghost ran with."""
    cudnn = sorted(found.name for found in distributions() if found.name.startswith("nvidia-cudnn-cu"))
    names = ("torch", "torchvision", "transformers", *cudnn)
    return ", ".join((*(f"{name} {version(name)}" for name in names), f"Python {platform.python_version()}"))


def main() -> None:
    """Run the benchmark."""
    parser = command_line(__doc__, results=True)
    parser.add_argument("--sets", default="", help="letters of the sets to run (default: all)")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--runs", type=Path, help="file that caches the results of runs")
    parser.add_argument("--chart", type=Path, help="draw set J to this file, as SVG")
    options = parser.parse_args()
    if options.sets == "J":
        _published_cards(options)
        return
    chosen, sources = rows(options.sets)
    runs, results = Runs(options.runs), []
    for row in chosen:
        results.append(result := measure(row, runs))
        print(f"{row.set} {row.what}: {_signed(row, result.difference)}", file=sys.stderr, flush=True)
    text = f"Ghost: {versions()}.\n\n{markdown(results, sources)}"
    write_or_print(options.markdown, text)
    measured = [asdict(result) | {"difference": result.difference, "met": result.met} for result in results]
    write_json(options.json, {"ghost": versions(), "rows": measured})
    if missed := [f"{result.row.set} {result.row.what}" for result in results if not result.met]:
        raise SystemExit("These rows differ by more than rows.toml allows: " + "; ".join(missed))


def _published_cards(options: argparse.Namespace) -> None:
    """Run set J."""
    import published_cards

    results = published_cards.predict(published_cards.read_rows(), Runs(options.runs).peaks_of)
    text = f"Ghost: {versions()}.\n\n{published_cards.markdown(results)}"
    write_or_print(options.markdown, text)
    if options.chart:
        published_cards.chart(results, options.chart)


if __name__ == "__main__":
    main()
