"""Scenarios of memory that runs short, captured graphs, and several processes or GPUs."""

import os
import sys

from cuda_helpers import MIB, TOTAL, ghost, leave, live, mib, used  # before torch: it loads the ghost

# isort: split
import torch
from torch import nn

import memfit
from memfit.arenas import arena_library
from memfit.arenas.arena_memory import CudaArenaMemory
from memfit.errors import UsageError


def pages_move():
    leave(64)
    CudaArenaMemory()
    with torch.cuda.stream(torch.cuda.Stream()):
        waits = mib(16)
        waits.record_stream(torch.cuda.Stream())
        parts = [mib(3) for _ in range(12)]
    ghost.hold_events(True)
    del waits
    kept = mib(26)  # fits into 28: 12 are free, and 16 more once the other stream is done
    del parts[::2]
    more = mib(6)  # each 3 MiB still in use blocks a page that it shares
    print(live(), used() == TOTAL / MIB, len(kept) + len(more))


def out_of_memory():
    leave(64)
    CudaArenaMemory()
    kept = mib(16)
    for size in (64, 1 << 40):
        try:
            mib(size)
        except torch.OutOfMemoryError as error:
            print(error)
    print(len(mib(48)) // MIB, live(), torch.empty(0, device="cuda").data_ptr(), len(kept) // MIB)


def fraction():
    CudaArenaMemory()
    torch.cuda.set_per_process_memory_fraction(64 * MIB / TOTAL)
    kept = mib(48)
    try:
        mib(17)
    except torch.OutOfMemoryError as error:
        print(str(error)[-90:])
    print(len(mib(16)) + len(kept) == 64 * MIB)


def arena_short_of_memory():
    leave(64)
    place = CudaArenaMemory()
    kept = mib(16)
    print(place.reserve(32 * MIB), place.reserve(49 * MIB), used() - TOTAL / MIB + 64)
    print(place.reserve(48 * MIB), len(kept) // MIB)


def engine():
    """The engine repeats steps that run out of memory in smaller parts."""

    def loss(model, part):
        return model(part[0]).square().mean()

    leave(400)
    arena = memfit.arena()
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    made = memfit.Engine(model, memfit.Plan(), optimizer=optimizer, loss=loss)
    batch = torch.randn(16384, 1024, device="cuda")
    for _ in range(4):
        with arena.train(batch):
            done = made.step((batch, batch))
    print(done.optimizer_step, done.micro_step, arena.report().steps[0].placed)


# ---- Captured graphs


def captured():
    CudaArenaMemory()
    x = mib(2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        mib(10)
    inside = y.data_ptr()
    torch.cuda.empty_cache()
    before = used()
    del y
    outside = [mib(2) for _ in range(16)]
    print(before, inside in {tensor.data_ptr() for tensor in outside}, used())
    del outside, graph
    torch.cuda.empty_cache()
    print(used())


def pool_of_two_graphs():
    CudaArenaMemory()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        x = mib(8).zero_()
    with torch.cuda.graph(second, pool=first.pool()):
        y = mib(6).zero_()
    del x, first
    torch.cuda.empty_cache()
    print(used())
    del y, second
    torch.cuda.empty_cache()
    print(used())


def capture_within_a_step():
    """The arena places and records nothing of a graph, even if the capture is on the step's own stream."""
    place, side = CudaArenaMemory(), torch.cuda.Stream()
    place.reserve(16 * MIB)
    size, offset = torch.tensor([8 * MIB] * 2).numpy(), torch.tensor([0, 8 * MIB]).numpy()
    plan = arena_library.load().plan_new(2, size.ctypes.data, offset.ctypes.data)
    with torch.cuda.stream(side):
        for mode in (arena_library.PLACING, arena_library.RECORDING):
            arena_library.load().arena_begin(place.arena, mode, place.lane(), plan)
            graph, before = torch.cuda.CUDAGraph(), mib(8)
            with torch.cuda.graph(graph, stream=side):
                inside = mib(8).zero_()
            after = mib(8)
            tally = arena_library.step_tally(place.arena)
            print(
                tally["placed"], tally["unplanned"], arena_library.load().arena_recorded_count(place.arena, 0)
            )
            del before, inside, after


def recorded_with_another_stream():
    place = CudaArenaMemory()
    arena_library.load().arena_begin(place.arena, arena_library.RECORDING, place.lane(), None)
    x, y = mib(1), mib(2)
    x.record_stream(torch.cuda.Stream())
    y.record_stream(torch.cuda.current_stream())
    del x, y
    arena_library.load().arena_end(place.arena)
    print(arena_library.recorded_allocations(place.arena, before=False).tolist())


def capture_out_of_memory():
    leave(16)
    CudaArenaMemory()
    mib(4)  # freed, and still mapped
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            mib(2).zero_()
            mib(18)
    except torch.OutOfMemoryError as error:
        print(error)
    print(len(mib(14)) // MIB)


def two_captures():
    CudaArenaMemory()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        mib(2).zero_()
        try:
            second.capture_begin()
        except RuntimeError as error:
            print(str(error).splitlines()[0])


def mem_pool():
    CudaArenaMemory()
    try:
        torch.cuda.MemPool()
    except RuntimeError as error:
        print(error)


# ---- Processes and GPUs


def forked():
    CudaArenaMemory()
    x = mib(8)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        del x
        torch.cuda.empty_cache()
        os._exit(arena_library.gpu_bytes_by_use(0)["live"] != 8 * MIB)
    print(os.waitpid(child, 0)[1], live())


def too_late():
    torch.cuda.init()
    try:
        CudaArenaMemory()
    except UsageError as error:
        print(error)


def several_gpus():
    place = CudaArenaMemory()
    with torch.cuda.device(1):
        x = torch.empty(4 * MIB, device="cuda")
        place.lane()
        print(
            place.reserve(4 * MIB),
            arena_library.gpu_bytes_by_use(1)["arena"] // MIB,
            arena_library.gpu_bytes_by_use(0)["pages"],
        )
    print(len(x.to("cuda:0")) // MIB, arena_library.gpu_bytes_by_use(0)["heaps"] // MIB)
    try:
        place.lane()
    except UsageError as error:
        print(error)
