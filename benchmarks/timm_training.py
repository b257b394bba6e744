"""Compare what 505 timm models took on a card, batch by batch, with the same training on the ghost.

    python benchmarks/timm_training.py timm_training.csv --runs FILE [--models 60] [--markdown FILE]

The table has a row for each model and batch size: ``model,batch,device_mib,fake_tensors_mib``. Its figures
are those of itu-rad/GPUMemNet @f01eb059, Related_works/FakeTensor: the most that a card held in a minute of
training, and what PyTorch's fake tensors say. They have no licence, so they are not in this repository. Card,
versions and settings are not stated: no figure passes 40,361 MiB, and the slopes of transformers are those of
timm's train.py with its defaults, in float32, on the ghost's A100 of 40 GB.

Compared are MiB for each additional sample, by least squares over a model's batch sizes: what lies outside
PyTorch's allocator cancels. Rows count until one takes no more than the one before it (that run failed), or
the card is full, when the allocator returns cached blocks. --runs keeps the ghost's figures; a later call
continues. --models takes so many of them, drawn once, of the half that may be used to choose a rule
(--half fit, the default) or of the other (--half test).
"""

import csv
import json
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from measuring import MEMFIT, MIB, command_line, table, write_json, write_or_print

FULL = 38_500
"""MiB. Above it, PyTorch's allocator may have returned cached blocks: the card has 40,536 MiB."""
SEED = 20261201
SEEN = [
    "cait_s24_224",
    "convmixer_1024_20_ks9_p14",
    "deit_base_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "eca_vovnet39b",
    "eva02_small_patch14_224",
    "fastvit_sa12",
    "ghostnet_050",
    "gmixer_12_224",
    "levit_128s",
    "mobilenetv2_100",
    "nf_seresnet50",
    "repvit_m0_9",
    "resmlp_12_224",
    "semnasnet_100",
    "tf_mobilenetv3_large_075",
    "vit_base_patch16_siglip_gap_224",
    "vit_medium_patch16_gap_240",
    "vovnet57a",
]
"""Ran before the halves were drawn, so they test nothing."""
AT_A_TIME = 10
GPU = "A100-40GB"


@dataclass(frozen=True)
class Slope:
    """MiB for each additional sample of one model."""

    model: str
    batches: tuple[int, ...]
    published: float
    ghost: float
    fake: float

    @property
    def error(self) -> float:
        """The ghost's slope relative to the published one, less 1."""
        return self.ghost / self.published - 1

    @property
    def fake_error(self) -> float:
        """The same of fake tensors."""
        return self.fake / self.published - 1


Figures = Mapping[str, Mapping[int, float]]
"""Model -> batch size -> MiB."""


def read_table(path: Path) -> tuple[Figures, Figures]:
    """Read the published table; return the card's figures, and those of fake tensors."""
    card: defaultdict[str, dict[int, float]] = defaultdict(dict)
    fake: defaultdict[str, dict[int, float]] = defaultdict(dict)
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            card[row["model"]][int(row["batch"])] = float(row["device_mib"])
            fake[row["model"]][int(row["batch"])] = float(row["fake_tensors_mib"])
    return card, fake


def half(models: Iterable[str], which: str) -> list[str]:
    """Return the half of the models that may be used to choose a rule ("fit"), or the other ("test")."""
    order = sorted(models)
    random.Random(SEED).shuffle(order)  # noqa: S311 - a fixed draw
    middle = len(order) // 2
    return order[:middle] if which == "fit" else [model for model in order[middle:] if model not in SEEN]


def usable(published: Mapping[int, float]) -> list[int]:
    """Return the batch sizes up to the first that failed on the card, or filled it.

    >>> usable({8: 3000, 16: 4000, 32: 3900, 64: 5000})
    [8, 16]
    """
    kept: list[int] = []
    for batch, size in sorted(published.items()):
        if size > FULL or (kept and size <= published[kept[-1]]):
            break
        kept.append(batch)
    return kept


