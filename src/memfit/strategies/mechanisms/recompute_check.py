"""Is what is recomputed what was computed? Every operation's result, compared by a checksum of its bits.

It costs an operation or two for each one, memory for two numbers of 8 bytes for each element of a result
while it is looked at, and a wait for the GPU for each operation of a recomputation. It is for finding a
fault, not for training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.errors import DivergenceError
from memfit.strategies.mechanisms.forward_state import unseen

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Not compared: checkpointing detaches more often in one of the two runs, and autograd clones what is about to
# be written to, which a reentrant forward does without; autocast casts a weight once and
# keeps it, so that the cast may be in one only (what uses the result is compared); empty tensors hold
# anything.
_PASSED_OVER = {"aten.detach", "aten.clone", "aten._to_copy", "prim.device"}
_EMPTY = ("aten.empty", "aten.new_empty", "aten.resize")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One operation's first result: what it was, and its bits' checksum."""

    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    sum: torch.Tensor | None
    """On the tensor's device; None where the bits say nothing, or cannot be had."""

    def __str__(self) -> str:
        """Return what an error can say of it."""
        return f"{self.operation} -> {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes the fingerprints of all operations below it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fingerprints: list[Fingerprint] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is one operation among others."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and look at its result."""
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if name.rpartition(".")[0] not in _PASSED_OVER:
            with unseen():
                self.see(_fingerprint(name, result))
        return result

    def see(self, fingerprint: Fingerprint) -> None:
        """Keep it."""
        self.fingerprints.append(fingerprint)


class Comparing(Recording):  # type: ignore[no-untyped-call]
    """Compares operations with those that were recorded, and ends at the first that differs.

    A recomputation may end early, so that fewer operations are no difference; more or other ones are.

    Args:
        region: the name for the error.
        recorded: of the forward.

    Raises:
        DivergenceError: from inside the operation.
    """

    def __init__(self, region: str, recorded: Sequence[Fingerprint]) -> None:
        super().__init__()
        self._region, self._recorded = region, recorded

    def see(self, fingerprint: Fingerprint) -> None:
        """Compare it with the one at its place."""
        place = len(self.fingerprints)
        self.fingerprints.append(fingerprint)
        if place >= len(self._recorded):
            self._refuse(place, f"the forward ended before {fingerprint}")
        before = self._recorded[place]
        same = (before.operation, before.shape, before.dtype)
        if same != (fingerprint.operation, fingerprint.shape, fingerprint.dtype):
            self._refuse(place, f"the forward did {before}, the recomputation {fingerprint}")
        if (
            before.sum is not None
            and fingerprint.sum is not None
            and not torch.equal(before.sum, fingerprint.sum)
        ):
            self._refuse(place, f"{fingerprint} has other values than in the forward")

    def _refuse(self, place: int, what: str) -> None:
        raise DivergenceError(
            f"Checkpointed region {self._region}: operation {place + 1}: {what}. Gradients would be wrong. "
            "A forward must do the same when it runs again: look for state that is no buffer, for random "
            "numbers of Python, NumPy or a generator of its own, for operations that are not deterministic."
        )


def _fingerprint(operation: str, result: Any) -> Fingerprint:
    # Only the first result: others may be work space, or padded with what memory happened to hold.
    first = result[0] if isinstance(result, tuple | list) and result else result
    if not isinstance(first, torch.Tensor):
        return Fingerprint(operation, (), None, None)
    readable = type(first) in {torch.Tensor, torch.nn.Parameter} and first.layout is torch.strided
    if operation.startswith(_EMPTY) or first.is_meta or first.is_quantized or not readable:
        return Fingerprint(operation, tuple(first.shape), first.dtype, None)
    return Fingerprint(operation, tuple(first.shape), first.dtype, _checksum(first))


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits times odd numbers, modulo 2**64: one element that changes always shows."""
    with torch.no_grad():
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        bits = real.resolve_neg().reshape(-1).view(_BITS[real.element_size()]).to(torch.int64)
        return (bits * (2 * torch.arange(len(bits), device=bits.device) + 1)).sum()
