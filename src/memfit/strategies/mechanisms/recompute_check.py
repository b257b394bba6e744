"""Check a recomputation against its forward: each operation's result, compared by a checksum of its bits.

Each operation costs one or two more, memory for two 8-byte numbers per element of the result while its
checksum is computed, and, in a recomputation, a wait for the GPU. The check finds faults; it is not for
training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.dispatch_modes import without_dispatch_modes
from memfit.errors import DivergenceError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Not compared: checkpointing detaches more often in one of the two runs; autograd clones what is about to be
# written to, but not in a reentrant forward; autocast casts a weight once and keeps it, so that the cast may
# be in one run only (what uses the result is compared); empty tensors hold anything.
_NOT_COMPARED = {"aten.detach", "aten.clone", "aten._to_copy", "prim.device"}
_EMPTY = ("aten.empty", "aten.new_empty", "aten.resize")


@dataclass(frozen=True, slots=True)
class ResultFingerprint:
    """One operation's first result: shape, dtype and the checksum of its bits."""

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    sum: torch.Tensor | None
    """On the tensor's device; None where the bits are meaningless or cannot be read."""

    def __str__(self) -> str:
        """Return the operation and its result as they appear in an error."""
        return f"{self.operation} -> {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class FingerprintRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes the fingerprints of all operations inside the context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fingerprints: list[ResultFingerprint] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code counts as one operation."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and take its result's fingerprint."""
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name.rpartition(".")[0] not in _NOT_COMPARED:
            with without_dispatch_modes():
                self.take(_fingerprint(name, result))
        return result

    def take(self, fingerprint: ResultFingerprint) -> None:
        """Keep a fingerprint."""
        self.fingerprints.append(fingerprint)


class FingerprintComparer(FingerprintRecorder):  # type: ignore[no-untyped-call]
    """Compares operations with the recorded ones, and stops at the first that differs.

    A recomputation may end early: fewer operations are not a difference; additional or other ones are.

    Raises:
        DivergenceError: an operation differs; raised from inside it.
    """

    def __init__(self, region: str, recorded: Sequence[ResultFingerprint]) -> None:
        super().__init__()
        self._region, self._recorded = region, recorded

    def take(self, fingerprint: ResultFingerprint) -> None:
        """Compare a fingerprint with the forward's of the same index."""
        index = len(self.fingerprints)
        self.fingerprints.append(fingerprint)
        if index >= len(self._recorded):
            self._refuse(index, f"the forward had already ended, and the recomputation ran {fingerprint}")
        before = self._recorded[index]
        same = (before.operation, before.shape, before.dtype)
        if same != (fingerprint.operation, fingerprint.shape, fingerprint.dtype):
            self._refuse(index, f"the forward ran {before}, and the recomputation ran {fingerprint}")
        if (
            before.sum is not None
            and fingerprint.sum is not None
            and not torch.equal(before.sum, fingerprint.sum)
        ):
            self._refuse(index, f"the values of {fingerprint} differ from those of the forward")

    def _refuse(self, index: int, difference: str) -> None:
        raise DivergenceError(
            f"The recomputation of the checkpointed module {self._region} differs from the forward at "
            f"operation {index + 1}: {difference}. Gradients would be wrong. A forward pass must compute the "
            "same values each time it runs. Look for state outside buffers, for random numbers from Python, "
            "NumPy or a separate generator, and for nondeterministic operations."
        )


def _fingerprint(operation: str, result: Any) -> ResultFingerprint:
    # Only the first result: others may be workspace, or padded with whatever the memory held.
    first = result[0] if isinstance(result, tuple | list) and result else result
    if not isinstance(first, torch.Tensor):
        return ResultFingerprint(operation, (), None, None)
    readable = type(first) in {torch.Tensor, torch.nn.Parameter} and first.layout is torch.strided
    if operation.startswith(_EMPTY) or first.is_meta or first.is_quantized or not readable:
        return ResultFingerprint(operation, tuple(first.shape), first.dtype, None)
    return ResultFingerprint(operation, tuple(first.shape), first.dtype, _checksum(first))


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits times odd numbers, modulo 2**64: it detects any change of one element."""
    with torch.no_grad():
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        bits = real.resolve_neg().reshape(-1).view(_BITS[real.element_size()]).to(torch.int64)
        return (bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum()
