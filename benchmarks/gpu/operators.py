"""Compare the memory that operators request on the card and on the ghost: PyTorch's, and larger calls.

    python benchmarks/gpu/operators.py                      about two minutes, with 16 cores
    python benchmarks/gpu/operators.py --dtype float32 bfloat16 --inputs 10 --seconds 400
    python benchmarks/gpu/operators.py --rehearse H100-80GB --only "larger fft" "float32 linalg_svd"

The sizes of work space inside cuSOLVER, cuSPARSE, cuFFT, cuDNN and cuBLAS are the ghost's own rules
(docs/decisions/0008-sizes-inside-libraries.md). This script measures, for each sample, the peak of allocated
bytes above those before the call, and the bytes that are left while the results are alive.

No network is needed. PyTorch's database of operators imports expecttest (pip install expecttest). If memfit
is not installed, set PYTHONPATH="$PWD/src" (it then needs numpy, msgspec and platformdirs besides torch).
Both sides run at once, each in processes of its own, which answer one operator after another; a process that
dies is replaced. The script writes CARD-DRIVER-TORCH-operators.json and .md while it runs. With
``--rehearse`` the ghost stands in for the card too: every difference should be zero; nothing is measured.
"""

import argparse
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from card_session import command_line, ran_on, rehearse, result_name
from operators_table import compare, markdown

from memfit.card.detect_card import detect_card
from memfit.devices import find_device
from memfit.errors import MemfitError, UnknownDeviceError
from memfit.ghost.build.runtime_library import build_ghost

HERE = Path(__file__).resolve().parent
SAVE_EVERY = 5.0
"""Seconds between two writes of the result files."""


@dataclass
class Side:
    """One side's processes, the operators that still wait, and the results so far."""

    name: str
    """``card`` or ``ghost``."""
    command: list[str]
    environment: dict[str, str]
    log: Path
    until: float
    waiting: "queue.SimpleQueue[str]" = field(default_factory=queue.SimpleQueue)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """Start a process, and return it with what it says about the device.

        Raises:
            RuntimeError: it ended before that.
        """
        with self.log.open("a") as log:
            child = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environment,
                text=True,
                bufsize=1,
            )
        self.running.append(child)
        line = _answer(child)
        if not line:
            raise RuntimeError(f"a process of the {self.name} ended with code {child.wait()}; see {self.log}")
        return child, msgspec.json.decode(line)

    def work(self, child: subprocess.Popen[str] | None = None) -> None:
        """Measure one operator after another until none waits; replace the process when it dies."""
        while time.monotonic() < self.until:
            try:
                key = self.waiting.get_nowait()
            except queue.Empty:
                break
            if child is None:
                try:
                    child, _ = self.start()
                except RuntimeError as error:
                    self.results[key] = {"died": str(error)}
                    return
            line = _answer(child, key)
            if line:
                self.results[key] = msgspec.json.decode(line)
            elif time.monotonic() < self.until:
                self.results[key] = {"died": f"the process ended with code {child.wait()}"}
                child = None
        if child is not None and child.stdin:
            child.stdin.close()

    def stop(self) -> None:
        """End the processes that still run."""
        for child in self.running:
            if child.poll() is None:
                child.kill()


def _answer(child: subprocess.Popen[str], key: str = "") -> str:
    """Send a key, if any, and return the next line; an empty string if the process has ended."""
    try:
        if key:
            child.stdin.write(key + "\n")  # type: ignore[union-attr]
        return child.stdout.readline()  # type: ignore[union-attr]
    except OSError:
        return ""


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="START", help='operators whose key starts so: "larger fft"'
    )
    parser.add_argument("--dtype", nargs="+", default=["float32"], help="dtypes for the database's operators")
    parser.add_argument("--inputs", type=int, default=4, help="largest number of samples per operator")
    parser.add_argument("--seconds", type=float, default=150.0, help="time limit for everything")
    parser.add_argument("--patience", type=int, default=30, help="time limit for one operator, in seconds")
    parser.add_argument("--on-card", type=int, default=2, metavar="N", help="processes that use the card")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--on-ghost", type=int, default=max(1, cores - 4), metavar="N", help="processes that run the ghost"
    )
    parser.add_argument("--gpu", help="the ghost's profile, if the card's name is not in memfit's table")
    return parser.parse_args(arguments)


