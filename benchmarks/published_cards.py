"""Set J of accuracy.py: memory that NVML reported for three cards, against the same jobs on the ghost.

    accuracy/milabench.csv ──> rows ──> a dry run per card, job and batch size ──> PyTorch's reserved bytes
                                          + the context of another card of its chip: the card is left out
                                          + what its driver reserves
                                          = the card's figure, as NVML's first memory call counts it

A row is compared in two ways: with the run's peak, and with the range from no workspaces to those that the
installed cuDNN suggests, which a dry run shows if its ends differ by over 2 %.
"""

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, median

from measuring import MIB, table

from memfit.devices import Device, find_device

ROWS = Path(__file__).parent / "accuracy" / "milabench.csv"
CARDS = {"H100": "H100-80GB", "H200": "H200", "L40S": "L40S"}
SAME_CHIP = {"H100": "H200", "H200": "H100-80GB", "L40S": "RTX 4090"}
"""The card whose context, by multiprocessors, predicts this one's."""
CONTIGUOUS = ("regnet_y_128gf", "convnext_large-fp32", "convnext_large-tf32", "convnext_large-fp16")
SLOPE, WIDTH = 0.005, 0.10
SHARE, LEAST = 0.02, 300
"""A row is met within the larger of this share of it and so many MiB."""
HEADINGS = (
    *("job", "card", "rows", "MiB per sample, published", "ghost", ""),
    *("published less reserved: least", "median", "most", "assumed outside", "farthest from the range"),
)
CONTEXT_HEADINGS = (
    *("card", "published less reserved, the most", "less the driver's", "assumed"),
    "by another card",
)
OUTSIDE_HEADINGS = "job", "card", "batch", "published", "range", "outside, its uncertainty taken off"
Peaks = Callable[[tuple[str, ...], tuple[str, ...]], Mapping[str, int]]
"""Runs a script of accuracy/ under options of a dry run, and returns its peaks in bytes."""


@dataclass(frozen=True)
class CardRow:
    """A published figure: MiB of the whole card, with this job alone on it."""

    card: str
    job: str
    batch: int
    workers: int
    published: float

    @property
    def run(self) -> tuple[str, ...]:
        """The script of accuracy/ that does the same, with its arguments."""
        size = ("--batch-size", str(self.batch))
        model, _, precision = self.job.partition("-")
        if model == "bert":
            return ("bert_mlm.py", *(["--fp16"] if precision == "fp16" else []), *size)
        settings = {"fp16": ["--fp16"], "fp32": [], "tf32": ["--tf32"], "": ["--tf32", "--fp16"]}[precision]
        layout = ["--channels-last"] if model == "resnet50" else []
        return ("torchvision_classifier.py", "--model", model, *settings, *layout, *size)


@dataclass(frozen=True)
class CardResult:
    """A published row and the ghost's figures, in MiB."""

    row: CardRow
    reserved: float
    least: float
    """By PyTorch, without workspaces if that is less."""
    most: float
    outside: float
    """What is assumed for the card outside PyTorch: the context of another card, and the driver's part."""
    known_outside: float
    """The same with the context that a dry run assumes for this card."""

    @property
    def difference(self) -> float:
        """The prediction less what was published."""
        return self.reserved + self.outside - self.row.published

    @property
    def beyond(self) -> float:
        """How far the published figure is outside the range; 0 inside."""
        return self._beyond(self.outside)

    @property
    def known_beyond(self) -> float:
        """The same with the card's own context, so that only PyTorch's part is compared."""
        return self._beyond(self.known_outside)

    def _beyond(self, outside: float) -> float:
        inside = self.row.published - outside
        return max(self.least - inside, inside - self.most, 0)

    @property
    def limit(self) -> float:
        """By how much the prediction may miss."""
        return max(SHARE * self.row.published, LEAST)


def read_rows() -> tuple[CardRow, ...]:
    """Read the published rows."""
    with ROWS.open(encoding="utf-8") as file:
        return tuple(
            CardRow(row["card"], row["job"], int(row["batch"]), int(row["workers"]), float(row["device_mib"]))
            for row in csv.DictReader(file)
        )


def predict(rows: Sequence[CardRow], peaks: Peaks) -> tuple[CardResult, ...]:
    """Run every job once on each card that has rows of it, as many at a time as there are processors."""
    wanted = dict.fromkeys((row.card, row.run) for row in rows)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = pool.map(lambda key: peaks(("--gpu", CARDS[key[0]]), key[1]), wanted)
        found = dict(zip(wanted, done, strict=True))
    devices = {card: find_device(name) for card, name in CARDS.items()}
    contexts = {card: context_of_same_chip(card) for card in CARDS}
    return tuple(
        CardResult(
            row,
            reserved=peak["reserved"] / MIB,
            least=peak["least_reserved"] / MIB,
            most=peak["most_reserved"] / MIB,
            outside=outside(devices[row.card], contexts[row.card]),
            known_outside=outside(devices[row.card], devices[row.card].context_bytes),
        )
        for row in rows
        for peak in [found[row.card, row.run]]
    )


def outside(device: Device, context: int) -> float:
    """Return the MiB of a card that are not PyTorch's: a context of so many bytes, and the driver's."""
    return (context + (device.driver_reserved or 0)) / MIB


def context_of_same_chip(card: str) -> int:
    """Return the bytes of context that a dry run would assume for a card without observations."""
    device, other = find_device(CARDS[card]), find_device(SAME_CHIP[card])
    return int(other.context_bytes * device.multiprocessors / other.multiprocessors)


def by_series(results: Iterable[CardResult]) -> dict[tuple[str, str], list[CardResult]]:
    """Return the results of each card and job."""
    series: dict[tuple[str, str], list[CardResult]] = {}
    for result in results:
        series.setdefault((result.row.job, result.row.card), []).append(result)
    return dict(sorted(series.items()))


