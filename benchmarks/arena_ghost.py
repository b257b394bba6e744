"""Compare the GPU memory of training in memfit.arena with PyTorch's own allocator, on the ghost.

    python benchmarks/arena_ghost.py [--models resnet50 ...] [--steps 6] [--json FILE]

Each model trains three times, each time in a new process: with the default settings, with expandable
segments, and in an arena. The figure is the memory in use after a step as reported by cudaMemGetInfo, the
maximum over all steps; for the arena, separately over the steps before it has a plan and over placed steps.
``live`` is the lower bound for any allocator: the peak of live requested bytes, as PyTorch counts them
(``requested_bytes.all.peak``). Exits with 1 if placed steps use more than 1.02 times ``live``.
"""

import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

from measuring import MIB, command_line, load_ghost, write_json

NETWORKS = ("resnet50", "vgg16", "googlenet", "densenet121", "mobilenet_v2", "gpt2", "vit_b_16")
BATCHES = dict.fromkeys(NETWORKS, 32) | {"gpt2": 4}
ALLOCATORS = {"default": "", "expandable": "expandable_segments:True", "arena": ""}
MOST = 1.02
"""Limit of placed steps, relative to the live peak."""


def train(name: str, allocator: str, steps: int) -> dict[str, Any]:
    """Train on the ghost; return the memory in use after each step, and the arena's counts."""
    load_ghost()

    import torch
    from packed_networks import model_of

    import memfit

    arena = memfit.arena(device="cuda") if allocator == "arena" else None
    model, size, taken = model_of(name).cuda(), BATCHES[name], []
    is_text = name == "gpt2"
    batch = torch.zeros(size, 1024, dtype=torch.long) if is_text else torch.zeros(size, 3, 224, 224)
    kind = torch.optim.AdamW if name in {"gpt2", "vit_b_16"} else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.01, **({} if kind is torch.optim.AdamW else {"momentum": 0.9}))
    for _ in range(steps):
        with arena.train(batch) if arena else nullcontext():
            inputs = batch.cuda()
            loss = model(inputs, labels=inputs).loss if is_text else model(inputs).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del inputs, loss
        free, total = torch.cuda.mem_get_info()
        taken.append(total - free)
    if arena is None:
        return {"taken": taken, "live": torch.cuda.memory_stats()["requested_bytes.all.peak"]}
    (kind,) = arena.report().steps
    return {"taken": taken, "recorded": kind.recorded, "placed": kind.placed, "unplanned": kind.unplanned}


def run(name: str, allocator: str, steps: int) -> dict[str, Any]:
    """Train in a new process; return its figures."""
    command = [sys.executable, __file__, "--models", name, "--steps", str(steps), "--allocator", allocator]
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": ALLOCATORS[allocator]}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}, {allocator}: {done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(name: str, steps: int) -> dict[str, Any]:
    """Train with each allocator, and print the memory used."""
    seen = {allocator: run(name, allocator, steps) for allocator in ALLOCATORS}
    live, arena = seen["default"]["live"], seen["arena"]
    row = {
        "live": live,
        "default": max(seen["default"]["taken"]),
        "expandable": max(seen["expandable"]["taken"]),
        "recorded": max(arena["taken"][: arena["recorded"]]),
        "placed": max(arena["taken"][arena["recorded"] :]),
    }
    print(
        f"{name:14} {live / MIB:8,.0f} MiB  "
        + "  ".join(f"{key} {row[key] / live:.3f}" for key in list(row)[1:])
        + f"   {arena['placed']} steps placed, {arena['unplanned']} allocations unplanned",
        flush=True,
    )
    return {"name": name, "batch_size": BATCHES[name], **row, "unplanned": arena["unplanned"]}


def main() -> None:
    """Compare each model; exit with 1 if one exceeds the limit."""
    parser = command_line(__doc__, results=True)
    parser.add_argument("--models", nargs="+", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--allocator", choices=list(ALLOCATORS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.allocator:
        print(json.dumps(train(arguments.models[0], arguments.allocator, arguments.steps)))
        return
    print("memory in use, relative to the live peak:", flush=True)
    rows = [compare(name, arguments.steps) for name in arguments.models]
    write_json(arguments.json, rows)
    above = [row["name"] for row in rows if row["placed"] > MOST * row["live"]]
    if above:
        sys.exit(f"placed steps use more than {MOST} times the live peak: {', '.join(above)}")


if __name__ == "__main__":
    main()
