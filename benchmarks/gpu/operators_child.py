"""The child process of operators.py: measures operators on the card or on the ghost, one per line of input.

It first writes one line about the device and the operators that exist. Then it reads the key of an operator
per line and answers with its result, as JSON.
"""

import argparse
import gc
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from measuring import load_ghost
from operator_samples import call, database, first_line, has_backward, samples, signature

from memfit.card.detect_card import is_ghost_loaded
from memfit.devices import find_device
from memfit.ghost.runtime_bindings import GhostRuntime
from memfit.ghost.values.value_options import GpuValueOptions

if TYPE_CHECKING:
    from memfit.ghost.values.assumed_values import AssumedValues  # imports torch

LARGER = "larger"
_POISONED = 3
"""Exit code after an error that leaves the CUDA context unusable."""


class Meter:
    """Measures what calls request from PyTorch's allocator."""

    def __init__(self, values: "AssumedValues | None") -> None:
        self._values = values
        """None on a card, where values are real."""

    def measure(self, run: Callable[[], object]) -> dict[str, Any]:
        """Call once; return bytes and the number of requests, or the error.

        ``peak`` and ``left`` are bytes in blocks of the allocator, above those before the call;
        ``requested_peak`` and ``requested_left`` are the same before the allocator rounds. Results are still
        alive when ``left`` is read.
        """
        import torch

        gc.collect()
        _await_autograd()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # or blocks depend on what earlier calls left in the cache
        torch.cuda.reset_peak_memory_stats()
        before, reads = torch.cuda.memory_stats(), self._reads()
        found: dict[str, Any] = {}
        alive: object = None
        try:
            alive = run()
            _await_autograd()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - any exception of an operator is its outcome
            found["error"] = f"{type(error).__name__}: {first_line(error)}"
        after = torch.cuda.memory_stats()
        del alive
        for name, key, kind in (
            ("peak", "allocated_bytes", "peak"),
            ("left", "allocated_bytes", "current"),
            ("requested_peak", "requested_bytes", "peak"),
            ("requested_left", "requested_bytes", "current"),
            ("requests", "allocation", "allocated"),
        ):
            start = "allocated" if key == "allocation" else "current"
            found[name] = after[f"{key}.all.{kind}"] - before[f"{key}.all.{start}"]
        if any(all(read is not other for other in reads) for read in self._reads()):
            found["reads"] = True
        return found

    def _reads(self) -> list[object]:
        return list(self._values.last_reads()) if self._values else []


def _await_autograd() -> None:
    """Wait until autograd's thread has freed its last task's tensors: it does so before the next task.

    The task given here has no bytes.
    """
    import torch

    empty = torch.empty(0, device="cuda:0", requires_grad=True)
    torch.autograd.grad(empty.clone(), empty, torch.empty(0, device="cuda:0"))


class Operators:
    """The operators by key: those of PyTorch's database for some dtypes, and the larger calls."""

    def __init__(self, compute_capability: tuple[int, int], most_samples: int) -> None:
        from larger_calls import library_calls
        from larger_layers import layer_calls

        self._larger = library_calls() | layer_calls()
        self._database = {op.formatted_name: op for op in database(compute_capability)}
        self._most = most_samples

    def keys(self, dtypes: list[str]) -> list[str]:
        """List every operator: "larger NAME", or "DTYPE NAME" for one of the database."""
        import torch

        return [f"{LARGER} {name}" for name in self._larger] + [
            f"{dtype} {name}"
            for dtype in dtypes
            for name, op in self._database.items()
            if op.supports_dtype(getattr(torch, dtype), "cuda")
        ]

    def result(self, key: str, meter: Meter) -> dict[str, Any]:
        """Measure every sample of an operator, from a cache that its first sample has warmed up."""
        kind, name = key.split(" ", 1)
        try:
            found = self._one_larger(name, meter) if kind == LARGER else self._samples(kind, name, meter)
        except Exception as error:  # noqa: BLE001 - of the inputs
            return {"error": f"creating inputs: {type(error).__name__}: {first_line(error)}"}
        return {"samples": found}

    def _one_larger(self, name: str, meter: Meter) -> list[dict[str, Any]]:
        import torch

        torch.manual_seed(0)
        run = self._larger[name]()
        if not name.startswith("linalg"):  # these take seconds, and nothing of theirs stays allocated
            meter.measure(run)
        return [meter.measure(run)]

    def _samples(self, kind: str, name: str, meter: Meter) -> list[dict[str, Any]]:
        import torch

        op, dtype, found = self._database[name], getattr(torch, kind), []
        backward = has_backward(op, dtype)
        for number, sample in enumerate(islice(samples(op, "cuda:0", dtype, backward), self._most)):

            def run(sample: Any = sample) -> object:
                return call(op, sample, backward=backward)

            if number == 0:
                meter.measure(run)
            found.append({"sample": signature(sample), **meter.measure(run)})
        return found


def warm_up() -> None:
    """Make PyTorch allocate what it keeps: cuBLAS's workspaces, per thread, and cuDNN's dropout state."""
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(64, 64, device="cuda:0", dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(a, a, a[0]).sum().backward()
        torch.bmm(a[None], a[None]).sum().backward()
    lstm = torch.nn.LSTM(8, 8, 2, dropout=0.5, device="cuda:0")
    lstm(torch.ones(4, 2, 8, device="cuda:0"))[0].sum().backward()
    torch.cuda.synchronize()


def ghost_of(options: argparse.Namespace) -> GhostRuntime | None:
    """Load the ghost before torch; in a rehearsal, return the one that stands in for the card."""
    if options.side == "ghost":
        return load_ghost(options.gpu, options.total, context=True)
    if is_ghost_loaded():
        import sitecustomize

        found: GhostRuntime = sitecustomize.ghost  # type: ignore[attr-defined]
        return found
    return None


def main() -> None:
    """Answer keys until the input ends, or until an error leaves the context unusable."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["card", "ghost"])
    parser.add_argument("gpu", help="the profile in the device table")
    parser.add_argument("--total", type=int, help="memory of the ghost, in bytes")
    parser.add_argument("--inputs", type=int, required=True, help="largest number of samples per operator")
    parser.add_argument("--patience", type=int, required=True, help="time limit for one operator, in seconds")
    parser.add_argument("--dtype", nargs="+", required=True)
    options = parser.parse_args()

    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # operators print
    warnings.simplefilter("ignore")
    ghost = ghost_of(options)
    import torch

    values = None
    if ghost:
        from memfit.ghost.values import gpu_reads

        values = gpu_reads.answer_gpu_reads(ghost, GpuValueOptions(), lambda *_, **__: None)
    operators = Operators(find_device(options.gpu).compute_capability, options.inputs)
    warm_up()
    gc.collect()
    gc.freeze()  # or each collection visits the whole database
    gc.disable()
    total = torch.cuda.get_device_properties(0).total_memory
    start = {"total": total, "torch": torch.__version__, "keys": operators.keys(options.dtype)}
    lines.write(json.dumps(start) + "\n")
    meter = Meter(values)
    for key in sys.stdin:
        signal.alarm(options.patience)
        result = operators.result(key.strip(), meter)
        signal.alarm(0)
        lines.write(json.dumps(result) + "\n")
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(_POISONED)
    os._exit(0)  # without the slow end of CUDA


if __name__ == "__main__":
    main()
