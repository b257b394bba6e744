"""Measure how tightly and how fast memfit packs hard problems, many buffers, and real models.

    python benchmarks/packing.py [--instances DIR] [--models resnet50 ...] [--large] [--json FILE]

``--instances``: a folder of minimalloc's CSV files (``A.1048576.csv``: the capacity is in the name); each
must be packed within ten seconds. The models run on the ghost, three training steps with SGD or three
forwards. For each model the benchmark reports the lower bound of a plan that every step repeats (above the
live peak if a batch is kept until the next one arrives), how close the plan is to the bound, how soon the
packer is within half a per cent of it, and how much PyTorch's allocator reserves.

For the networks of Caffe's users, the benchmark also compares the plan with the claims of Caffe's fork: a
training step takes half of the memory of separate buffers, and a forward takes a twentieth. Caffe counted
only blobs, so cuDNN's workspaces are left out. The result is given for all memory, without permanent
buffers (parameters and momentum), and, for inference, with each buffer counted twice, because a blob has a
diff in Caffe and none in PyTorch.

``--large``: more than 50,000 buffers, from a step with accumulation, consecutive forwards, and a rectangle
cut into random pieces, whose smallest packing has a known height.
"""

import itertools
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import command_line, traced, write_json

import memfit
from memfit.allocator.requests import allocator_requests_of_trace
from memfit.packing.allocation_lifetimes import buffers_of_repeating_step, buffers_of_requests, last_full_step
from memfit.packing.best_packing import Packing, always_live_mask, pack_buffers
from memfit.packing.buffer_lifetimes import Buffers, lifetime_sections
from memfit.packing.csv_table import read_buffers_csv
from memfit.packing.packing_violations import find_packing_violation
from memfit.records import Trace

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.known_packings import gapless_problem

JOB = Path(__file__).with_name("packed_networks.py")
NETWORKS = ("resnet50", "resnet101", "vgg16", "googlenet", "densenet121", "mobilenet_v2", "gpt2", "vit_b_16")
BATCHES = dict.fromkeys(NETWORKS, 32) | {"gpt2": 4}
SECONDS = 10.0
CLOSE = 1.005
"""A packing is close if its height is at most this many times the bound."""
COLUMNS = ("buffers", "live", "bound/live", "height/bound", "within 1.005", "default", "expandable")
CAFFE = {"resnet50", "resnet101", "vgg16", "googlenet"}
CLAIMS = {"training": 0.5, "inference": 0.05}
"""The smallest share of memory that remains, as Caffe's fork claimed: half in training, where the fork never
released a layer's data; and "up to 95 % saved" in inference."""
FEW, SOON = 2_000, 1.0
"""At most FEW buffers must be packed within SOON seconds."""
LARGE = {
    "gpt2 training": ("--batch-size", "4", "--accumulate", "64"),
    "densenet121 inference": ("--batch-size", "32", "--steps", "130"),
}
CUT = 50_000


def instances(folder: Path) -> Iterator[dict[str, Any]]:
    """Pack each instance within the capacity in its file name."""
    for path in sorted(folder.glob("*.csv")):
        buffers, capacity = read_buffers_csv(path), int(path.name.split(".")[1])
        begin = time.perf_counter()
        found = pack_buffers(buffers, capacity, seconds=SECONDS)
        seconds = time.perf_counter() - begin
        fault = find_packing_violation(buffers, found.offset, capacity)
        row = {"name": path.name, "buffers": len(buffers), "bound": found.bound, "height": found.height}
        print(
            f"{path.name:18} {len(buffers):4} buffers  {found.height:9,} of {capacity:9,}  {seconds:5.2f} s"
            f"  {found.how}  {fault or 'valid'}",
            flush=True,
        )
        yield {**row, "seconds": seconds, "ok": not fault and seconds <= SECONDS}


def trace_of(name: str, mode: str, *options: str, workspaces: str = "cudnn") -> Trace:
    """Run a job on the ghost; return its trace."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "run.memfit"
        ghost = ("--memory", "1TiB", "--workspaces", workspaces)
        traced(*ghost, "--", str(JOB), name, mode, *options, trace=trace)
        return memfit.read(trace)


def models(names: list[str]) -> Iterator[dict[str, Any]]:
    """Pack the requests of each model's training and inference."""
    print(f"{'':24}" + "".join(f"{name:>17}" for name in COLUMNS))
    for name in names:
        for mode in ("training", "inference"):
            run = trace_of(name, mode, "--batch-size", str(BATCHES[name]))
            best = memfit.pack(run, seconds=SECONDS)
            begin = time.perf_counter()
            close = memfit.pack(run, int(CLOSE * best.bound), seconds=SECONDS)
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
            }
            cells = (
                f"{row['buffers']:,}",
                f"{best.live / 2**20:,.1f} MiB",
                f"{best.bound / best.live:.4f}",
                f"{best.height / best.bound:.4f}",
                f"{seconds:.2f} s",
                f"{default / best.live:.3f}",
                f"{expandable / best.live:.3f}",
            )
            print(f"{name + ' ' + mode:24}" + "".join(f"{cell:>17}" for cell in cells), flush=True)
            limit = SOON if row["buffers"] <= FEW else SECONDS
            ok = close.height <= CLOSE * best.bound and seconds <= limit
            yield {"name": name, "mode": mode, **row, "ok": ok}


