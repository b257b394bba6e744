"""Drive PyTorch's real allocator on the ghost and record its history and its own statistics.

    python drive_allocator.py OUT '{"operations": 1500, "seed": 1, ...}'

Each operation is stamped on the events it causes (``user_metadata``), so that the statistics read after
it can be compared with the history at that point. Run with PYTORCH_ALLOC_CONF set, if wanted.
"""

import json
import pickle
import random
import sys
from contextlib import ExitStack
from pathlib import Path

from memfit.ghost.build.runtime_library import build_ghost
from memfit.ghost.ghost_device import GhostDevice
from memfit.ghost.load_ghost import load

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.allocator_comparison.sizes import EDGES, size_of

MIB, GIB = 1 << 20, 1 << 30
DRAWN_EDGES = tuple(edge for edge in EDGES if edge != 32 * MIB)  # seeds stand for known histories

options = {
    "operations": 1500,
    "seed": 0,
    "total": 8 * GIB,
    "streams": 1,
    "share": 0.0,  # of new tensors that another stream uses too
    "pools": 0,  # private pools beside the default one
    "graphs": 0.0,  # share of operations that capture a CUDA graph, with a private pool and deferred frees
    "history_from": 0,  # the operation at which recording begins
    "training_steps": 0,
    "fraction": None,
} | json.loads(sys.argv[2])

ghost = load(build_ghost())
ghost.configure(
    GhostDevice(
        name="NVIDIA A100-SXM4-80GB",
        major=8,
        minor=0,
        multiprocessors=108,
        threads_per_multiprocessor=2048,
        blocks_per_multiprocessor=32,
        total_bytes=options["total"],
        shared_per_block=49152,
        shared_per_block_optin=166912,
        shared_per_multiprocessor=167936,
        l2_bytes=40 * MIB,
        memory_bus_bits=5120,
        clock_khz=1410000,
        memory_clock_khz=1215000,
    )
)

import torch  # noqa: E402  the ghost comes first

memory = torch.cuda.memory
dice = random.Random(options["seed"])  # noqa: S311  nothing secret
truth = []


def record():
    memory._record_memory_history(max_entries=sys.maxsize, stacks="python")


def note(operation):
    statistics = torch._C._cuda_memoryStats(0)
    now = [statistics[f"{name}_bytes"]["all"]["current"] for name in ("allocated", "reserved")]
    truth.append((operation, *now))
    memory._set_memory_metadata(str(operation + 1))


def size():
    return size_of(dice.choice(("small", "small", "middle", "large", "edge")), dice, edges=DRAWN_EDGES)


def allocate(streams, pools):
    stream = dice.choice(streams)
    with ExitStack() as stack:
        stack.enter_context(torch.cuda.stream(stream))
        pool = dice.choice((None, *pools))
        if pool is not None:
            stack.enter_context(torch.cuda.use_mem_pool(pool))
        tensor = torch.empty(size(), dtype=torch.uint8, device="cuda")
    if dice.random() < options["share"]:
        tensor.record_stream(dice.choice(streams))
    return tensor


def capture(streams):
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(dice.randint(1, 6)):
            kept.append(torch.empty(size() // 4 + 1, dtype=torch.uint8, device="cuda"))
            if dice.random() < options["share"]:
                kept[-1].record_stream(dice.choice(streams))
            if dice.random() < 0.5:
                kept.pop(0)
    return graph, kept


def random_operations():
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(options["streams"] - 1))]
    pools = [torch.cuda.MemPool() for _ in range(options["pools"])]
    live, graphs, held, in_use = [], [], False, 0
    memory._set_memory_metadata("0")
    for operation in range(options["operations"]):
        if operation == options["history_from"]:
            record()
        chance = dice.random()
        if chance < 0.003:
            torch.cuda.empty_cache()
        elif options["share"] and chance > 0.985:
            held = not held
            ghost.hold_events(held)
        elif chance < 0.003 + options["graphs"]:
            graphs = [*graphs[-4:], capture(streams)]
        elif live and dice.random() < (0.35 if in_use < 0.6 * options["total"] else 0.62):
            tensor = live.pop(dice.randrange(len(live)))
            in_use -= tensor.numel()
            del tensor
        else:
            try:
                live.append(allocate(streams, pools))
                in_use += live[-1].numel()
            except torch.OutOfMemoryError:
                pass
        note(operation)
    ghost.hold_events(False)
    return live, pools, graphs


def training(first):
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(options["training_steps"]):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(torch.randn(4096, 512, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note(first + step)
    return model, optimizer


if options["fraction"]:
    torch.cuda.set_per_process_memory_fraction(options["fraction"])
kept = (random_operations(), training(options["operations"]) if options["training_steps"] else None)
result = {
    "statistics": {
        name: value for name, value in torch.cuda.memory_stats().items() if isinstance(value, int)
    },
    "truth": truth,
    "snapshot": memory._snapshot(),
}
with Path(sys.argv[1]).open("wb") as file:
    pickle.dump(result, file)
