"""Keep a model that is built on the CPU from filling the host's memory.

A 7 B-parameter model in fp32 is 27 GB of random numbers that the ghost never looks at. So random fills of
large floating-point CPU tensors are passed over: the tensor's memory is given back (``hollow.py``), and it
holds zeros. That is the only liberty taken. The rest is exact: what is done to zeros and leaves zeros needs
no memory either.

    normal_  uniform_  exponential_ ...           zeros in place of random numbers
    zero_  fill_(0)                               zeros
    mul_  div_  erfinv_  add_(0)  clamp_(-a, a)   zeros that stay zeros
    copy_  to(dtype)  clone  linalg.qr            zeros of zeros

Everything else is left to PyTorch, small tensors first of all, and ``torch.randn`` and its kin: initialisers
fill a tensor that is there, data sets are made anew. The CPU's generator is not advanced by what is
passed over: the script stays deterministic, but draws other numbers afterwards than without the ghost.
"""

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from memfit.ghost.host_memory.zero_pages import HollowTensors
from memfit.ghost.patching.kernel_overrides import Overrides, Run, available
from memfit.ghost.values.known_values import is_plain
from memfit.ghost.values.stand_ins import Note
from memfit.records import Provenance

_RANDOM_FILLS = ("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_")
_SCALINGS = ("mul_", "div_", "__imul__", "__itruediv__")
_SHIFTS = ("add_", "sub_", "__iadd__", "__isub__")
_CASTS = {
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
}
_PASSED_OVER = (
    "Large CPU tensors were not filled with random numbers: they hold zeros, and random numbers that the "
    "script draws on the CPU afterwards are others. --fill-host-memory fills them."
)
_FEW = 1 << 16
"""Elements of a factor that are looked through for infinities before zeros are multiplied by it."""


