"""Scenarios on the ghost with the arena in PyTorch's allocator's place, each in a forked child.

Prints what each of them printed, as JSON; ``test_cuda.py`` says what that should be.
"""

import gc
import json
import os
import sys
import traceback
import warnings
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from memfit.devices import find_device
from memfit.errors import UsageError
from memfit.ghost.build.runtime_library import build
from memfit.ghost.device import GhostDevice
from memfit.ghost.load import load

MIB = 1 << 20
TOTAL = find_device("A100-80GB").total_bytes

ghost = load(build())

import torch  # noqa: E402 - the ghost comes first
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

import memfit  # noqa: E402
from memfit.arenas import native  # noqa: E402
from memfit.arenas.cuda import CudaMemory  # noqa: E402


def used():
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


def live():
    return native.counted(0)["live"] / MIB


def mib(size):
    return torch.empty(round(size * MIB), dtype=torch.uint8, device="cuda")


def leave(left):
    """Leave so many MiB of the card to this process."""
    ghost.take(TOTAL - left * MIB)


# ---- Training


def cnn():
    torch.manual_seed(0)
    sizes = [3, 64, 128, 256, 256]
    layers = [
        part
        for before, after in pairwise(sizes)
        for part in (nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)).cuda()
    return model, (64, 3, 96, 96), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


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
    CudaMemory()
    train()


