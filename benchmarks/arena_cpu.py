"""Train on the CPU in memfit.arena and with PyTorch's default allocator, in alternation.

    python benchmarks/arena_cpu.py [--models resnet50 vgg16 gpt2] [--steps 20]

Two processes train copies of a model in alternating steps. The benchmark compares their losses and gradients
bit for bit at every step. It reports the time of a step (the median of the ratios of consecutive steps, from
the first planned step on), and the parts of the process's peak:

    before       PyTorch and its libraries, after they have trained a convolution and a linear layer
    kept         parameters, optimizer state, buffers and the batch
    arena        the plan
    beyond       the rest of the process's peak in planned steps: scratch memory that libraries (oneDNN, MKL,
                 OpenMP) allocate without PyTorch, and memory that the C library has not released

``library scratch`` estimates the largest part of ``beyond``: how much more of the C library's heap is in use
during a step than between steps (mallinfo2, sampled every millisecond in steps that are not timed).
"""

import ctypes
import hashlib
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import torch
from measuring import MIB, command_line
from packed_networks import model_of
from torch import nn

import memfit

BATCHES = {"resnet50": (8, 3, 224, 224), "vgg16": (4, 3, 224, 224), "gpt2": (2, 256)}
PLANNED = 4  # steps before the first planned one: one creates optimizer state, the arena records two
SAMPLED = 2  # steps at the end in which scratch memory is sampled


def status(name: str) -> int:
    """Return VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


class Heap(ctypes.Structure):
    """The struct ``mallinfo2`` of glibc."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


class Sampler:
    """A thread that records the peak use of the C library's heap."""

    def __init__(self) -> None:
        self._mallinfo2 = ctypes.CDLL(None).mallinfo2
        self._mallinfo2.restype = Heap
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.before = self.most = self._in_use()

    def _in_use(self) -> int:
        heap = self._mallinfo2()
        return heap.uordblks + heap.hblkhd

    def _run(self) -> None:
        while not self._stop.wait(1e-3):
            self.most = max(self.most, self._in_use())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def train(name: str, steps: int, *, placed: bool, pipe: Connection) -> None:
    """Run a step for each message and send its digest and time; at the end, send the memory figures."""
    arena = memfit.arena(device="cpu") if placed else None
    warm = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 8))
    warm(torch.randn(2, 3, 8, 8)).sum().backward()
    with torch.device("meta"):
        model_of(name)  # imports the model's modules
    before = status("VmRSS")
    torch.manual_seed(0)
    model = model_of(name).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    shape = BATCHES[name]
    batch = torch.randint(50257, shape) if name == "gpt2" else torch.randn(shape)
    labels = torch.arange(len(batch))

    def step() -> str:
        with arena.train(batch) if arena else nullcontext():
            torch.manual_seed(1)  # dropout
            output = model(batch, labels=batch).loss if name == "gpt2" else None
            loss = nn.functional.cross_entropy(model(batch), labels) if output is None else output
            loss.backward()
            digest = hashlib.sha256(loss.detach().numpy().tobytes())
            for parameter in model.parameters():
                digest.update(parameter.grad.numpy())
            optimizer.step()
            optimizer.zero_grad()
        return digest.hexdigest()

    for number in range(steps):
        pipe.recv()
        if number == PLANNED:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        began = time.perf_counter()
        digest = step()
        pipe.send((digest, time.perf_counter() - began))
    peak = status("VmHWM")
    with Sampler() as heap:
        for _ in range(SAMPLED):
            step()
    kept = [*model.parameters(), *model.buffers(), batch, labels]
    kept += [value for state in optimizer.state.values() for value in state.values() if value is not None]
    report = arena.report().steps[0] if arena else None
    pipe.send((before, sum(tensor.nbytes for tensor in kept), peak, heap.most - heap.before, report))


def compare(name: str, steps: int) -> None:
    """Train in two processes in alternation, and print the comparison."""
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for placed in (False, True):
        ours, theirs = context.Pipe()
        child = context.Process(target=train, args=(name, steps), kwargs={"placed": placed, "pipe": theirs})
        child.start()
        pipes.append(ours)
        children.append(child)
    ratios, times, same = [], [], 0
    for number in range(steps):
        answers = []
        for pipe in pipes if number % 2 else reversed(pipes):
            pipe.send("step")
            answers.append((pipe, pipe.recv()))
        (digest, default), (other, placed) = (dict(answers)[pipe] for pipe in pipes)
        same += digest == other
        if number >= PLANNED:
            ratios.append(placed / default)
            times.append((default, placed))
    (_, _, default_peak, _, _), (before, kept, peak, scratch, plan) = (pipe.recv() for pipe in pipes)
    for child in children:
        child.join()
    beyond = peak - before - kept - plan.planned
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    print(
        f"{name} {BATCHES[name]}: {same} of {steps} steps bit-identical; {plan.placed} placed, "
        f"{plan.allocations} allocations each, {plan.kept} kept, {plan.unplanned} unplanned\n"
        f"  time     {statistics.median(ratios):.3f} of the default's, median of {len(ratios)} "
        f"({medians[1]:.3f} and {medians[0]:.3f} s)\n"
        f"  peak     {peak / MIB:,.0f} MiB, {peak / default_peak:.3f} of the default's "
        f"({default_peak / MIB:,.0f} MiB)\n"
        f"  parts    {before / MIB:,.0f} before, {kept / MIB:,.0f} kept, {plan.planned / MIB:,.0f} arena, "
        f"{beyond / MIB:,.0f} beyond; library scratch {scratch / MIB:,.0f}\n"
        f"  planned  {plan.planned / plan.live:.4f} of the live peak, "
        f"{plan.planned / plan.unshared:.3f} of a separate buffer per allocation",
        flush=True,
    )


def compare_models(
    doc: str | None, compare: Callable[[str, int], None], models: Iterable[str], option: str, number: int
) -> None:
    """Compare the models of the command line; ``option`` sets the number of steps or updates of each."""
    parser = command_line(doc)
    parser.add_argument("--models", nargs="+", default=list(models), choices=list(models))
    parser.add_argument(option, type=int, default=number, dest="number")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    for name in arguments.models:
        compare(name, arguments.number)


if __name__ == "__main__":
    compare_models(__doc__, compare, BATCHES, "--steps", 20)