def main() -> int:
    """Compare; return 1 if a rehearsal shows a difference, or if an operator was not run."""
    begun, options = time.monotonic(), parsed()
    until = begun + options.seconds
    rehearse(options.rehearse)
    try:
        card = detect_card("compare operators")
        profile = find_device(options.gpu or card.name).name
        name = result_name(card, f"{version('torch')}-operators")
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out.resolve() / f"{name}.json"
        path.with_suffix(".log").write_bytes(b"")
        card_side = _side("card", profile, options, path, until)
        with ThreadPoolExecutor() as pool:
            building = pool.submit(build_ghost)  # takes as long as the start of a process
            child, about = card_side.start()
            building.result()
    except UnknownDeviceError as error:
        sys.exit(f"operators.py: {error} Choose the nearest profile with --gpu NAME.")
    except (MemfitError, RuntimeError) as error:
        sys.exit(f"operators.py: {error}")
    ghost_side = _side("ghost", profile, options, path, until, total=about["total"])
    only = tuple(options.only or [""])
    result = ran_on(card, about["torch"]) | {
        "name": card.name,
        "profile": profile,
        "driver": card.driver or card.cuda,
        "inputs": options.inputs,
        "keys": [key for key in about["keys"] if key.startswith(only)],
        "card": card_side.results,
        "ghost": ghost_side.results,
    }
    workers = [threading.Thread(target=card_side.work, args=(child,), daemon=True)]
    workers += [threading.Thread(target=card_side.work, daemon=True) for _ in range(1, options.on_card)]
    workers += [threading.Thread(target=ghost_side.work, daemon=True) for _ in range(options.on_ghost)]
    run_all(result, (card_side, ghost_side), workers, path, begun)
    print(path.with_suffix(".md").read_text(encoding="utf-8"))
    print(f"Written: {path}")
    outcomes = {
        compare(key, card_side.results.get(key, {}), ghost_side.results.get(key, {})).outcome
        for key in result["keys"]
    }
    failed = {"not run"} | ({"differs", "card raises", "ghost raises"} if card.rehearsal else set())
    return int(bool(outcomes & failed))


def run_all(
    result: dict[str, Any],
    sides: tuple[Side, Side],
    workers: Sequence[threading.Thread],
    path: Path,
    begun: float,
) -> None:
    """Let the workers measure until all is measured or the time is over, and write the results meanwhile."""
    for side in sides:
        for key in result["keys"]:
            side.waiting.put(key)
    for worker in workers:
        worker.start()
    saved = time.monotonic()
    while any(worker.is_alive() for worker in workers) and time.monotonic() < sides[0].until:
        time.sleep(0.1)
        if time.monotonic() > saved + SAVE_EVERY:
            keep(result, sides, path, begun)
            saved = time.monotonic()
    for side in sides:
        side.stop()
    keep(result, sides, path, begun)


def keep(result: dict[str, Any], sides: tuple[Side, Side], path: Path, begun: float) -> None:
    """Write the JSON file and its Markdown table."""
    result |= {side.name: dict(side.results) for side in sides}  # copies: workers add results meanwhile
    result["seconds"] = round(time.monotonic() - begun)
    path.write_bytes(msgspec.json.encode(result) + b"\n")
    path.with_suffix(".md").write_text(markdown(result), encoding="utf-8")


def _side(
    name: str, profile: str, options: argparse.Namespace, path: Path, until: float, total: int | None = None
) -> Side:
    """Describe one side's processes.

    Args:
        name: ``card`` or ``ghost``.
        profile: the GPU in the device table.
        options: the command line.
        path: the result file; the processes write their messages beside it.
        until: when to stop, on the monotonic clock.
        total: the ghost's memory in bytes.
    """
    command = [sys.executable, str(HERE / "operators_child.py"), name, profile]
    command += ["--inputs", str(options.inputs), "--patience", str(options.patience)]
    command += ["--dtype", *options.dtype]
    if total is not None:
        command += ["--total", str(total)]
    # Processes that compile the same kernel at once read each other's unfinished files in PyTorch's cache.
    environment = {
        **os.environ,
        "PYTHONPATH": _path(HERE.parent),
        "USE_PYTORCH_KERNEL_CACHE": "0",
        "PYTHONHASHSEED": "0",
    }
    if name == "ghost":
        environment.pop("MEMFIT_REHEARSAL", None)
    return Side(name, command, environment, path.with_suffix(".log"), until)


def _path(folder: Path) -> str:
    """Return PYTHONPATH with a folder added."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


if __name__ == "__main__":
    sys.exit(main())
