"""Small tensors whose elements are all known: an op on them is computed on the CPU, too.

    flags = torch.tensor([0, 3], device="cuda")    elements from the CPU
    torch.cat([flags > 1, done])                   computed on the CPU from known elements
    flags[1] = 5                                   a write through a view: the base's elements are known, too

PyTorch's own kernel of the GPU runs as well, so every allocation is its own. What an op does is not stated
here: it runs on copies of the known elements. Which ops: ``computed_ops.py``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from memfit.dispatch_modes import without_dispatch_modes
from memfit.ghost.values.known_values import KnownValues
from memfit.ghost.values.tensor_facts import (
    AwaitedElements,
    KnownElements,
    KnownValue,
    KnownValueBasis,
    TokenCountBasis,
    is_plain_tensor,
)

_MOST = 4096
"""The largest tensor, in elements, whose elements are kept."""
_PLACES = ("device", "pin_memory", "non_blocking", "layout")
"""Keyword arguments that say where a result is."""
_CONVERTING = ("_to_copy", "copy_", "_foreach_copy_", "fill_", "__setitem__")
"""Ops that may convert floats to integers."""
_NO_ELEMENTS = (torch.complex64, torch.complex128, torch.complex32)


def may_have_known_elements(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is small enough, and of a dtype, to be known by element."""
    return not is_lazy(tensor) and tensor.numel() <= _MOST and tensor.dtype not in _NO_ELEMENTS


def known_elements(known: KnownValues, tensor: torch.Tensor) -> KnownElements | None:
    """Return the elements of a tensor on the GPU, or of a CPU tensor; None if they are not known."""
    if not may_have_known_elements(tensor) or not is_plain_tensor(tensor):
        return None
    if tensor.is_cpu:
        return KnownElements(tensor.detach())
    found = known.elements(tensor)
    if found is not None:
        return found
    value = known.get(tensor)
    if value is None or value.basis is KnownValueBasis.CHECKED:
        return None
    full = torch.full(tensor.shape, value.value, dtype=tensor.dtype, device="cpu")
    return KnownElements(full, basis=value.basis)


class _UnknownError(Exception):
    """An argument is not known by element."""


_DEEPEST = 64
"""After so many ops, a result that awaits another rank is awaited at once: computing it is recursive."""


def compute_on_cpu(
    known: KnownValues,
    op: Callable[..., Any],
    args: Sequence[Any],
    options: dict[str, Any],
    *,
    writes: bool = False,
    creates: bool = False,
    needs_elements: bool = False,
) -> "Computed":
    """Return the elements of each result of an op; empty if they do not follow from its arguments.

    Args:
        known: the known values of tensors.
        op: an overload, or a function of PyTorch's.
        args: its arguments.
        options: the same, by keyword.
        writes: whether it writes to the first of them; one that writes to ``out`` returns it.
        creates: whether it is a function that needs no tensor, such as ``torch.arange``.
        needs_elements: whether one of its tensors at least must be known by element, and not as a whole.
    """
    arguments = _Arguments(known)
    try:
        overwrites = _overwrites(known, op, args)
        moved = [arguments.on_cpu(each) for each in args[overwrites:]]
        if overwrites:
            moved = [arguments.overwritten(args[0]), *moved]
        given = {name: each for name, each in options.items() if name not in _PLACES}
        out = given.pop("out", None)
        named = {name: arguments.on_cpu(each) for name, each in given.items()}
    except _UnknownError:
        return ()
    if not arguments.found and not arguments.depth and not creates:
        return ()
    if out is not None:
        named["out"] = torch.empty(0, dtype=out.dtype, device="cpu")
    if creates:
        named["device"] = "cpu"
    if needs_elements and not arguments.by_element:
        return ()
    if arguments.depth:
        return _AwaitedResults(op, _kept(moved), _kept(named), arguments, writes=writes)
    return _compute(op, moved, named, arguments.found, writes=writes)