class Host:
    """What ``install`` put in place; ``remove`` gives PyTorch its own kernels and methods back.

    Ops that PyTorch also gives bare numbers are wrapped where Python calls them: in the dispatcher, a number
    wrapped in a tensor would not survive the way through Python.
    """

    def __init__(self, note: Note, threshold_elements: int) -> None:
        self._note = note
        self._threshold = threshold_elements
        self._hollow = HollowTensors()
        self._overrides = Overrides()
        self._methods: dict[str, Any] = {}
        for name in _RANDOM_FILLS:
            self._wrap(name, self._random)
        for op in ("zero_", "fill_.Scalar"):
            self._overrides.add(op, "CPU")(self._fill)
        self._overrides.add("erfinv_", "CPU")(self._unchanged)
        self._overrides.add("clamp_", "CPU")(self._clamp)
        self._overrides.add("linalg_qr", "CPU")(self._qr)
        for name in _SCALINGS:
            self._wrap(name, self._scale)
        for name in _SHIFTS:
            self._wrap(name, self._shift)
        for name, dtype in _CASTS.items():
            self._wrap(name, partial(self._cast, dtype=dtype))
        self._wrap("to", self._convert)
        self._wrap("clone", self._clone)
        self._wrap("copy_", self._copy)

    def _wrap(self, name: str, function: Callable[..., Any]) -> None:
        method = self._methods[name] = getattr(torch.Tensor, name)

        @functools.wraps(method)
        def call(self: torch.Tensor, *args: Any, **options: Any) -> Any:
            return function(method, self, *args, **options)

        setattr(torch.Tensor, name, call)

    def remove(self) -> None:
        """Pass over nothing from now on; what is hollow stays the zeros it is."""
        self._overrides.remove()
        for name, method in self._methods.items():
            setattr(torch.Tensor, name, method)

    def _random(self, method: Run, tensor: torch.Tensor, *args: object, **options: object) -> Any:
        large = tensor.numel() >= self._threshold and is_plain(tensor) and tensor.is_floating_point()
        if large and tensor.is_cpu and not _tracked(tensor) and self._empty(tensor):
            self._note(Provenance.ASSUMED, _PASSED_OVER, "")
            return tensor
        return method(tensor, *args, **options)

    def _fill(self, run: Run, tensor: torch.Tensor, *value: object) -> Any:
        if value in ((), (0,)) and (self._hollow.holds(tensor) or self._empty(tensor)):
            return tensor
        return run(tensor, *value)

    def _unchanged(self, run: Run, tensor: torch.Tensor) -> Any:
        return tensor if self._hollow.holds(tensor) else run(tensor)

    def _clamp(
        self, run: Run, tensor: torch.Tensor, low: float | None = None, high: float | None = None
    ) -> Any:
        if (low is None or low <= 0) and (high is None or high >= 0) and self._hollow.holds(tensor):
            return tensor
        return run(tensor, low, high)

    def _qr(self, run: Run, tensor: torch.Tensor, mode: str = "reduced") -> Any:
        """Factorise zeros, for ``orthogonal_``: into zeros, in place of the unit vectors LAPACK picks."""
        if tensor.dim() == 2 and mode == "reduced" and self._hollow.holds(tensor):  # noqa: PLR2004 - a matrix
            rank = min(tensor.shape)
            return tensor.new_zeros(tensor.shape[0], rank), tensor.new_zeros(rank, tensor.shape[1])
        return run(tensor, mode)

    def _scale(self, method: Run, tensor: torch.Tensor, factor: object, **options: object) -> Any:
        if self._holds(tensor) and not options and _is_harmless(factor):
            return tensor
        return method(tensor, factor, **options)

    def _shift(self, method: Run, tensor: torch.Tensor, term: object, **options: object) -> Any:
        if isinstance(term, int | float) and term == 0 and self._holds(tensor):
            return tensor
        return method(tensor, term, **options)

    def _copy(
        self, method: Run, tensor: torch.Tensor, source: torch.Tensor, *args: object, **options: object
    ) -> Any:
        hollow = isinstance(source, torch.Tensor) and self._holds(source) and is_plain(tensor)
        if hollow and tensor.shape == source.shape and not _tracked(tensor) and self._empty(tensor):
            return tensor
        return method(tensor, source, *args, **options)

    def _cast(
        self, method: Run, tensor: torch.Tensor, *args: object, dtype: torch.dtype, **options: Any
    ) -> Any:
        hollow = self._holds(tensor) and tensor.dtype != dtype
        result = self._zeros_like(tensor, dtype, options.get("memory_format")) if hollow else None
        return method(tensor, *args, **options) if result is None else result

    def _convert(self, method: Run, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Convert on the CPU first, which PyTorch does too when it also moves the result."""
        if not self._holds(tensor):
            return method(tensor, *args, **options)
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **options)
        changes = dtype is not None and dtype != tensor.dtype
        result = self._zeros_like(tensor, dtype, memory_format) if changes else None
        if result is None:
            return method(tensor, *args, **options)
        return result if device is None else method(result, device)

    def _clone(self, method: Run, tensor: torch.Tensor, **options: Any) -> Any:
        hollow = self._holds(tensor)
        result = self._zeros_like(tensor, tensor.dtype, options.get("memory_format")) if hollow else None
        return method(tensor, **options) if result is None else result

    def _holds(self, tensor: torch.Tensor) -> bool:
        """Say whether a method may be passed over: it is large and hollow, and autograd does not look."""
        large = tensor.numel() >= self._threshold and is_plain(tensor)
        return large and self._hollow.holds(tensor) and not _tracked(tensor)

    def _empty(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() >= self._threshold and self._hollow.empty(tensor)

    def _zeros_like(
        self, tensor: torch.Tensor, dtype: torch.dtype, memory_format: torch.memory_format | None
    ) -> torch.Tensor | None:
        result = torch.empty_like(
            tensor, dtype=dtype, memory_format=memory_format or torch.preserve_format, requires_grad=False
        )
        return result if self._hollow.empty(result) else None


def install(note: Note, threshold_elements: int = 1 << 20) -> Host | None:
    """Pass over random fills of large CPU tensors, and what follows from them, from now on.

    Args:
        note: called as ``note(provenance, text, where)`` when something is passed over.
        threshold_elements: elements from which on a tensor is large.

    Returns:
        What undoes it and must be kept; None where this PyTorch cannot be asked for its own kernels, and
        nothing is passed over.
    """
    return Host(note, threshold_elements) if available() else None


def _tracked(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _is_harmless(factor: object) -> bool:
    """Say whether zeros stay zeros when multiplied or divided by ``factor``: it is finite and not zero."""
    if isinstance(factor, int | float):
        return math.isfinite(factor) and factor != 0
    if not isinstance(factor, torch.Tensor) or not factor.is_cpu or factor.numel() > _FEW:
        return False
    return bool((torch.isfinite(factor) & (factor != 0)).all())
