"""How well and how fast memfit packs: hard problems, and the memory of models that people train.

    python benchmarks/packing.py [--instances DIR] [--models resnet50 ...] [--json FILE]

``--instances``: a folder of minimalloc's CSV files (``A.1048576.csv``: the capacity is in the name); each
must fit within ten seconds. The models run on the ghost, three training steps with SGD or three forwards. Of
each: the bound of a plan that every step repeats (above what lives at once where a batch is kept until the
next one is there), how close to it the arena is, and how soon it is within half a per cent; what PyTorch's
allocator reserves; and the arena's share of memory of its own for each buffer of a step, which is what
Caffe's memory sharing is compared with.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit import api
from memfit.packing.best import pack
from memfit.packing.table import read_buffers
from memfit.packing.validator import wrong

JOB = Path(__file__).with_name("packing") / "job.py"
BATCHES = {
    "resnet50": 32,
    "resnet101": 32,
    "vgg16": 32,
    "googlenet": 32,
    "densenet121": 32,
    "mobilenet_v2": 32,
    "gpt2": 4,
    "vit_b_16": 32,
}
SECONDS = 10.0
CLOSE = 1.005
"""Times what lives at once."""
COLUMNS = (
    *("buffers", "live", "bound/live", "height/bound", "within 1.005"),
    *("default", "expandable", "planned/unshared"),
)
FEW, SOON = 2_000, 1.0
"""So many buffers, at most, are packed in so many seconds."""


def instances(folder: Path) -> Iterator[dict[str, Any]]:
    """Pack each instance within the capacity that its name says."""
    for path in sorted(folder.glob("*.csv")):
        buffers, capacity = read_buffers(path), int(path.name.split(".")[1])
        begin = time.perf_counter()
        found = pack(buffers, capacity, seconds=SECONDS)
        seconds = time.perf_counter() - begin
        fault = wrong(buffers, found.offset, capacity)
        row = {"name": path.name, "buffers": len(buffers), "bound": found.bound, "height": found.height}
        print(
            f"{path.name:18} {len(buffers):4} buffers  {found.height:9,} of {capacity:9,}  {seconds:5.2f} s"
            f"  {found.how}  {fault or 'valid'}",
            flush=True,
        )
        yield {**row, "seconds": seconds, "ok": not fault and seconds <= SECONDS}


def models(names: list[str]) -> Iterator[dict[str, Any]]:
    """Pack what each model's training and inference ask for."""
    columns = (
        "buffers",
        "live",
        "bound/live",
        "height/bound",
        "within 1.005",
        "default",
        "expandable",
        "planned/unshared",
    )
    print(f"{'':24}" + "".join(f"{name:>17}" for name in columns))
    for name in names:
        for mode in ("training", "inference"):
            with tempfile.TemporaryDirectory() as folder:
                trace = Path(folder) / "run.memfit"
                command = [sys.executable, "-m", "memfit", "dry-run", "--memory", "1TiB", "-o", str(trace)]
                job = [str(JOB), name, mode, "--batch-size", str(BATCHES[name])]
                subprocess.run([*command, *job], capture_output=True, check=True)
                run = api.read(trace)
            best = api.pack(run, seconds=SECONDS)
            begin = time.perf_counter()
            close = api.pack(run, int(CLOSE * best.bound), seconds=SECONDS)
            seconds = time.perf_counter() - begin
            default, expandable = (row.replay.peak_reserved for row in best.reserved)
            row = {
                "buffers": sum(len(buffers) for buffers, _ in best.parts),
                "live": best.live,
                "bound": best.bound,
                "height": best.height,
                "seconds": seconds,
                "default": default,
                "expandable": expandable,
                "unshared": best.unshared,
            }
            cells = (
                f"{row['buffers']:,}",
                f"{best.live / 2**20:,.1f} MiB",
                f"{best.bound / best.live:.4f}",
                f"{best.height / best.bound:.4f}",
                f"{seconds:.2f} s",
                f"{default / best.live:.3f}",
                f"{expandable / best.live:.3f}",
                f"{best.height / best.unshared:.3f}",
            )
            print(f"{name + ' ' + mode:24}" + "".join(f"{cell:>17}" for cell in cells), flush=True)
            limit = SOON if row["buffers"] <= FEW else SECONDS
            ok = close.height <= CLOSE * best.bound and seconds <= limit
            yield {"name": name, "mode": mode, **row, "ok": ok}


def main() -> int:
    """Measure, print, and say by the exit code whether everything held."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instances", type=Path)
    parser.add_argument("--models", nargs="*", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = list(instances(arguments.instances)) if arguments.instances else []
    rows += models(arguments.models) if arguments.models else ()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    failed = [" ".join((row["name"], row.get("mode", ""))) for row in rows if not row["ok"]]
    print("everything held" if not failed else f"NOT: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