def _overwrites(known: KnownValues, op: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Return whether an op leaves nothing of what a tensor held, unknown or sent by another rank."""
    name = op.__name__
    return name == "copy_" or (name in {"fill_", "zero_"} and known.awaited(args[0]) is not None)


class _Arguments:
    """An op's arguments with the elements of tensors in place of these, and what was found on the way."""

    def __init__(self, known: KnownValues) -> None:
        self._known = known
        self.found: list[KnownElements] = []
        self.by_element = False
        """Whether one tensor at least is known by element, not as a whole."""
        self.depth = 0
        """As of ``AwaitedElements`` for the result; 0 if it awaits no other rank."""

    def overwritten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return zeros on the CPU for a tensor whose every element the op overwrites."""
        zeros = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        self.found.append(KnownElements(zeros))
        return zeros

    def on_cpu(self, argument: Any) -> Any:
        """Return an argument as the CPU gets it.

        Raises:
            _UnknownError: a tensor is not known by element.
        """
        if not isinstance(argument, torch.Tensor):
            return _mapped(argument, self.on_cpu)
        awaited = self._known.awaited(argument) if argument.is_cuda else None
        if awaited is not None and awaited.depth < _DEEPEST:
            self.by_element, self.depth = True, max(self.depth, awaited.depth + 1)
            return awaited
        elements = known_elements(self._known, argument)
        if elements is None:
            raise _UnknownError
        if argument.is_cuda:
            self.found.append(elements)
            self.by_element |= self._known.elements(argument) is not None
        return elements.values


def _mapped(argument: Any, change: Callable[[Any], Any]) -> Any:
    """Change the parts of a nested argument."""
    if isinstance(argument, list):
        return [change(each) for each in argument]
    return tuple(map(change, argument)) if isinstance(argument, tuple) else argument


def _kept(arguments: Any) -> Any:
    """Copy the tensors among arguments: the script may write to them before the op is computed."""
    if isinstance(arguments, torch.Tensor):
        return arguments.clone()
    if isinstance(arguments, dict):
        return {name: _kept(each) for name, each in arguments.items()}
    return _mapped(arguments, _kept)


class _AwaitedResults:
    """The results of an op that needs elements which another rank sends."""

    def __init__(
        self,
        op: Callable[..., Any],
        args: list[Any],
        options: dict[str, Any],
        arguments: _Arguments,
        *,
        writes: bool,
    ) -> None:
        self._call = op, args, options
        self._found = list(arguments.found)
        self._writes = writes
        self._depth = arguments.depth
        self._results: tuple[KnownElements, ...] | None = None

    def result(self, index: int, shape: torch.Size, dtype: torch.dtype) -> AwaitedElements:
        """Return one of them, as a tensor of a shape and a dtype holds it."""

        def have() -> KnownElements | None:
            if self._results is None:
                self._results = self._have()
            if index >= len(self._results) or self._results[index].values.shape != shape:
                return None
            return self._results[index]._replace(values=self._results[index].values.to(dtype))

        return AwaitedElements(have, self._depth)

    def _have(self) -> tuple[KnownElements, ...]:
        op, args, options = self._call
        try:
            with without_dispatch_modes():
                here = [self._here(each) for each in args]
                named = {name: self._here(each) for name, each in options.items()}
                return _compute(op, here, named, self._found, writes=self._writes)
        except _UnknownError:
            return ()

    def _here(self, argument: Any) -> Any:
        if not isinstance(argument, AwaitedElements):
            return _mapped(argument, self._here)
        elements = argument.have()
        if elements is None:
            raise _UnknownError
        self._found.append(elements)
        return elements.values


Fact = KnownValue | KnownElements | AwaitedElements
Written = tuple[torch.Tensor, Fact]
"""A tensor that was written, and what is known of it since."""
Computed = tuple[KnownElements, ...] | _AwaitedResults
"""The elements of each result of an op; its results, if they follow from elements that another rank sends."""


def _compute(
    op: Callable[..., Any],
    args: list[Any],
    options: dict[str, Any],
    found: list[KnownElements],
    *,
    writes: bool,
) -> tuple[KnownElements, ...]:
    if writes:
        args = [_kept(args[0]), *args[1:]]
    results = run_on_cpu(op, args, options)
    if results is not None and writes:
        results = tensors_of(args[0])
    if results is None:
        return ()
    if op.__name__.startswith(_CONVERTING) and not all(_holds(results[:1], each) for each in found):
        return ()
    routing = max((each.routing for each in found), default=TokenCountBasis.NONE)
    basis = max((each.basis for each in found), default=KnownValueBasis.FILLED)
    return tuple(KnownElements(each.contiguous(), routing, basis) for each in results)


def run_on_cpu(op: Callable[..., Any], args: list[Any], options: dict[str, Any]) -> list[torch.Tensor] | None:
    """Return what an op returns for tensors on the CPU; None if it fails.

    The CPU may lack the op for a dtype, or the op will raise on the GPU, too.
    """
    try:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            return tensors_of(op(*args, **options))
    except (RuntimeError, IndexError, TypeError, NotImplementedError):
        return None


def _holds(converted: list[torch.Tensor], elements: KnownElements) -> bool:
    """Return whether a dtype holds elements: GPUs convert floats out of its range in another way."""
    floats = elements.values
    if not floats.is_floating_point() or any(
        each.is_floating_point() or each.dtype == torch.bool for each in converted
    ):
        return True
    limits = torch.iinfo(converted[0].dtype)
    return bool(((floats >= limits.min) & (floats < float(limits.max + 1))).all())


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Return the tensors that an op returned."""
    results = result if isinstance(result, tuple | list) else (result,)
    return [each for each in results if isinstance(each, torch.Tensor)]


def put_elements(known: KnownValues, result: Any, computed: Computed) -> bool:
    """Record the elements of new tensors; return whether all are known, or awaited."""
    tensors = tensors_of(result)
    if isinstance(computed, _AwaitedResults):
        for index, on_gpu in enumerate(tensors):
            known.put(on_gpu, computed.result(index, on_gpu.shape, on_gpu.dtype), fresh=True)
        return True
    if not computed or len(tensors) != len(computed):
        return False
    pairs = list(zip(tensors, computed, strict=True))
    if any(not on_gpu.is_cuda or on_gpu.shape != each.values.shape for on_gpu, each in pairs):
        return False
    for on_gpu, each in pairs:
        known.put(on_gpu, each._replace(values=each.values.to(on_gpu.dtype)), fresh=True)
    return True


def written_on_cpu(
    known: KnownValues,
    op: Callable[..., Any],
    args: Sequence[Any],
    options: dict[str, Any],
    target: torch.Tensor,
) -> Written | None:
    """Return what an op writes to ``target``, its ``out`` or first argument, as ``after_write`` does."""
    computed = compute_on_cpu(known, op, args, options, writes="out" not in options)
    if isinstance(computed, _AwaitedResults):
        return after_write(known, target, computed.result(0, target.shape, target.dtype))
    if len(computed) != 1 or computed[0].values.shape != target.shape:
        return None
    return after_write(known, target, computed[0]._replace(values=computed[0].values.to(target.dtype)))


def after_write(known: KnownValues, written: torch.Tensor, new: Fact) -> Written | None:
    """Return the tensor that a write changes and what is known of it after: of a view, its base.

    None if nothing is known. To be called before the write.
    """
    base = written._base
    if base is None or (isinstance(new, KnownValue) and base.numel() == written.numel()):
        return written, new
    before = known.awaited(base) or known_elements(known, base)
    if before is None or not base.is_contiguous():
        return None
    if isinstance(new, KnownValue):
        new = KnownElements(
            torch.full(written.shape, new.value, dtype=written.dtype, device="cpu"), basis=new.basis
        )
    offset = int(written.storage_offset()) - int(base.storage_offset())
    merge = partial(_merged, shape=written.shape, strides=written.stride(), offset=offset)
    if isinstance(before, KnownElements) and isinstance(new, KnownElements):
        return base, merge(before, new)
    both = (before, new)
    depth = max(each.depth for each in both if isinstance(each, AwaitedElements))

    def have() -> KnownElements | None:
        had = [each.have() if isinstance(each, AwaitedElements) else each for each in both]
        return None if had[0] is None or had[1] is None else merge(had[0], had[1])

    return base, AwaitedElements(have, depth + 1)


def _merged(
    before: KnownElements, new: KnownElements, shape: torch.Size, strides: Sequence[int], offset: int
) -> KnownElements:
    """Return the elements of a tensor after a write to a view of it."""
    after = before.values.clone(memory_format=torch.contiguous_format)
    after.as_strided(shape, strides, offset).copy_(new.values)
    return KnownElements(after, max(before.routing, new.routing), max(before.basis, new.basis))
