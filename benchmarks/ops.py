"""Run PyTorch's own database of operators on the ghost, forward and backward, and count the outcomes.

    python benchmarks/ops.py                        every operator, float32
    python benchmarks/ops.py --sample 300 --seed 1  a random sample of them
    python benchmarks/ops.py --dtype complex64 linalg.svd fft.fft2

The benchmark creates the sample inputs of PyTorch's tests on the ghost, calls the operator on them and, if
it is differentiable, runs a backward from the sum of its outputs. The same call on the CPU is the referee
for shapes and dtypes. Operators run in forked children, which attributes a crash to the operator that
caused it. An operator that fails is retried in a new child, which attributes the gaps it reaches to it
alone.

    ran        shapes and dtypes as on the CPU, or other sizes if the ghost returned a stand-in value
    refused    the operator reached known gaps of the ghost (runtime/gaps.txt), which are listed
    real too   PyTorch has no CUDA kernel, the CPU raises the same type of error, or EXPECTED_ERRORS lists it
    other      any other error, or shapes that differ without a stand-in value
    crashed    the process died or exceeded its time limit

Needs expecttest, which PyTorch's operator database imports (pip install expecttest).
"""

import argparse
import json
import os
import platform
import random
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from measuring import command_line, load_ghost, write_json
from operator_samples import call, database, describe, first_line, has_backward, samples, signature

from memfit.devices import find_device
from memfit.ghost.build.runtime_library import build_ghost
from memfit.ghost.runtime_bindings import GhostRuntime
from memfit.ghost.values.value_options import GpuValueOptions

if TYPE_CHECKING:
    import torch
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

OUTCOMES = ("ran", "refused", "real too", "other", "crashed")
_NO_STATISTICS = "in evaluation mode PyTorch's CUDA kernel returns statistics and its CPU kernel does not"
_EMPTY_BATCH = "PyTorch's own shapes for an empty batch do not match; the ghost is not involved"
EXPECTED_ERRORS: Mapping[str, tuple[str, str]] = {
    "native_batch_norm": ("32[2]', 'float32[2]'", _NO_STATISTICS),
    "_native_batch_norm_legit": ("32[2]', 'float32[2]'", _NO_STATISTICS),
    "native_layer_norm": (
        "32[1, 1, 1]'",
        "PyTorch's CUDA kernel keeps statistics in float32, its CPU kernel does not",
    ),
    "linalg.eig": ("must match the size of tensor b (0)", _EMPTY_BATCH),
    "linalg.eigvals": ("must match the size of tensor b (0)", _EMPTY_BATCH),
}
"""Operator -> (part of an error, why a real GPU should raise it too). Read from the code, not tested."""
GPU = find_device("A100-80GB")
PATIENCE = 300
"""Time limit for one operator, in seconds."""


@dataclass(frozen=True, slots=True)
class OperatorResult:
    """The outcome of one operator, over all its sample inputs."""

    op: str
    dtype: str
    outcome: str
    """One of ``OUTCOMES``."""
    samples: int
    """Sample inputs tried."""
    compared: int = 0
    """Samples whose shapes and dtypes equalled those on the CPU."""
    text: str = ""
    """The gaps or the error, with the sample that caused it."""
    assumed: tuple[str, ...] = ()
    """Names of the values and sizes that the ghost assumed."""


@dataclass(frozen=True, slots=True)
class OperatorCase:
    """An operator to try, by its index in the database, and a dtype by name."""

    index: int
    dtype: str


class DiffersError(Exception):
    """The ghost's outputs differ in shape or dtype from the CPU's."""