def slope(results: Sequence[CardResult], value: Callable[[CardResult], float]) -> float:
    """Return the MiB per additional sample, by least squares over batch sizes above 1."""
    some = [result for result in results if result.row.batch > 1]
    return linear_regression([one.row.batch for one in some], [value(one) for one in some]).slope


def markdown(results: Sequence[CardResult]) -> str:
    """Return the tables: a line per card and job, and what was asked of them."""
    series = (_line(job, card, some) for (job, card), some in by_series(results).items())
    outside = (
        (
            *(one.row.job, one.row.card, one.row.batch, f"{one.row.published:,.0f}"),
            f"{one.least + one.known_outside:,.0f} to {one.most + one.known_outside:,.0f}",
            f"{one.known_beyond - unsure(one.row.card):,.0f}",
        )
        for one in not_in_range(results)
    )
    blocks = (
        table(HEADINGS, "ll" + "r" * (len(HEADINGS) - 2), series),
        table(("asked", "of rows or series", "met"), "lrr", claims(results)),
        "The context by the rows of transformers and channels_last. MiB:",
        table(CONTEXT_HEADINGS, "lrrrr", (_context(card, results) for card in CARDS)),
        "Rows of contiguous convolutions outside the range, with the card's own context. MiB, the card's:",
        table(OUTSIDE_HEADINGS, "llrrrr", outside),
    )
    return "\n\n".join(blocks) + "\n"


def _context(card: str, results: Iterable[CardResult]) -> tuple[str, ...]:
    some = [one for one in results if one.row.card == card and one.row.job not in CONTIGUOUS]
    most = max((one.row.published - one.reserved for one in some), default=0)
    device = find_device(CARDS[card])
    driver, assumed = (device.driver_reserved or 0) / MIB, device.context_bytes / MIB
    other = context_of_same_chip(card) / MIB
    sizes = [f"{size:,.0f}" for size in (most, most - driver, assumed)]
    return card, *sizes, f"{other:,.0f}, {SAME_CHIP[card]}"


def _line(job: str, card: str, some: Sequence[CardResult]) -> tuple[str, ...]:
    gaps = sorted(one.row.published - one.reserved for one in some)
    slopes = ("", "", "")
    if len({one.row.batch for one in some if one.row.batch > 1}) > 1:
        theirs, ours = (
            slope(some, lambda one: one.row.published),
            slope(some, lambda one: one.reserved),
        )
        slopes = f"{theirs:,.2f}", f"{ours:,.2f}", f"{100 * (ours / theirs - 1):+.2f} %"
    beyond = max(one.beyond for one in some)
    sizes = (f"{size:,.0f}" for size in (gaps[0], median(gaps), gaps[-1], some[0].outside, beyond))
    return job, card, f"{len(some)}", *slopes, *sizes


def unsure(card: str) -> float:
    """Return the uncertainty of a card's context in MiB."""
    device = find_device(CARDS[card])
    return device.context_spread * device.context_bytes / MIB


def not_in_range(results: Iterable[CardResult]) -> list[CardResult]:
    """Return the rows of contiguous convolutions that even the context's uncertainty leaves outside."""
    rows = (one for one in results if one.row.job in CONTIGUOUS)
    return [one for one in rows if one.known_beyond > unsure(one.row.card)]


def claims(results: Sequence[CardResult]) -> Iterator[tuple[str, int, int]]:
    """Yield what is asked, of how many rows or series, and of how many it is met."""
    series = [
        some
        for (job, _), some in by_series(results).items()
        if job not in CONTIGUOUS and len({one.row.batch for one in some if one.row.batch > 1}) > 1
    ]
    near = [
        some
        for some in series
        if abs(slope(some, lambda o: o.reserved) / slope(some, lambda o: o.row.published) - 1) <= SLOPE
    ]
    yield "transformers and channels_last: MiB per sample within 0.5 %", len(series), len(near)
    rows = [one for one in results if one.row.job in CONTIGUOUS]
    what = "contiguous convolutions: in the range, give or take the uncertainty of the card's own context"
    yield what, len(rows), len(rows) - len(not_in_range(rows))
    narrow = [one for one in rows if one.most - one.least <= WIDTH * (one.most + one.outside)]
    yield "contiguous convolutions: range at most 10 % wide", len(rows), len(narrow)
    met = [one for one in results if one.beyond <= one.limit]
    yield "the card, left out, within the larger of 2 % and 300 MiB of the range", len(results), len(met)
    met = [one for one in results if abs(one.difference) <= one.limit]
    yield "the same of the figure with workspaces", len(results), len(met)


def chart(results: Sequence[CardResult], path: Path) -> None:
    """Draw predicted against published, a panel per card, as SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "memfit"  # the same results give the same file
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(CARDS), figsize=(13, 4.6), layout="constrained")
    jobs = sorted({one.row.job for one in results})
    for panel, (card, name) in zip(panels, CARDS.items(), strict=True):
        for job in jobs:
            some = [one for one in results if (one.row.card, one.row.job) == (card, job)]
            predicted = [(one.reserved + one.outside) / 1024 for one in some]
            below = [(one.reserved - one.least) / 1024 for one in some]
            above = [(one.most - one.reserved) / 1024 for one in some]
            published = [one.row.published / 1024 for one in some]
            panel.errorbar(
                predicted, published, xerr=(below, above), fmt="o", markersize=3.5, alpha=0.7, label=job
            )
        end = find_device(name).total_bytes / 2**30
        panel.plot((0, end), (0, end), color="grey", linewidth=0.8)
        panel.set(title=name, xlabel="predicted, GiB", ylabel="published, GiB")
    panels[0].legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})
