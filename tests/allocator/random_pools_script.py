"""A script that allocates at random: from private pools, during graph captures, until memory runs out.

    python random_pools_script.py SEED OPERATIONS [keep]

With ``keep``, the script never deletes pools and graphs. With expandable segments PyTorch 2.14.1 aborts when
they are deleted: it compares the number of growths with that of unmappings, which may differ.
"""

import random
import sys

import torch

MIB = 1 << 20
KEEP = "keep" in sys.argv
dice = random.Random(sys.argv[1])  # noqa: S311  nothing secret
streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
live, pools, graphs = [], [], []


def allocate():
    size = dice.choice((dice.randint(1, MIB), dice.randint(MIB, 20 * MIB), dice.randint(20 * MIB, 400 * MIB)))
    try:
        tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return
    if dice.random() < 0.2:
        tensor.record_stream(dice.choice(streams))
    live.append(tensor)


def free():
    if live:
        live.pop(dice.randrange(len(live)))


def allocate_or_free(most):
    for _ in range(dice.randint(1, most)):
        dice.choice((allocate, allocate, free))()


def capture():
    graph = torch.cuda.CUDAGraph()
    shared = [graph.pool() for graph in graphs]
    with torch.cuda.graph(graph, pool=dice.choice((None, torch.cuda.graph_pool_handle(), *shared))):
        allocate_or_free(6)
        if dice.random() < 0.2:
            torch.cuda.empty_cache()
    graphs.append(graph)


def allocate_to_pool():
    if not pools or dice.random() < 0.3:
        pools.append(torch.cuda.MemPool())
    with torch.cuda.use_mem_pool(dice.choice(pools)):
        allocate_or_free(6)


def on_another_stream():
    with torch.cuda.stream(dice.choice(streams)):
        allocate_or_free(6)


def drop():
    dropped = live if KEEP else dice.choice((pools, graphs, live, live))
    if dropped:
        dropped.pop(dice.randrange(len(dropped)))


def forget_all():
    live.clear()
    if not KEEP:
        dice.choice((pools, graphs)).clear()


for _ in range(int(sys.argv[2])):
    kinds = (allocate, free, drop, on_another_stream, allocate_to_pool, capture, forget_all)
    (kind,) = dice.choices((*kinds, torch.cuda.empty_cache), (5, 3, 2, 1, 1, 1, 0.2, 0.1))
    kind()