class Trial:
    """Runs operators in this process, a child that initialises CUDA itself."""

    def __init__(self, ghost: GhostRuntime, most_samples: int, *, show: bool = False) -> None:
        from memfit.ghost.values import gpu_reads

        self._ghost = ghost
        self._most = most_samples
        self._show = show
        self._values = gpu_reads.answer_gpu_reads(ghost, GpuValueOptions(), lambda *_, **__: None)

    def run(self, op: "OpInfo", dtype: "torch.dtype") -> OperatorResult:
        """Try every sample of one operator; the first failure decides the outcome."""
        import torch

        count = self._compared = 0
        name = op.formatted_name
        kind = str(dtype).removeprefix("torch.")
        grad = has_backward(op, dtype)
        try:
            where = "creating samples"
            on_cpu = None
            references = References(op, dtype, self._most, grad=grad)
            for count, sample in enumerate(islice(samples(op, "cuda:0", dtype, grad), self._most), 1):
                where = f"sample {count}"
                on_cpu = references.like(sample)
                self._one(op, sample, on_cpu, grad=grad)
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - any exception of an operator is its outcome
            gaps = self._gaps()
            text = f"{where}: {type(error).__name__}: {first_line(error)}"
            if gaps:
                return OperatorResult(name, kind, "refused", count, text=f"{', '.join(gaps)} ({text})")
            if self._show:
                traceback.print_exc()
            part, reason = EXPECTED_ERRORS.get(op.name, ("", ""))
            if reason and part in text:
                return OperatorResult(name, kind, "real too", count, text=f"{reason} ({text})")
            same = _no_kernel(error) or (on_cpu is not None and _fails_alike(op, on_cpu, error, grad=grad))
            return OperatorResult(name, kind, "real too" if same else "other", count, text=text)
        return OperatorResult(name, kind, "ran", count, self._compared, assumed=self._ghost.gaps_reached())

    def _gaps(self) -> list[str]:
        known = {gap.name for gap in build_ghost().gaps}
        return [name for name in self._ghost.gaps_reached() if name in known]

    def _one(self, op: "OpInfo", sample: "SampleInput", on_cpu: "SampleInput | None", *, grad: bool) -> None:
        before = self._values.last_reads()
        found = _described_call(op, sample, backward=grad)
        stand_ins = [read for read in self._values.last_reads() if all(read is not other for other in before)]
        if on_cpu is None:
            return
        try:
            expected = _described_call(op, on_cpu, backward=grad)
        except Exception:  # noqa: BLE001 - some operators have no CPU kernel for some dtypes
            return
        if found == expected:
            self._compared += 1
        elif not stand_ins:
            raise DiffersError(f"{found} on the ghost, {expected} on the CPU")


class References:
    """One operator's CPU samples by shapes and arguments, because samples differ between devices."""

    def __init__(self, op: "OpInfo", dtype: "torch.dtype", most: int, *, grad: bool) -> None:
        self._by_signature: dict[str, list[SampleInput]] = {}
        for sample in islice(samples(op, "cpu", dtype, grad), 2 * most):
            self._by_signature.setdefault(signature(sample), []).append(sample)

    def like(self, sample: "SampleInput") -> "SampleInput | None":
        """Remove and return a CPU sample with the same shapes and arguments; None if there is none."""
        alike = self._by_signature.get(signature(sample))
        return alike.pop(0) if alike else None


def _described_call(op: "OpInfo", sample: "SampleInput", *, backward: bool) -> list[object]:
    return [describe(leaf) for leaf in call(op, sample, backward=backward)]


def _fails_alike(op: "OpInfo", sample: "SampleInput", error: Exception, *, grad: bool) -> bool:
    try:
        call(op, sample, backward=grad)
    except Exception as other:  # noqa: BLE001
        return type(other) is type(error)
    return False


def _no_kernel(error: Exception) -> bool:
    """Return whether PyTorch itself reports that it has no kernel for CUDA."""
    return isinstance(error, NotImplementedError) and str(error).startswith("Could not run 'aten::")


# ---- Children --------------------------------------------------------------------------------------


def run_all(jobs: Sequence[OperatorCase], trial: Any, *, batch: int) -> Iterator[OperatorResult]:
    """Run every job in forked children, ``batch`` per child; retry each failure in a new child."""
    waiting = list(jobs)
    while waiting:
        now, waiting = waiting[:batch], waiting[batch:]
        done = list(_in_child(now, trial))
        for job, result in zip(now, done, strict=False):
            alone = result.outcome == "ran" or len(now) == 1
            yield result if alone else next(_in_child([job], trial))
        waiting = now[len(done) :] + waiting


