"""Run out of memory, or press Ctrl-C, at every point of a step, and check how the engine reacts.

    python benchmarks/oom_everywhere.py [--every N]

On the CPU, the benchmark injects a fault before every operation, and Ctrl-C also before every line of the
engine; on the ghost, PyTorch's own allocator refuses every allocation in turn. After each fault the
benchmark compares parameters, buffers, optimizer state, float32 masters, loss scale, scheduler, random
numbers, counters and the position in the data with those before the fault, bit for bit (on the ghost, which
computes no values: memory, counters, random numbers, and which state exists), and repeats the step. Exits
with 1 if it finds a change that the engine did not report.

    recovered    the engine retried in smaller parts; equal bit for bit to a run planned with those parts
    reported     the engine raised, and nothing changed; repeating the step gives the result without the fault
    torn         the fault hit an unprotected update; the engine refuses to save and to continue
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from measuring import command_line

from memfit.devices import find_device
from memfit.errors import TargetError
from memfit.ghost.build.runtime_library import build
from memfit.ghost.device import GhostDevice

TESTS = Path(__file__).parents[1] / "tests"
SWEEP = TESTS / "support" / "ghost_oom_sweep.py"
sys.path.insert(0, str(TESTS))

from support.fault_injection import CASES, FAULTS, Sweep  # noqa: E402
from support.fork_pool import ForkPool, PoolJob  # noqa: E402

SITUATIONS = [(0, "always"), (0, "auto"), (1, "always"), (1, "auto")]
"""(step, protection). Step 0 creates the optimizer state."""


def on_the_cpu(every: int) -> Iterator[tuple[str, str, Counter[str]]]:
    """Inject each kind of fault at every point of each case; yield the outcomes."""
    for case in CASES:
        for fault in FAULTS:
            found: Counter[str] = Counter()
            for step, protect in SITUATIONS:
                sweep = Sweep(case, step, fault, protect)
                for at in range(0, sweep.places, every):
                    try:
                        found[sweep.outcome(at)] += 1
                    except AssertionError:
                        found["HARMED"] += 1
                        print(f"{case}, step {step}, protect={protect}, {fault} {at}", file=sys.stderr)
            yield case, fault, found


def on_the_ghost(every: int) -> Iterator[tuple[str, str, Counter[str]]]:
    """Refuse every allocation of each case in turn; yield the outcomes."""
    with ForkPool(build(), GhostDevice.of(find_device("A100-80GB"))) as pool:
        for case in CASES:
            found: Counter[str] = Counter()
            for step, protect in SITUATIONS:
                options = {"case": case, "step": step, "protect": protect, "every": every}
                try:
                    found.update(pool.run(PoolJob(f"{SWEEP}:sweep", options)))
                except TargetError as error:
                    found["HARMED"] += 1
                    print(error, file=sys.stderr)
            yield case, "allocator refuses, ghost", found


def with_shrinking_memory() -> None:
    """Print how often the engine retries a step as memory shrinks."""
    with ForkPool(build(), GhostDevice.of(find_device("A100-80GB"))) as pool:
        found = pool.run(PoolJob(f"{SWEEP}:capacities", {}))
    for allowed, retried in found:
        outcome = "reported: not even single samples fit" if retried is None else f"retried {retried} times"
        print(f"{allowed / 2**20:8.1f} MiB  {outcome}")


def main() -> int:
    """Print a line for each case and kind of fault, and totals; return 1 if a fault did harm."""
    parser = command_line(__doc__)
    parser.add_argument("--every", type=int, default=1, help="test only every N-th point")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    total: Counter[str] = Counter()
    with_shrinking_memory()
    for source in (on_the_ghost, on_the_cpu):
        for case, fault, found in source(arguments.every):
            total += found
            print(f"{case:55}{fault:34}{_counts(found)}", flush=True)
    print(f"{sum(total.values()):,} faults: {_counts(total)}; harmed {total['HARMED']}")
    return int(total["HARMED"] > 0)


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{what} {count:,}" for what, count in sorted(found.items()))


if __name__ == "__main__":
    sys.exit(main())
