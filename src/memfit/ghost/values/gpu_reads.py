"""Answer the script's reads of GPU values, which the ghost does not compute.

    the script reads                the ghost returns
    ----------------------------    ------------------------------------------------------------------
    elements of a small tensor      what the CPU computed from known elements (``computed_on_cpu.py``)
    one element                     its known value (``propagation_rules.py``), or the bytes that the
                                    ghost remembers, or an assumed value: 1.0, 1 or False
    a number of elements            the largest possible (``data_dependent_sizes.py``)
    many elements (``tolist()``)    a copy of zeros

Each assumed value is noted with the line that read it. PyTorch's own kernels still run, so every allocation
is theirs; the overrides here only replace the value.

Fills, factories and copies are tracked where Python calls them (``value_tracking_patches.py``) and not in the
dispatcher: PyTorch's kernels fill tensors and then write to them without autograd counting it.

On the ghost, ``torch.inference_mode`` is ``torch.no_grad`` without autocast's cache: tensors created under
inference mode have no version counter, so no value could be known for them. The allocations are the same.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from memfit.dispatch_modes import without_dispatch_modes
from memfit.ghost.kernel_override_registry import Kernel, KernelOverrides
from memfit.ghost.note_callback_protocol import NoteCallback
from memfit.ghost.runtime_bindings import GhostRuntime
from memfit.ghost.values.assumed_values import AssumedValues, GpuRead, explain_gpu_read
from memfit.ghost.values.computed_on_cpu import (
    Written,
    compute_on_cpu,
    known_elements,
    may_have_known_elements,
    put_elements,
    tensors_of,
    written_on_cpu,
)
from memfit.ghost.values.computed_ops import is_pointwise, ops_computed_on_cpu, overload_of
from memfit.ghost.values.data_dependent_sizes import SIZED_KERNELS, override_ops_with_data_dependent_sizes
from memfit.ghost.values.dtype_rounding import Number
from memfit.ghost.values.exchanged_sizes import override_functional_collectives
from memfit.ghost.values.known_values import KnownValues
from memfit.ghost.values.propagation_rules import (
    RULES,
    KnownInputs,
    PropagationRule,
    found_inf_after_unscale,
    loss_scale_after_update,
    pointwise_value,
)
from memfit.ghost.values.received_from_rank import override_functional_broadcasts
from memfit.ghost.values.tensor_facts import (
    KnownElements,
    KnownValue,
    KnownValueBasis,
    is_plain_tensor,
)
from memfit.ghost.values.value_options import GpuValueOptions
from memfit.ghost.values.value_tracking_patches import patch_torch_to_track_values
from memfit.patching.patches import Patch
from memfit.records import StandIn

__all__ = ["AssumedValues", "GpuRead", "GpuValueOptions", "answer_gpu_reads"]

_INFERENCE = Patch("torch._C", "_InferenceMode", why="count the versions of tensors in inference mode, too")
_AUTOCAST = Patch("torch", "set_autocast_cache_enabled", why="keep autocast's cache off in inference mode")

_CHECKS: Mapping[str, tuple[Number, ...]] = {
    "_linalg_check_errors": (0, 0),  # every matrix was factorized
    "linalg_eig": (True,),  # the input is finite
    "linalg_eig.out": (True,),
    "segment_reduce": (0, True),  # the least length, and that the lengths add up
}
"""Op that reads values to check its arguments -> the values that pass the check."""
_COMPUTED = ops_computed_on_cpu()
_KERNELS = Patch(
    "torch:ops.aten",
    *("_local_scalar_dense", "equal", "allclose", "cov", "lift_fresh"),
    *("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"),
    *sorted({op.partition(".")[0] for op in (*_CHECKS, *RULES, *_COMPUTED)}),
    why="answer the script's reads of GPU values",
    source="aten/src/ATen/native/native_functions.yaml",
)


def answer_gpu_reads(
    ghost: GhostRuntime,
    options: GpuValueOptions,
    note: NoteCallback,
    *,
    forward_lines: Callable[[], list[tuple[str, int]]] = list,
    fallback_where: Callable[[], str] = str,
    senders_exist: bool = False,
    on_stand_in: Callable[[StandIn], None] = lambda _: None,
) -> AssumedValues:
    """Answer the script's GPU reads from now on, for the life of the process.

    Args:
        ghost: the loaded ghost; torch has been imported since.
        options: the values to return for unknown reads.
        note: called as ``note(provenance, text, where)`` for every assumption, once per line and text.
        forward_lines: returns file and line of the frames, innermost first, that led to a read without Python
            frames (on PyTorch's autograd thread).
        fallback_where: returns a location for a read without either.
        senders_exist: whether the other ranks of process groups exist, and send what they have.
        on_stand_in: called with each assumed value that the script reads.

    Returns:
        The answers and their notes. The caller reports training steps to it (``AssumedValues.stepped``) and
        keeps a reference: the overrides end with it.
    """
    values = AssumedValues(
        options, note, forward_lines, fallback_where, on_stand_in, senders_exist=senders_exist
    )
    overrides = KernelOverrides(_KERNELS, SIZED_KERNELS)
    inputs = KnownInputs(values.known, all=options.choose("all").value, any=options.choose("bool").value)
    _answer_scalars(overrides, values, ghost)
    _answer_checks(overrides, values, inputs)
    for op in dict.fromkeys((*RULES, *_COMPUTED)):
        _track(overrides, inputs, op)
    _track_grad_scaler(overrides, inputs)
    _track_constants(overrides, values, ghost)
    override_ops_with_data_dependent_sizes(overrides, values, ghost)
    patch_torch_to_track_values(values, ghost)
    _INFERENCE.install("_InferenceMode", lambda _: _NoGrad)
    _AUTOCAST.install("set_autocast_cache_enabled", lambda _: _NoGrad.set_cache)
    values.keep(overrides, override_functional_collectives(values), override_functional_broadcasts(values))
    return values


def _answer_scalars(overrides: KernelOverrides, values: AssumedValues, ghost: GhostRuntime) -> None:
    """Answer ``item()``, ``bool()``, ``int()`` and ``float()``, which all end in this op."""

    @overrides.add("_local_scalar_dense", "CUDA")
    def read(run: Kernel, tensor: torch.Tensor) -> object:
        raw = run(tensor)
        if values.counting:
            return raw
        prepared = values.next_prepared()
        if prepared is not None:
            return type(raw)(prepared)
        elements = values.known.elements(tensor)
        if elements is not None and elements.basis is KnownValueBasis.FILLED:
            values.note_elements(elements)
            return elements.values.item()
        if elements is not None:
            return values.answer(tensor, KnownValue(elements.values.item(), elements.basis))
        known = values.known.get(tensor)
        if known is None and ghost.last_read_known():
            return raw
        return values.answer(tensor, known)


def _answer_checks(overrides: KernelOverrides, values: AssumedValues, inputs: KnownInputs) -> None:
    """Answer reads that ops make to check their arguments or to compare two tensors."""

    def agree(
        op: Callable[..., bool], run: Kernel, a: torch.Tensor, b: torch.Tensor, *args: Any, **options: Any
    ) -> object:
        elements = [known_elements(values.known, each) for each in (a, b)]
        known = pointwise_value(torch.ops.aten.eq.Tensor, inputs, a, b)
        if all(each is not None and not each.basis for each in elements) and a.dtype == b.dtype:
            known = KnownValue(op(*(each.values for each in elements if each is not None), *args, **options))
        elif known is not None and known.exceptions:
            known = None
        if known is None and a.dtype == torch.bool and not a.dim():
            # How PyTorch tests a boolean scalar (``is_scalar_tensor_true``, ATen, 2.14): ``b`` is True.
            prepared = values.next_prepared()
            with values.prepared(bool(values.answer(a, inputs.of(a)) if prepared is None else prepared)):
                return run(a, b, *args, **options)
        chosen = values.choose("all")
        with values.prepared(chosen.value if known is None else known.value) as unread:
            result = run(a, b, *args, **options)
        if known is None and not unread:
            text = f"The script compared two GPU tensors. {explain_gpu_read(chosen, 'all')}"
            values.assume("a comparison", "all", chosen.value, text)
        return result

    overrides.add("equal", "CUDA")(partial(agree, torch.equal))
    overrides.add("allclose", "CUDA")(partial(agree, torch.allclose))

    @overrides.add("cov", "AutogradCUDA")
    def cov(run: Kernel, tensor: torch.Tensor, **options: Any) -> object:
        weights = [options[name] for name in ("fweights", "aweights") if options.get(name) is not None]
        passing = [True] * len(weights) + [True] * bool(weights)  # none is negative, and their sum is not 0
        with values.prepared(*passing):
            return run(tensor, **options)

    for op, passing in _CHECKS.items():

        @overrides.add(op, "CUDA")
        def check(
            run: Kernel, *args: object, passing: tuple[Number, ...] = passing, **options: Any
        ) -> object:
            with values.prepared(*passing):
                return run(*args, **options)


def _no_rule(*_: object, **__: object) -> None:
    """Know nothing of a result."""


def _track(overrides: KernelOverrides, inputs: KnownInputs, op: str) -> None:
    """Record the elements of ``op``'s result, computed on the CPU, or else its value if a rule knows it."""
    overload = overload_of(op)
    if overload is None:
        return
    rule = RULES.get(op, partial(pointwise_value, overload) if is_pointwise(op) else _no_rule)
    has_rule = rule is not _no_rule
    known, call = inputs.known, partial(_call, overload) if op.endswith((".Tensor", "out")) else _run

    def track(run: Kernel, *args: Any, **options: Any) -> object:
        result = call(run, args, options)
        is_small = _are_small(args) and all(map(may_have_known_elements, tensors_of(result)))
        if is_small and _record(known, overload, args, options, result, needs_elements=has_rule):
            return result
        fact = rule(inputs, *args, **options)
        if fact is not None:
            first = tensors_of(result)[0]
            if first.is_cuda:
                known.put(first, fact, fresh=True)
        elif is_small and has_rule:  # perhaps of uniform tensors, but not uniform itself
            _record(known, overload, args, options, result)
        return result

    write = partial(_write, inputs, overload, rule if is_pointwise(op) else _no_rule, call)
    overrides.add(op, "AutogradCUDA")(write if overload._schema.is_mutable else track)


def _write(
    inputs: KnownInputs,
    overload: Any,
    rule: PropagationRule,
    call: Callable[..., object],
    run: Kernel,
    *args: Any,
    **options: Any,
) -> object:
    """Run an op that writes to its first argument or to ``out``; record what this holds then."""
    known, target = inputs.known, options.get("out", args[0])
    written: Written | None = None
    if target.is_cuda and _are_small((target, *args)):
        with without_dispatch_modes():
            written = written_on_cpu(known, overload, args, options, target)
    if written is None and "out" not in options and known.is_whole(target):
        fact = rule(inputs, *args, **options)
        written = (target, fact) if isinstance(fact, KnownValue) else None
    result = call(run, args, options)
    if written is not None:
        with without_dispatch_modes():
            known.put(*written)
    return result


def _record(
    known: KnownValues,
    overload: Any,
    args: Sequence[Any],
    options: dict[str, Any],
    result: object,
    *,
    needs_elements: bool = False,
) -> bool:
    """Record what the CPU computes of an op's results; return whether it did."""
    with without_dispatch_modes():
        computed = compute_on_cpu(known, overload, args, options, needs_elements=needs_elements)
        return bool(computed) and put_elements(known, result, computed)


def _run(run: Kernel, args: Sequence[Any], options: dict[str, Any]) -> object:
    return run(*args, **options)


def _call(overload: Any, run: Kernel, args: Sequence[Any], options: dict[str, Any]) -> object:
    """Run an op; only its packet wraps a number in a tensor again, which C++ had wrapped."""
    if any(isinstance(arg, bool | int | float | complex) for arg in args):
        with torch._C._AutoDispatchBelowAutograd():
            return overload._overloadpacket(*args, **options)
    return run(*args, **options)


def _are_small(args: Sequence[Any]) -> bool:
    """Return whether the first tensors that an op gets may be known by element."""
    for arg in args[:2]:
        if isinstance(arg, torch.Tensor) and not may_have_known_elements(arg):
            return False
        if isinstance(arg, list | tuple) and arg and isinstance(arg[0], torch.Tensor):
            return may_have_known_elements(arg[0])
    return True


def _track_grad_scaler(overrides: KernelOverrides, inputs: KnownInputs) -> None:
    """Track the loss scale exactly, so that no step is skipped by mistake and ``get_scale()`` is right."""

    @overrides.add("_amp_foreach_non_finite_check_and_unscale_", "AutogradCUDA")
    def unscale(
        run: Kernel, gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: object
    ) -> None:
        known = found_inf_after_unscale(inputs, gradients, found_inf, inv_scale)
        run(gradients, found_inf, inv_scale)
        for gradient in gradients:  # their versions stay
            inputs.known.forget(gradient)
        inputs.known.put(found_inf, known)

    @overrides.add("_amp_update_scale_", "AutogradCUDA")
    def update(run: Kernel, scale: torch.Tensor, tracker: torch.Tensor, *args: Any) -> object:
        known_scale, known_tracker = loss_scale_after_update(inputs, scale, tracker, *args)
        result = run(scale, tracker, *args)
        inputs.known.put(scale, known_scale)
        inputs.known.put(tracker, known_tracker)
        return result


def _track_constants(overrides: KernelOverrides, values: AssumedValues, ghost: GhostRuntime) -> None:
    """Record the value in ``torch.tensor(3.5, device="cuda")``, which calls ``lift_fresh`` last."""

    @overrides.add("lift_fresh", "CUDA")
    def lift(run: Kernel, tensor: torch.Tensor) -> object:
        result = run(tensor)
        if is_plain_tensor(tensor) and tensor.numel() == 1 and not tensor.is_complex():
            with values.while_counting():  # leaves the read to the ghost, which has just received the bytes
                value = tensor.item()
            if ghost.last_read_known():
                values.known.put(tensor, KnownValue(value), fresh=True)
        elif is_plain_tensor(tensor) and may_have_known_elements(tensor) and tensor.is_contiguous():
            with values.while_counting(), torch._C._AutoDispatchBelowAutograd():
                on_cpu = torch.empty_like(tensor, device="cpu").copy_(tensor)
            if ghost.last_read_known():
                values.known.put(tensor, KnownElements(on_cpu), fresh=True)
        return result


class _NoGrad:
    """``torch._C._InferenceMode``, without inference tensors.

    Under inference mode, autocast caches no cast weights. That is the only difference in allocations between
    the two modes, so this mode turns autocast's cache off. Like the original, it ends at the latest when its
    last reference is dropped: torch.compile enters it and drops it.
    """

    _inside = threading.local()
    _set_cache = staticmethod(torch.set_autocast_cache_enabled)

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._before: tuple[bool, bool, bool] | None = None

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), self.active()
        torch._C._set_grad_enabled(not self._enabled)
        self._inside.active = self._enabled
        self._set_cache(self._before[1] and not self._enabled)

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        grad, cache, self._inside.active = self._before
        self._before = None
        torch._C._set_grad_enabled(grad)
        self._set_cache(cache)

    def __del__(self) -> None:
        self.__exit__()

    @classmethod
    def active(cls) -> bool:
        """Return whether this thread is in inference mode."""
        return getattr(cls._inside, "active", False)

    @classmethod
    def set_cache(cls, enabled: bool) -> None:
        """Replace ``torch.set_autocast_cache_enabled``, which ``torch.autocast`` calls when entered."""
        cls._set_cache(enabled and not cls.active())