def _in_child(jobs: Sequence[OperatorCase], trial: Any) -> Iterator[OperatorResult]:
    """Fork, run the jobs in order, and yield their results; the last one may be a crash of the child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as lines:
                _be_child(jobs, trial, lines)
            code = 0
        except BaseException:  # noqa: BLE001 - the child must not continue as a second parent
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    got = 0
    with os.fdopen(reader) as lines:
        for line in lines:
            fields = json.loads(line)
            got += 1
            yield OperatorResult(**{**fields, "assumed": tuple(fields["assumed"])})
    _, status = os.waitpid(child, 0)
    if got < len(jobs):
        code = os.waitstatus_to_exitcode(status)
        how = f"exited with code {code}" if code >= 0 else f"died of {signal.Signals(-code).name}"
        if code == -signal.SIGALRM:
            how = f"did not finish within {PATIENCE} s"
        yield OperatorResult(
            database(GPU.compute_capability)[jobs[got].index].formatted_name,
            jobs[got].dtype,
            "crashed",
            0,
            text=how,
        )


def _be_child(jobs: Sequence[OperatorCase], trial: Any, lines: Any) -> None:
    import torch

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    warnings.simplefilter("ignore")
    tried = trial()
    for job in jobs:
        signal.alarm(PATIENCE)
        result = tried.run(database(GPU.compute_capability)[job.index], getattr(torch, job.dtype))
        signal.alarm(0)
        lines.write(json.dumps(asdict(result)) + "\n")
        lines.flush()


# ---- The command -----------------------------------------------------------------------------------


def choose(names: Sequence[str], dtypes: Sequence[str], sample: int | None, seed: int) -> list[OperatorCase]:
    """List the operators that support the dtype on CUDA, or a seeded sample of them."""
    import torch

    jobs = [
        OperatorCase(index, dtype)
        for dtype in dtypes
        for index, op in enumerate(database(GPU.compute_capability))
        if op.supports_dtype(getattr(torch, dtype), "cuda") and (not names or op.name in names)
    ]
    return jobs if sample is None else random.Random(seed).sample(jobs, min(sample, len(jobs)))  # noqa: S311


def main() -> None:
    """Run the operators; print each one that did not run, and the counts."""
    parser = command_line(__doc__, results=True)
    parser.add_argument("names", nargs="*", help="operators by name (default: all)")
    parser.add_argument("--dtype", action="append", help="a torch dtype; repeatable (default: float32)")
    parser.add_argument("--sample", type=int, help="try a random sample of this many operators")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--inputs", type=int, default=30, help="largest number of sample inputs per operator")
    parser.add_argument("--batch", type=int, default=32, help="operators per child process")
    parser.add_argument("--traceback", action="store_true", help="print the traceback of every error")
    options = parser.parse_args()

    # The default check initialises CUDA, which forked children cannot use.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    ghost = load_ghost(GPU.name)
    jobs = choose(options.names, options.dtype or ["float32"], options.sample, options.seed)
    results = []
    for result in run_all(
        jobs, lambda: Trial(ghost, options.inputs, show=options.traceback), batch=options.batch
    ):
        results.append(result)
        if result.outcome != "ran":
            print(f"{result.outcome:10} {result.op:40} {result.dtype:10} {result.text}", flush=True)
    write_json(options.json, [asdict(result) for result in results])
    print(_summary(results, options))
    sys.exit(any(result.outcome in {"other", "crashed"} for result in results))


def _summary(results: Sequence[OperatorResult], options: argparse.Namespace) -> str:
    import torch

    lines = [
        f"torch {torch.__version__}, Python {platform.python_version()}, {GPU.name}, seed {options.seed}"
    ]
    dtypes = list(dict.fromkeys(result.dtype for result in results))
    lines.append(f"{'':12}" + "".join(f"{dtype:>12}" for dtype in dtypes))
    for outcome in OUTCOMES:
        counts = Counter(result.dtype for result in results if result.outcome == outcome)
        lines.append(f"{outcome:12}" + "".join(f"{counts[dtype]:12}" for dtype in dtypes))
    for name in ("samples", "compared"):
        totals = {dtype: sum(getattr(r, name) for r in results if r.dtype == dtype) for dtype in dtypes}
        lines.append(f"{name:12}" + "".join(f"{totals[dtype]:12,}" for dtype in dtypes))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