def beside_caffe(names: list[str]) -> Iterator[dict[str, Any]]:
    """Compare plans of a training step or a forward with the claims of Caffe's fork."""
    columns = "".join(f"{what:>15}" for what in ("live", "planned", "not permanent", "with diffs"))
    print(f"\n{'share of separate':24}{'separate':>15}{columns}  claim")
    for name, (mode, claim) in itertools.product(names, CLAIMS.items()):
        options = ["--batch-size", str(BATCHES[name]), "--steps", "1" if mode == "inference" else "3"]
        found = memfit.pack(trace_of(name, mode, *options, workspaces="none"), seconds=SECONDS)
        always = sum(
            int(part.size[always_live_mask(lifetime_sections(part))].sum()) for part, _ in found.parts
        )
        blobs = (found.height - always) / (found.unshared - always)
        shares = {"for all memory": found.height / found.unshared, "for what is not permanent": blobs}
        if mode == "inference":
            shares["with diffs"] = blobs / 2
        reached = next((what for what, share in shares.items() if share <= claim), "")
        cells = "".join(f"{share:>15.3f}" for share in (found.live / found.unshared, *shares.values()))
        print(
            f"{name + ' ' + mode:24}{found.unshared / 2**20:>11,.0f} MiB{cells:60}"
            f"  {claim}: {'reached ' + reached if reached else 'NOT reached'}",
            flush=True,
        )
        row = {"unshared": found.unshared, "height": found.height, "live": found.live, "always": always}
        yield {"name": name, "mode": f"{mode} beside Caffe", **row, "reached": reached, "ok": True}


def large() -> Iterator[dict[str, Any]]:
    """Pack problems of more than 50,000 buffers."""
    print(f"\n{'':24}{'buffers':>10}{'height/bound':>14}{'wall, CPU':>16}{'within 1.005':>18}")
    for job, options in LARGE.items():
        requests = allocator_requests_of_trace(trace_of(*job.split(), *options))
        (buffers,) = buffers_of_requests(requests).values()
        step = last_full_step(requests)
        yield pack_many(job, buffers_of_repeating_step(buffers, *step[1:]) if step else buffers, CLOSE)
    yield pack_many("cut from a rectangle", gapless_problem(1, CUT), math.inf)


def pack_many(name: str, buffers: Buffers, close: float) -> dict[str, Any]:
    """Pack as tightly as possible, and then again until the packing is close to the bound."""
    best, *times = timed(buffers, None)
    if close < math.inf:
        times += timed(buffers, int(close * best.bound))[1:]
    ratio = best.height / best.bound
    cells = [" ".join(f"{seconds:.1f} s" for seconds in pair) for pair in (times[:2], times[2:])]
    print(f"{name:24}{len(buffers):>10,}{ratio:>14.6f}{cells[0]:>16}{cells[1]:>18}", flush=True)
    row = {"buffers": len(buffers), "bound": best.bound, "height": best.height, "seconds": times}
    return {"name": name, **row, "ok": len(buffers) >= CUT and ratio <= close and times[-2] <= SECONDS}


def timed(buffers: Buffers, capacity: int | None) -> tuple[Packing, float, float]:
    """Pack; return the result, wall seconds and processor seconds."""
    begin, busy = time.perf_counter(), time.process_time()
    found = pack_buffers(buffers, capacity, seconds=SECONDS)
    return found, time.perf_counter() - begin, time.process_time() - busy


def main() -> int:
    """Measure and print; return 1 if a limit is exceeded."""
    parser = command_line(__doc__, results=True)
    parser.add_argument("--instances", type=Path, help="folder of minimalloc's CSV files")
    parser.add_argument("--models", nargs="*", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--large", action="store_true", help="also pack more than 50,000 buffers")
    arguments = parser.parse_args()
    rows = list(instances(arguments.instances)) if arguments.instances else []
    rows += models(arguments.models) if arguments.models else ()
    rows += beside_caffe([name for name in arguments.models if name in CAFFE])
    rows += large() if arguments.large else ()
    write_json(arguments.json, rows)
    failed = [" ".join((row["name"], row.get("mode", ""))) for row in rows if not row["ok"]]
    print("all within their limits" if not failed else f"OVER THEIR LIMITS: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
