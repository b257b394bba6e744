"""Measure the time of one candidate in the warm pool and in a new process, in alternation.

    python benchmarks/pool_speed.py [--runs 9] [--json FILE]

The candidate is two training steps of GPT-2 small in bfloat16 with a batch of 4 x 1024. Exits with 1 if a
warm candidate takes more than 0.15 s or a peak differs.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

from memfit.devices import find_device
from memfit.ghost.build.runtime_library import build
from memfit.ghost.device import GhostDevice

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.fork_pool import ForkPool, PoolJob

TARGET = 0.15  # seconds
CANDIDATES = Path(__file__).parents[1] / "tests/ghost/fork_pool_targets.py"


def main() -> int:
    """Time warm and cold candidates in alternation and print both; return 1 if the target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error("--runs must be at least 1")
    built, device = build(), GhostDevice.of(find_device("A100-80GB"))
    candidate = PoolJob(f"{CANDIDATES}:gpt2_small")
    warm, cold, answers = [], [], []
    with ForkPool(built, device) as pool:
        pool.run(candidate)
        for _ in range(arguments.runs):
            begun = time.perf_counter()
            answers.append(pool.run(candidate))
            warm.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            with ForkPool(built, device) as fresh:
                answers.append(fresh.run(candidate))
            cold.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        answers += pool.map([candidate] * 20)
        together = time.perf_counter() - begun
    same = all(answer == answers[0] for answer in answers)
    result = {
        "warm_seconds": statistics.median(warm),
        "warm_range": [min(warm), max(warm)],
        "cold_seconds": statistics.median(cold),
        "cold_to_warm": statistics.median(b / a for a, b in zip(warm, cold, strict=True)),
        "twenty_together_seconds": together,
        "peaks": answers[0],
        "peaks_identical": same,
        "target_seconds": TARGET,
    }
    print(f"one candidate, warm    {result['warm_seconds']:.3f} s  ({min(warm):.3f}-{max(warm):.3f})")
    print(f"one candidate, cold    {result['cold_seconds']:.3f} s  ({result['cold_to_warm']:.0f} x warm)")
    print(f"twenty, side by side   {together:.2f} s")
    print(f"peaks of all           {'identical' if same else 'DIFFERENT'}: {answers[0]}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    met = same and result["warm_seconds"] <= TARGET
    print(f"target {TARGET} s: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
