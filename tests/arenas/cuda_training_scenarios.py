"""Scenarios of training with the arena as PyTorch's allocator, and of several streams."""

import gc
import os
import warnings
from itertools import pairwise
from pathlib import Path

from cuda_helpers import MIB, ghost, leave, live, mib, used  # before torch: it loads the ghost

# isort: split
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import memfit
from memfit.arenas import arena_library
from memfit.arenas.arena_memory import CudaArenaMemory


def cnn():
    torch.manual_seed(0)
    sizes = [3, 64, 128, 256, 256]
    layers = [
        part
        for before, after in pairwise(sizes)
        for part in (nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)).cuda()
    return model, (128, 3, 96, 96), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def transformer():
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda()
    return model, (32, 128, 256), torch.optim.AdamW(model.parameters())


def step(model, shape, optimizer):
    out = model(torch.randn(shape, device="cuda"))
    if out.dim() == 2:
        out = cross_entropy(out, torch.zeros(len(out), dtype=torch.long, device="cuda"))
    out.mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train():
    for job in (cnn, transformer):
        parts = job()
        for _ in range(3):
            step(*parts)
        print(used())
        del parts
        gc.collect()
        torch.cuda.empty_cache()


def default():
    train()


def expandable():
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    train()


def heap():
    CudaArenaMemory()
    train()


def planned():
    arena = memfit.arena()
    parts, taken = cnn(), []
    for _ in range(5):
        with arena.train():
            step(*parts)
        taken.append(arena_library.gpu_bytes_by_use(0)["pages"])
    (kind,), count = arena.report().steps, arena_library.gpu_bytes_by_use(0)
    print(kind.recorded, kind.placed, kind.kept, kind.unplanned, kind.planned == kind.live)
    print(count["pages"] / MIB == used(), count["arena"] + count["heaps"] == count["pages"])
    print(count["pages"] < 1.025 * count["most_live"])  # partly used pages
    print(count["most_pages"] == max(taken))  # the arena of a plan is built from its steps' pages
    print(max(taken[:3]) < 1.04 * count["most_live"])  # recorded steps use free pages before new ones


def configured():
    """The engine makes each update and each validation batch a step of the arena that the script opened."""
    configuration = memfit.configure({"mem_param": {"optimize_test": True, "exclude_blob": "12"}})
    arena = memfit.arena(configuration)
    model, shape, optimizer = cnn()

    def loss(model, batch):
        return cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long, device="cuda"))

    engine = memfit.Engine(model, configuration, optimizer=optimizer, loss=loss)
    batches = [torch.randn(shape, device="cuda") for _ in range(3)]
    engine.fit(batches, 2, validate=batches[:2])
    print(engine.arena is arena, [tuple(output.shape) for output in arena.outputs["12"]])
    print([(kind.recorded, kind.placed, kind.unplanned) for kind in arena.report().steps])


def configured_too_late():
    model, _, optimizer = cnn()
    try:
        memfit.Engine(model, {"mem_param": {}}, optimizer=optimizer)
    except memfit.MemfitError as error:
        print(error)
    engine = memfit.Engine(model, {"mem_param": {"optimize_train": False}}, optimizer=optimizer)
    print(engine.arena.settings.optimize_train, torch.cuda.get_allocator_backend())


