"""Fit the coefficients of ``src/memfit/timing/kernel_times.toml`` to published tables of measured kernels.

    pip install pyarrow scipy
    python benchmarks/fit_kernel_times.py --data FOLDER [--kinds product_16 softmax] [--write]

FOLDER has the tables, as measured_kernels.py and measured_convolutions.py read them, and what cards of your
own measured, as measured_cards.py does. Printed for each kind and card: rows, and of
|predicted / measured - 1| the median, the 90 % quantile, and that of kernels above 100 us; then the same with
the card left out, by its nearest relative's coefficients. Half of the rows, at most 400, are fitted; all are
judged.
"""

import argparse
import json
import math
import random
import re
import tomllib
from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles

import measured_cards
import measured_convolutions
import measured_kernels
from measured_kernels import Row, rows_by_kind
from measuring import ROOT

from memfit.timing.collective_times import has_nvlink
from memfit.timing.kernel_formulas import Coefficients, seconds_of_work
from memfit.timing.kernel_times import COLLECTIVES, LONG, carried_over, measured_device, nearest_relative

TABLE = ROOT / "src/memfit/timing/kernel_times.toml"
FITTED, ROUNDS, LEAST = 400, 500, 20
ONLY_JUDGED = {"code-snippet"}
"""Sources whose kernels are of another sort: they show how far off a relative may be."""
LEAST_SECONDS = 1.5e-6
"""Of a kernel: about what the smallest of aiconfigurator's take, launched by CUDA graphs without the host."""
MOST_SECONDS = {
    **dict.fromkeys(("pointwise", "layer_norm", "softmax"), 5e-6),
    **dict.fromkeys(("layer_norm_backward", "softmax_backward"), 1e-5),
}
"""Of kernels whose tables have none below 20 to 250 us, timed with the host: of one kernel, or two. Products
that CUDA graphs launch take 1.5 to 3.3 us."""
START = {
    "arithmetic": 0.8,
    "bandwidth": 0.8,
    "tile": 10.0,
    "depth": 60.0,
    "sustained": 0.1,
    "width": 20.0,
    "tail": 0.5,
    "floor": 2.5e-6,
    "hop": 1e-6,
    "start": 1e-5,
    "small": 0.5,
    "bandwidth_8": 0.8,
}
NAMES = {
    "product": ("arithmetic", "tile", "depth", "bandwidth", "sustained"),
    "convolution": ("arithmetic", "tile", "depth", "bandwidth", "sustained", "floor"),
    "attention": ("arithmetic", "width", "depth", "tail", "bandwidth", "floor"),
    "traffic": ("bandwidth", "floor"),
    "all": ("floor", "hop", "start", "small", "bandwidth", "bandwidth_8"),
}


def predicted(row: Row, fit: Coefficients) -> float:
    """Return the seconds that the model gives to a row."""
    return sum(seconds_of_work(work, row.device, fit, warm=row.warm) for work in row.works)


def errors(rows: list[Row], fit: Coefficients) -> list[float]:
    """Return log(predicted / measured) of each row."""
    return [math.log(predicted(row, fit) / row.seconds) for row in rows]