def slopes(card: Figures, fake: Figures, ghost: Figures) -> list[Slope]:
    """Return the slope of every model with at least two batch sizes that both sides have."""
    found = []
    for model, figures in ghost.items():
        batches = [batch for batch in usable(card[model]) if batch in figures]
        if len(batches) < 2:  # noqa: PLR2004 - a slope needs two
            continue
        parts = (
            statistics.linear_regression(batches, [side[model][batch] for batch in batches]).slope
            for side in (card, ghost, fake)
        )
        found.append(Slope(model, tuple(batches), *parts))
    return found


def run(models: Sequence[str], kept: Path) -> None:
    """Train the models on the ghost that the file does not have."""
    done = {line["model"] for line in read_lines(kept)}
    left = [model for model in models if model not in done]
    script = Path(__file__).parent / "accuracy" / "timm_models.py"
    for start in range(0, len(left), AT_A_TIME):
        some = left[start : start + AT_A_TIME]
        print(f"{start} of {len(left)}: {' '.join(some)}", file=sys.stderr, flush=True)
        job = (str(script), *some, "--out", str(kept.resolve()))
        options = ("dry-run", "--gpu", GPU, "--steps", "1000000", "--")
        subprocess.run((*MEMFIT, *options, *job), capture_output=True, check=False)  # it reports on itself


def read_lines(kept: Path) -> list[dict[str, object]]:
    """Return what the runs have written."""
    if not kept.exists():
        return []
    return [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]


def ghost_figures(kept: Path) -> Figures:
    """Return the MiB that PyTorch reserved on the ghost in the runs that trained."""
    found: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for line in read_lines(kept):
        if line["state"] == "trained":
            found[str(line["model"])][int(str(line["batch"]))] = int(str(line["reserved"])) / MIB
    return found


def summary(errors: Iterable[float]) -> tuple[str, ...]:
    """Return the median of the absolute errors, that of nine in ten, the share within 5 %, and the sign."""
    signed = sorted(errors)
    sizes = sorted(map(abs, signed))
    within = sum(size <= 0.05 for size in sizes) / len(sizes)  # noqa: PLR2004 - as the column says
    ninth = sizes[max(round(0.9 * len(sizes)) - 1, 0)]
    return (
        *(f"{part:.1%}" for part in (statistics.median(sizes), ninth, within)),
        f"{statistics.median(signed):+.1%}",
    )


def markdown(found: Sequence[Slope]) -> str:
    """Return the summary and the models, the largest error first."""
    columns = ("MiB per sample", "models", "median error", "nine of ten", "within 5 %", "signed")
    lines = (
        ("the ghost", len(found), *summary(each.error for each in found)),
        ("fake tensors", len(found), *summary(each.fake_error for each in found)),
    )
    worst = sorted(found, key=lambda each: -abs(each.error))
    each = (
        (
            *(one.model, " ".join(map(str, one.batches)), f"{one.published:.1f}", f"{one.ghost:.1f}"),
            *(f"{one.error:+.1%}", f"{one.fake_error:+.1%}"),
        )
        for one in worst
    )
    headings = ("model", "batches", "published", "ghost", "error", "fake tensors")
    return "\n\n".join((table(columns, "lrrrrr", lines), table(headings, "llrrrr", each))) + "\n"


def main() -> None:
    """Run the benchmark."""
    parser = command_line(__doc__, results=True)
    parser.add_argument("table", type=Path, help="timm_training.csv")
    parser.add_argument("--runs", type=Path, required=True, help="file that keeps the ghost's figures")
    parser.add_argument("--models", type=int, help="how many (default: all)")
    parser.add_argument("--half", choices=("fit", "test"), default="fit")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    args = parser.parse_args()
    card, fake = read_table(args.table)
    models = half(card, args.half)[: args.models]
    run(models, args.runs)
    ghost = ghost_figures(args.runs)
    found = slopes(card, fake, {model: ghost[model] for model in models if model in ghost})
    write_or_print(args.markdown, markdown(found))
    write_json(args.json, [vars(each) | {"error": each.error} for each in found])


if __name__ == "__main__":
    main()
