"""Compare the speed of memfit's allocator with PyTorch's own on the ghost: same operations, alternating runs.

    python benchmarks/allocator_speed.py [--operations 100000] [--runs 9] [--json FILE]

Python calls PyTorch's allocator operation by operation; memfit's serves a list of requests, as in a replay.
Both count every statistic. ``random`` is the mix of sizes of the differential test; ``training`` is a GPT's
steps, recorded on the ghost.
Exits with 1 if the median rate of memfit's allocator is less than 0.7 of PyTorch's.
"""

import random
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from measuring import EXAMPLES, ROOT, at_least_1, command_line, in_turns, load_ghost, write_json

from memfit.allocator.config import AllocatorConfig
from memfit.allocator.replay import replay_requests
from memfit.allocator.requests import AllocatorRequests, RequestKind, allocator_requests_of_trace

sys.path.insert(0, str(ROOT / "tests"))
from support.allocator_comparison.drive import Sizes

TARGET = 0.7
TOTAL = 80 << 30

Operation = tuple[int, int]
"""(number of a block, bytes to allocate, or 0 to free the block)."""


def random_operations(count: int) -> list[Operation]:
    """Return a random mix of operations that keeps a few hundred blocks live."""
    dice = random.Random(0)  # noqa: S311 - nothing secret
    sizes, live, operations = Sizes(dice), [], []
    few = 400
    for number in range(count):
        if live and dice.random() < (0.35 if len(live) < few else 0.62):
            operations.append((live.pop(dice.randrange(len(live))), 0))
        else:
            live.append(number)
            operations.append((number, sizes.next() // 4 + 1))
    return operations


def training_operations(count: int) -> list[Operation]:
    """Return a training script's operations, repeated as often as needed."""
    import memfit

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.memfit"
        memfit.dry_run(EXAMPLES / "gpt.py", output=path, stdout_to_stderr=True)
        requests = allocator_requests_of_trace(memfit.read(path))
    once = [
        (number, size if ask == RequestKind.MALLOC else 0)
        for ask, number, size in zip(requests.ask, requests.block, requests.size, strict=True)
        if ask in (RequestKind.MALLOC, RequestKind.FREE)
    ]
    freed = {number for number, size in once if not size}
    once += [(number, 0) for number, size in once if size and number not in freed]
    return once * -(-count // len(once))


def main() -> int:
    """Run the allocators in alternation and print rates and ratios; return 1 if the target is missed."""
    parser = command_line(__doc__, results=True)
    parser.add_argument("--operations", type=at_least_1, default=100_000)
    parser.add_argument("--runs", type=at_least_1, default=9)
    arguments = parser.parse_args()
    training = training_operations(arguments.operations)
    workloads = {"random": random_operations(arguments.operations), "training": training}
    load_ghost(total=TOTAL)
    import torch

    torch.cuda.init()
    rows = {}
    for name, operations in workloads.items():
        requests = AllocatorRequests()
        for number, size in operations:
            requests.add(RequestKind.MALLOC if size else RequestKind.FREE, 0, number, size)
        ways = {
            "pytorch": partial(pytorch_seconds, torch, operations),
            "memfit": partial(memfit_seconds, requests),
        }
        runs = [*in_turns(ways, arguments.runs)]
        rows[name] = {"operations": len(operations)} | {
            f"{way}_us": 1e6 * statistics.median(run[way] for run in runs) / len(operations) for way in ways
        }
        rows[name]["rate"] = statistics.median(run["pytorch"] / run["memfit"] for run in runs)
    print(f"{'':10} {'PyTorch':>10} {'memfit':>10}    rate relative to PyTorch's")
    for name, row in rows.items():
        print(f"{name:10} {row['pytorch_us']:7.2f} us {row['memfit_us']:7.2f} us    {row['rate']:.2f}")
    met = all(row["rate"] >= TARGET for row in rows.values())
    print(f"target {TARGET}: {'met' if met else 'MISSED'}")
    write_json(arguments.json, {"target": TARGET, "met": met, "rows": rows})
    return 0 if met else 1


def pytorch_seconds(torch, operations: list[Operation]) -> float:  # noqa: ANN001 - the module
    """Return the seconds that PyTorch's allocator takes for the operations."""
    malloc = torch._C._cuda_cudaCachingAllocator_raw_alloc
    free = torch._C._cuda_cudaCachingAllocator_raw_delete
    live = {}
    begun = time.perf_counter()
    for number, size in operations:
        if size:
            live[number] = malloc(size, 0)
        else:
            free(live.pop(number))
    torch.cuda.memory_stats()
    seconds = time.perf_counter() - begun
    for address in live.values():
        free(address)
    torch.cuda.empty_cache()
    return seconds


def memfit_seconds(requests: AllocatorRequests) -> float:
    """Return the seconds that memfit's allocator takes for the requests."""
    begun = time.perf_counter()
    fits = replay_requests(requests, AllocatorConfig(), total=TOTAL).fits
    seconds = time.perf_counter() - begun
    if not fits:
        raise SystemExit("The device is too small for this workload.")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