def ninth(values: list[float]) -> float:
    """Return the 90 % quantile."""
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def sample(rows: list[Row]) -> list[Row]:
    """Return the rows to fit: of each source alike, small ones and large ones alike."""
    by_source = defaultdict(list)
    for row in rows:
        by_source[row.source].append(row)
    chosen: list[Row] = []
    for some in by_source.values():
        random.Random(0).shuffle(some)  # noqa: S311
        chosen += some[
            : min(len(some) if len(some) < 2 * LEAST else len(some) // 2, FITTED // len(by_source))
        ]
    return chosen


def fit_coefficients(kind: str, rows: list[Row]) -> dict[str, float]:
    """Return coefficients that minimise the mean error, pulled a little towards where the search starts."""
    from scipy.optimize import minimize

    formula = (
        "attention"
        if kind.startswith(("flash", "cudnn", "efficient", "flex"))
        else kind.split("_", maxsplit=1)[0]
    )
    names = [*NAMES.get(formula, NAMES["traffic"])]
    if any(row.source == "aiconfigurator" for row in rows) and formula == "product":
        names.append("floor")  # timed in CUDA graphs, without the host
    start = [math.log(START[name]) for name in names]
    some = sample(rows)

    def coefficients(logs: list[float]) -> dict[str, float]:
        fit = {"floor": START["floor"]} | dict(zip(names, map(math.exp, logs), strict=True))
        return fit | {"floor": min(fit["floor"], MOST_SECONDS.get(kind, math.inf))}

    def loss(logs: list[float]) -> float:
        off = errors(some, coefficients(logs))
        pull = sum((log - first) ** 2 for log, first in zip(logs, start, strict=True)) / len(names)
        return (
            sum(map(abs, off)) / len(off)
            + 0.3 * math.sqrt(sum(each**2 for each in off) / len(off))
            + 2e-3 * pull
        )

    found = minimize(
        loss, start, method="Nelder-Mead", options={"maxiter": ROUNDS, "xatol": 1e-2, "fatol": 1e-4}
    )
    fit = coefficients(found.x)
    fit["floor"] = max(fit["floor"], LEAST_SECONDS)
    return {name: float(f"{value:.3g}") for name, value in fit.items()}


def share(log: float) -> float:
    """Return how much longer a time is, from a logarithm."""
    return round(math.expm1(log), 3)


def judged(rows: list[Row], fit: Coefficients) -> tuple[list[float], list[float]]:
    """Return the errors of all rows, and of kernels above 100 us; the same if there are none."""
    off = [(abs(each), row.seconds > LONG) for each, row in zip(errors(rows, fit), rows, strict=True)]
    every = sorted(each for each, _ in off)
    return every, sorted(each for each, long in off if long) or every


def in_words(every: list[float], long: list[float]) -> str:
    """Return the median, the 90 % quantile, and that of long kernels."""
    return f"{share(median(every)):7.1%} {share(ninth(every)):7.1%} {share(ninth(long)):7.1%}"


def fit_kind(kind: str, cards: dict[str, list[Row]]) -> tuple[dict[str, dict[str, object]], list[float]]:
    """Fit a kind on each card; return what the table says of each, and relatives' spreads. Prints errors."""
    fits = {
        card: fit_coefficients(kind, rows)
        for card, rows in cards.items()
        if rows[0].source not in ONLY_JUDGED
    }
    entries: dict[str, dict[str, object]] = {}
    pooled: tuple[list[float], list[float]] = [], []
    for card, rows in cards.items():
        own = "not fitted"
        if card in fits:
            every, long = judged(rows, fits[card])
            own = in_words(every, long)
            entries[card] = fits[card] | {
                "rows": len(rows),
                "source": "+".join(sorted({row.source for row in rows})),
                "median": share(median(every)),
                "spread": share(ninth(every)),
                "long": share(ninth(long)),
            }
        near = nearest_relative(measured_device(card), [name for name in fits if name != card], kind)
        beside = ""
        alike = kind not in COLLECTIVES or near is None or is_linked_alike(card, near)
        if near is not None and alike:
            left_out = judged(rows, carried_over(kind, fits[near], near, measured_device(card)))
            for some, off in zip(pooled, left_out, strict=True):
                some += [
                    off[int((place + 0.5) / 100 * len(off))] for place in range(100)
                ]  # cards count alike
            beside = f"| {in_words(*left_out)}  by {near}"
        print(f"{kind:20} {card:14} {len(rows):6} {own:23} {beside}", flush=True)
    return entries, [share(ninth(each)) for each in pooled] if pooled[0] else [0.5, 0.5]


def is_linked_alike(one: str, other: str) -> bool:
    """Return whether both cards have NVLink, or neither: one sort of link says nothing about the other."""
    return has_nvlink(measured_device(one)) == has_nvlink(measured_device(other))


def inline(entry: dict[str, object]) -> str:
    """Return a table of TOML on one line."""
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in entry.items()) + " }"


def write(fitted: dict[str, tuple[dict[str, dict[str, object]], list[float]]]) -> None:
    """Replace the fitted kinds in the table; what people wrote there stays."""
    text = TABLE.read_text(encoding="utf-8")
    for kind, (entries, relative) in fitted.items():
        lines = [
            f"relative = {relative}",
            *(f'card."{card}" = {inline(entry)}' for card, entry in sorted(entries.items())),
        ]
        block = re.search(rf"(?ms)^\[kind\.{kind}\].*?(?=^\[|\Z)", text)
        if block is None:
            text += f"\n[kind.{kind}]\n" + "\n".join(lines) + "\n"
            continue
        old = block[0].rstrip().splitlines()
        fitted_before = [re.match(r"relative|card\.", line) is not None for line in old]
        place = fitted_before.index(True) if any(fitted_before) else len(old)
        kept = [line for line, was in zip(old, fitted_before, strict=True) if not was]
        end = "\n" if kept[place:] else "\n\n"  # what stands before the next kind belongs to that one
        text = (
            text[: block.start()]
            + "\n".join([*kept[:place], *lines, *kept[place:]])
            + end
            + text[block.end() :]
        )
    tomllib.loads(text)
    TABLE.write_text(text.rstrip() + "\n", encoding="utf-8")


def main() -> None:
    """Read the tables, fit, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="the published tables")
    parser.add_argument("--kinds", nargs="*", help="only these kinds")
    parser.add_argument("--write", action="store_true", help="write kernel_times.toml")
    options = parser.parse_args()
    readers = measured_kernels.READERS | measured_convolutions.READERS | measured_cards.READERS
    kinds = rows_by_kind(options.data, readers)
    print(
        f"{'kind':20} {'card':14} {'rows':>6} {'median':>7} {'90 %':>7} {'>100 us':>7} | left out: the same"
    )
    fitted = {
        kind: fit_kind(kind, cards)
        for kind, cards in sorted(kinds.items())
        if kind in (options.kinds or kinds)
    }
    if options.write:
        write(fitted)


if __name__ == "__main__":
    main()