def planned():
    arena = memfit.arena()
    parts, taken = cnn(), []
    for _ in range(5):
        with arena.train():
            step(*parts)
        taken.append(native.counted(0)["pages"])
    (kind,), count = arena.report().steps, native.counted(0)
    print(kind.recorded, kind.placed, kind.kept, kind.unplanned, kind.planned == kind.live)
    print(count["pages"] / MIB == used(), count["arena"] + count["heaps"] == count["pages"])
    print(count["pages"] - count["most_live"] < 8 * MIB)  # pages in part
    print(count["most_pages"] == max(taken))  # a plan's arena is made of what its steps had
    print(max(taken[:3]) < 1.04 * count["most_live"])  # recorded steps use what is free before new pages


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
            told = [(kind.recorded, kind.placed, kind.unplanned) for kind in arena.report().steps]
            print(told, plans.exists(), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def lent():
    """An evaluation that is recorded, and memory for it or for the arena."""
    arena = memfit.arena()
    parts = cnn()
    for _ in range(4):
        with arena.train():
            step(*parts)
    arena_bytes = native.counted(0)["arena"]
    leave(round(used()) + 20)
    for _ in range(2):
        with torch.no_grad(), arena.test():
            large = torch.empty(arena_bytes // 2, dtype=torch.uint8, device="cuda")
            del large
    with arena.train():
        step(*parts)
    train, test = arena.report().steps
    print(train.placed, train.unplanned, test.recorded, native.counted(0)["arena"] == arena_bytes)
    large = torch.empty(arena_bytes - 4 * MIB, dtype=torch.uint8, device="cuda")
    with arena.train():
        held = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")  # in no plan, and there is no arena
    del large
    print(native.counted(0)["arena"], len(held))


def closed():
    arena = memfit.arena()
    parts = cnn()
    for _ in range(4):
        with arena.train():
            step(*parts)
    arena.close()
    torch.cuda.empty_cache()
    count = native.counted(0)
    print(count["arena"], count["pages"] == count["heaps"])


def precisions():
    arena = memfit.arena()
    for backend in (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
        backend.fp32_precision = "ieee"
        with arena.train():
            mib(1)
    print(len(arena._kinds))


def history():
    """What PyTorch's own allocator would have reserved, by its replay: see ``default`` and ``expandable``."""
    arena = memfit.arena(history=True)
    parts = cnn()
    for _ in range(3):
        with arena.train():
            step(*parts)
    for term in arena.report().terms:
        if term.name.startswith("reserved"):
            print(term.figure.bytes / MIB)


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
    print(*(f"{Path(one.filename).name}: {one.message}" for one in warned))


# ---- Streams


def own_stream():
    CudaMemory()
    first = mib(8).data_ptr()
    again = mib(8).data_ptr()
    with torch.cuda.stream(torch.cuda.Stream()):
        other = mib(8).data_ptr()
    print(first == again, first == other, used(), live())
    torch.cuda.empty_cache()
    print(used())


def other_stream():
    CudaMemory()
    ghost.hold_events(True)
    x = mib(8)
    first = x.data_ptr()
    x.record_stream(torch.cuda.Stream())
    x.record_stream(torch.cuda.current_stream())  # its own: in order anyway
    del x
    print(mib(8).data_ptr() == first, live())  # the event is not over
    torch.cuda.synchronize()
    print(mib(8).data_ptr() == first, live())
    x = mib(4)
    first = x.data_ptr()
    x.record_stream(torch.cuda.current_stream())
    del x
    print(mib(4).data_ptr() == first)


def placed_and_used_by_another_stream():
    place = CudaMemory()
    place.reserve(16 * MIB)
    size, offset = torch.tensor([8 * MIB] * 3).numpy(), torch.tensor([0, 0, 0]).numpy()
    plan = native.load().plan_new(3, size.ctypes.data, offset.ctypes.data)
    native.load().arena_begin(place.arena, native.PLACING, place.lane(), plan)
    ghost.hold_events(True)
    x = mib(8)
    first = x.data_ptr()
    x.record_stream(torch.cuda.Stream())
    del x
    print(mib(8).data_ptr() == first)  # its place is not given away
    torch.cuda.synchronize()
    print(mib(8).data_ptr() == first)
    print(native.tally(place.arena)["placed"], native.tally(place.arena)["overlapping"])


def used_by_the_stream_of_a_later_step():
    place, side = CudaMemory(), torch.cuda.Stream()
    place.reserve(16 * MIB)

    def begin(size, at):
        sizes, offsets = torch.tensor([size * MIB] * 2).numpy(), torch.tensor([at * MIB] * 2).numpy()
        plan = native.load().plan_new(2, sizes.ctypes.data, offsets.ctypes.data)
        native.load().arena_begin(place.arena, native.PLACING, place.lane(), plan)

    begin(8, 0)
    x = mib(8)
    first = x.data_ptr()
    with torch.cuda.stream(side):
        begin(1, 12)
        mib(1)  # the arena follows that stream now
        x.record_stream(side)
    begin(8, 0)
    mib(2)  # in no plan: the arena follows the first stream again
    ghost.hold_events(True)
    del x
    print(mib(8).data_ptr() == first)
    torch.cuda.synchronize()
    print(mib(8).data_ptr() == first)


def several_arenas_in_turn():
    """A step on another stream may use what one before it left, once that is done."""
    place = CudaMemory()
    place.reserve(16 * MIB)
    size, offset = torch.tensor([8 * MIB]).numpy(), torch.tensor([0]).numpy()
    plan = native.load().plan_new(1, size.ctypes.data, offset.ctypes.data)
    ghost.hold_events(True)
    native.load().arena_begin(place.arena, native.PLACING, place.lane(), plan)
    x = mib(8)
    native.load().arena_end(place.arena)
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    with torch.cuda.stream(side):
        native.load().arena_begin(place.arena, native.IDLE, place.lane(), None)
        first = x.data_ptr()
        del x  # the default stream may still use it
        native.load().arena_begin(place.arena, native.PLACING, place.lane(), plan)
        print(event.query(), mib(8).data_ptr() == first, event.query())


# ---- Memory that is short


def pages_move():
    leave(64)
    CudaMemory()
    with torch.cuda.stream(torch.cuda.Stream()):
        waits = mib(16)
        waits.record_stream(torch.cuda.Stream())
        parts = [mib(3) for _ in range(12)]
    ghost.hold_events(True)
    del waits
    kept = mib(26)  # of 28, if that is waited for: 12 are there, and 16 are the other stream's
    del parts[::2]
    more = mib(6)  # a page in part of each 3 MiB cannot move
    print(live(), used() == TOTAL / MIB, len(kept) + len(more))


def out_of_memory():
    leave(64)
    CudaMemory()
    kept = mib(16)
    for size in (64, 1 << 40):
        try:
            mib(size)
        except torch.OutOfMemoryError as error:
            print(error)
    print(len(mib(48)) // MIB, live(), torch.empty(0, device="cuda").data_ptr(), len(kept) // MIB)


def fraction():
    CudaMemory()
    torch.cuda.set_per_process_memory_fraction(64 * MIB / TOTAL)
    kept = mib(48)
    try:
        mib(17)
    except torch.OutOfMemoryError as error:
        print(str(error)[-90:])
    print(len(mib(16)) + len(kept) == 64 * MIB)


def arena_short_of_memory():
    leave(64)
    place = CudaMemory()
    kept = mib(16)
    print(place.reserve(32 * MIB), place.reserve(49 * MIB), used() - TOTAL / MIB + 64)
    print(place.reserve(48 * MIB), len(kept) // MIB)


def engine():
    """Steps that run out of memory are made in smaller parts."""

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
    CudaMemory()
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
    CudaMemory()
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
    """Nothing of a graph is placed or recorded, although it is the step's stream that is captured."""
    place, side = CudaMemory(), torch.cuda.Stream()
    place.reserve(16 * MIB)
    size, offset = torch.tensor([8 * MIB] * 2).numpy(), torch.tensor([0, 8 * MIB]).numpy()
    plan = native.load().plan_new(2, size.ctypes.data, offset.ctypes.data)
    with torch.cuda.stream(side):
        for mode in (native.PLACING, native.RECORDING):
            native.load().arena_begin(place.arena, mode, place.lane(), plan)
            graph, before = torch.cuda.CUDAGraph(), mib(8)
            with torch.cuda.graph(graph, stream=side):
                inside = mib(8).zero_()
            after = mib(8)
            tally = native.tally(place.arena)
            print(tally["placed"], tally["unplanned"], native.load().arena_recorded_count(place.arena, 0))
            del before, inside, after


def recorded_with_another_stream():
    place = CudaMemory()
    native.load().arena_begin(place.arena, native.RECORDING, place.lane(), None)
    x, y = mib(1), mib(2)
    x.record_stream(torch.cuda.Stream())
    y.record_stream(torch.cuda.current_stream())
    del x, y
    native.load().arena_end(place.arena)
    print(native.recorded(place.arena, before=False).tolist())


def capture_out_of_memory():
    leave(16)
    CudaMemory()
    mib(4)  # freed, and still mapped
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            mib(2).zero_()
            mib(18)
    except torch.OutOfMemoryError as error:
        print(error)
    print(len(mib(14)) // MIB)


def two_captures():
    CudaMemory()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        mib(2).zero_()
        try:
            second.capture_begin()
        except RuntimeError as error:
            print(str(error).splitlines()[0])


def mem_pool():
    CudaMemory()
    try:
        torch.cuda.MemPool()
    except RuntimeError as error:
        print(error)


# ---- Processes, and order


def forked():
    CudaMemory()
    x = mib(8)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        del x
        torch.cuda.empty_cache()
        os._exit(native.counted(0)["live"] != 8 * MIB)
    print(os.waitpid(child, 0)[1], live())


def too_late():
    torch.cuda.init()
    try:
        CudaMemory()
    except UsageError as error:
        print(error)


def several_gpus():
    place = CudaMemory()
    with torch.cuda.device(1):
        x = torch.empty(4 * MIB, device="cuda")
        place.lane()
        print(place.reserve(4 * MIB), native.counted(1)["arena"] // MIB, native.counted(0)["pages"])
    print(len(x.to("cuda:0")) // MIB, native.counted(0)["heaps"] // MIB)
    try:
        place.lane()
    except UsageError as error:
        print(error)


def main(names):
    said = {}
    with TemporaryDirectory() as folder:
        for name in names:
            path = Path(folder) / name
            os.chdir(folder)
            child = os.fork()
            if not child:
                run(name, path)
            said[name] = path.read_text() if os.waitpid(child, 0)[1] == 0 else f"failed\n{path.read_text()}"
    print(json.dumps(said))


def run(name, path):
    code = 1
    with path.open("w") as file, redirect_stdout(file):
        try:
            warnings.simplefilter("error")
            ghost.configure(GhostDevice.of(find_device("A100-80GB")), count=2)
            globals()[name]()
            code = 0
        except BaseException:  # noqa: BLE001 - the test shows it
            traceback.print_exc(file=file)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