def plans_of_another_process():
    plans = Path("plans.json")
    for number in range(2):
        child = os.fork()
        if not child:
            arena = memfit.arena(plans=plans)
            parts = cnn()
            for _ in range(4 - 2 * number):
                with arena.train():
                    step(*parts)
            counts = [(kind.recorded, kind.placed, kind.unplanned) for kind in arena.report().steps]
            print(counts, plans.exists(), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def lent():
    """The arena lends its memory to steps without a plan and to allocations outside of steps."""
    arena = memfit.arena()
    parts = cnn()
    for _ in range(4):
        with arena.train():
            step(*parts)
    arena_bytes = arena_library.gpu_bytes_by_use(0)["arena"]
    leave(round(used()) + 20)
    for _ in range(2):
        with torch.no_grad(), arena.test():
            large = torch.empty(arena_bytes // 2, dtype=torch.uint8, device="cuda")
            del large
    with arena.train():
        step(*parts)
    train, test = arena.report().steps
    print(
        train.placed,
        train.unplanned,
        test.recorded,
        arena_library.gpu_bytes_by_use(0)["arena"] == arena_bytes,
    )
    large = torch.empty(arena_bytes - 4 * MIB, dtype=torch.uint8, device="cuda")
    with arena.train():
        held = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")  # in no plan; the arena is lent out
    del large
    print(arena_library.gpu_bytes_by_use(0)["arena"], len(held))


def closed():
    arena = memfit.arena()
    parts = cnn()
    for _ in range(4):
        with arena.train():
            step(*parts)
    arena.close()
    torch.cuda.empty_cache()
    count = arena_library.gpu_bytes_by_use(0)
    print(count["arena"], count["pages"] == count["heaps"])


def precisions():
    arena = memfit.arena()
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
        backend.fp32_precision = "ieee"
        with arena.train():
            mib(1)
    print(len(arena._kinds))


def benchmark():
    arena = memfit.arena()
    torch.backends.cudnn.benchmark = True
    model, shape, _ = cnn()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            try:
                with arena.train():
                    model(torch.randn(shape, device="cuda"))
            except RuntimeError as error:
                print(error)
    print(*(f"{Path(warning.filename).name}: {warning.message}" for warning in warned))


# ---- Streams


def own_stream():
    CudaArenaMemory()
    first = mib(8).data_ptr()
    second = mib(8).data_ptr()
    with torch.cuda.stream(torch.cuda.Stream()):
        elsewhere = mib(8).data_ptr()
    print(first == second, first == elsewhere, used(), live())
    torch.cuda.empty_cache()
    print(used())


def other_stream():
    CudaArenaMemory()
    ghost.hold_events(True)
    x = mib(8)
    first = x.data_ptr()
    x.record_stream(torch.cuda.Stream())
    x.record_stream(torch.cuda.current_stream())  # its own stream: no wait needed
    del x
    print(mib(8).data_ptr() == first, live())  # the event has not completed
    torch.cuda.synchronize()
    print(mib(8).data_ptr() == first, live())
    x = mib(4)
    first = x.data_ptr()
    x.record_stream(torch.cuda.current_stream())
    del x
    print(mib(4).data_ptr() == first)


def placed_and_used_by_another_stream():
    place = CudaArenaMemory()
    place.reserve(16 * MIB)
    size, offset = torch.tensor([8 * MIB] * 3).numpy(), torch.tensor([0, 0, 0]).numpy()
    plan = arena_library.load().plan_new(3, size.ctypes.data, offset.ctypes.data)
    arena_library.load().arena_begin(place.arena, arena_library.PLACING, place.lane(), plan)
    ghost.hold_events(True)
    x = mib(8)
    first = x.data_ptr()
    x.record_stream(torch.cuda.Stream())
    del x
    print(mib(8).data_ptr() == first)  # its slot is still occupied
    torch.cuda.synchronize()
    print(mib(8).data_ptr() == first)
    print(
        arena_library.step_tally(place.arena)["placed"], arena_library.step_tally(place.arena)["overlapping"]
    )


def used_by_the_stream_of_a_later_step():
    place, side = CudaArenaMemory(), torch.cuda.Stream()
    place.reserve(16 * MIB)

    def begin(size, at):
        sizes, offsets = torch.tensor([size * MIB] * 2).numpy(), torch.tensor([at * MIB] * 2).numpy()
        plan = arena_library.load().plan_new(2, sizes.ctypes.data, offsets.ctypes.data)
        arena_library.load().arena_begin(place.arena, arena_library.PLACING, place.lane(), plan)

    begin(8, 0)
    x = mib(8)
    first = x.data_ptr()
    with torch.cuda.stream(side):
        begin(1, 12)
        mib(1)  # now the arena follows that stream
        x.record_stream(side)
    begin(8, 0)
    mib(2)  # in no plan: the arena follows the first stream again
    ghost.hold_events(True)
    del x
    print(mib(8).data_ptr() == first)
    torch.cuda.synchronize()
    print(mib(8).data_ptr() == first)


def several_arenas_in_turn():
    """A step on another stream may reuse the memory of an earlier step once that step's work is done."""
    place = CudaArenaMemory()
    place.reserve(16 * MIB)
    size, offset = torch.tensor([8 * MIB]).numpy(), torch.tensor([0]).numpy()
    plan = arena_library.load().plan_new(1, size.ctypes.data, offset.ctypes.data)
    ghost.hold_events(True)
    arena_library.load().arena_begin(place.arena, arena_library.PLACING, place.lane(), plan)
    x = mib(8)
    arena_library.load().arena_end(place.arena)
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    with torch.cuda.stream(side):
        arena_library.load().arena_begin(place.arena, arena_library.IDLE, place.lane(), None)
        first = x.data_ptr()
        del x  # the default stream may still use it
        arena_library.load().arena_begin(place.arena, arena_library.PLACING, place.lane(), plan)
        print(event.query(), mib(8).data_ptr() == first, event.query())
