"""What a script is told when it reads a value from the ghost, where nothing is computed.

    it reads                        it is told
    ----------------------------    ------------------------------------------------------------------
    one element                     what is known of it (``rules.py``), or the bytes the ghost remembers,
                                    or a stand-in: 1.0, 0 or False
    how many elements there are     as many as there can be (``sizes.py``)
    many elements (``tolist()``)    zeros

What is not known is noted with the line that asked. PyTorch's own kernels run all the same, so every
allocation is theirs; the overrides here only add the answer.

Fills, factories and copies are followed where Python calls them (``methods.py``) and not in the dispatcher:
PyTorch's kernels fill tensors that they go on to write, without a word to autograd.

On the ghost ``torch.inference_mode`` is ``torch.no_grad`` without autocast's cache: tensors made under
inference mode carry no version, so nothing could be known of them. The allocations are the same.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfit.ghost.ffi import Ghost
from memfit.ghost.patching import kernel_overrides as kernels
from memfit.ghost.patching.kernel_overrides import Overrides, Run
from memfit.ghost.values.data_dependent_sizes import count_sizes
from memfit.ghost.values.known_values import Known, Number, is_plain
from memfit.ghost.values.propagation_rules import RULES, Facts, Rule, unscaled, updated_scale
from memfit.ghost.values.stand_ins import Note, Read, Values
from memfit.ghost.values.torch_patches import wrap_methods
from memfit.ghost.values.value_options import ValueChoices
from memfit.records import Provenance

__all__ = ["Read", "ValueChoices", "Values", "install"]


_CHECKS: Mapping[str, tuple[Number, ...]] = {
    "_linalg_check_errors": (0, 0),  # every matrix was factorized
    "linalg_eig": (True,),  # the input is finite
    "linalg_eig.out": (True,),
    "segment_reduce": (0, True),  # the least length, and that the lengths add up
}
"""Op that reads something of its own arguments to check them -> what it must read to pass."""


def install(
    ghost: Ghost, choices: ValueChoices, note: Note, *, fallback_where: Callable[[], str] = lambda: ""
) -> Values:
    """Answer what the script reads from the ghost, from now on and for the life of the process.

    Args:
        ghost: the loaded ghost; torch has been imported since.
        choices: what to answer where nothing is known.
        note: called as ``note(provenance, text, where)`` for every assumption, once per line and text.
        fallback_where: names the place of a read that has no Python frame (PyTorch's autograd thread).

    Returns:
        What was told and why. To be informed of training steps (``Values.stepped``), and to be kept: the
        answers end with it.
    """
    values = Values(choices, note, fallback_where)
    if not kernels.available():
        note(
            Provenance.ASSUMED,
            f"PyTorch {torch.__version__} cannot be asked for its own kernels: GPU values that the script "
            f"reads are zeros, and sizes that depend on them are 0. PyTorch 2.9 and later can.",
            "",
        )
        return values
    overrides = Overrides()
    facts = Facts(values.known, all=choices.all, any=choices.truth)
    _answer_scalars(overrides, values, ghost)
    _answer_checks(overrides, values, facts)
    for op, rule in RULES.items():
        _follow(overrides, facts, op, rule)
    _follow_grad_scaler(overrides, facts)
    _follow_constants(overrides, values, ghost)
    count_sizes(overrides, values, ghost)
    wrap_methods(values, ghost)
    torch._C._InferenceMode = _NoGrad  # type: ignore[misc,assignment]
    torch.set_autocast_cache_enabled = _NoGrad.set_cache
    values.keep(overrides)
    return values


def _answer_scalars(overrides: Overrides, values: Values, ghost: Ghost) -> None:
    """Answer ``item()``, ``bool()``, ``int()`` and ``float()``, which all end in this op."""

    @overrides.add("_local_scalar_dense", "CUDA")
    def read(run: Run, tensor: torch.Tensor) -> object:
        raw = run(tensor)
        if values.counting:
            return raw
        prepared = values.next_prepared()
        if prepared is not None:
            return type(raw)(prepared)
        known = values.known.get(tensor)
        if known is None and ghost.last_read_known():
            return raw
        return values.tell(tensor, known)


def _answer_checks(overrides: Overrides, values: Values, facts: Facts) -> None:
    """Answer what ops read to check their own arguments, or to compare two tensors."""

    def agree(run: Run, a: torch.Tensor, b: torch.Tensor, *args: Any, **options: Any) -> object:
        known = RULES["eq.Tensor"](facts, a, b)
        if known is not None and known.exceptions:
            known = None
        if known is None and a.dtype == torch.bool and not a.dim():
            # How PyTorch asks whether one truth holds (``is_scalar_tensor_true``, ATen, 2.14): ``b`` is True.
            prepared = values.next_prepared()
            with values.prepared(bool(values.tell(a, facts.of(a)) if prepared is None else prepared)):
                return run(a, b, *args, **options)
        with values.prepared(facts.all if known is None else known.value) as unread:
            result = run(a, b, *args, **options)
        if known is None and not unread:
            values.assume(
                "all", facts.all, f"Two GPU tensors were compared; the script was told {facts.all}."
            )
        return result

    overrides.add("equal", "CUDA")(agree)
    overrides.add("allclose", "CUDA")(agree)

    @overrides.add("cov", "AutogradCUDA")
    def cov(run: Run, tensor: torch.Tensor, **options: Any) -> object:
        weights = [options[name] for name in ("fweights", "aweights") if options.get(name) is not None]
        passing = [True] * len(weights) + [True] * bool(weights)  # none is negative, and their sum is not 0
        with values.prepared(*passing):
            return run(tensor, **options)

    for op, passing in _CHECKS.items():

        @overrides.add(op, "CUDA")
        def check(run: Run, *args: object, passing: tuple[Number, ...] = passing, **options: Any) -> object:
            with values.prepared(*passing):
                return run(*args, **options)


def _follow(overrides: Overrides, facts: Facts, op: str, rule: Rule) -> None:
    """Note what the result of ``op`` holds, as far as ``rule`` can say."""
    packet = getattr(torch.ops.aten, op.partition(".")[0])

    @overrides.add(op, "AutogradCUDA")
    def follow(run: Run, *args: object, **options: object) -> object:
        known = rule(facts, *args, **options)
        if op.endswith(".Tensor") and not all(isinstance(arg, torch.Tensor) for arg in args):
            # A number that C++ had wrapped in a tensor arrives bare, and only the packet wraps it again.
            with torch._C._AutoDispatchBelowAutograd():
                result = packet(*args, **options)
        else:
            result = run(*args, **options)
        facts.values.put(result[0] if isinstance(result, tuple) else result, known, fresh=True)
        return result


def _follow_grad_scaler(overrides: Overrides, facts: Facts) -> None:
    """Keep the loss scale exactly, so that no step is skipped by accident and ``get_scale()`` is right."""

    @overrides.add("_amp_foreach_non_finite_check_and_unscale_", "AutogradCUDA")
    def unscale(run: Run, gradients: object, found_inf: torch.Tensor, inv_scale: object) -> None:
        known = unscaled(facts, gradients, found_inf, inv_scale)
        run(gradients, found_inf, inv_scale)
        facts.values.put(found_inf, known)

    @overrides.add("_amp_update_scale_", "AutogradCUDA")
    def update(run: Run, scale: torch.Tensor, tracker: torch.Tensor, *args: Any) -> object:
        known_scale, known_tracker = updated_scale(facts, scale, tracker, *args)
        result = run(scale, tracker, *args)
        facts.values.put(scale, known_scale)
        facts.values.put(tracker, known_tracker)
        return result


def _follow_constants(overrides: Overrides, values: Values, ghost: Ghost) -> None:
    """Note what ``torch.tensor(3.5, device="cuda")`` was given: its one call of this op comes last."""

    @overrides.add("lift_fresh", "CUDA")
    def lift(run: Run, tensor: torch.Tensor) -> object:
        result = run(tensor)
        if is_plain(tensor) and tensor.numel() == 1 and not tensor.is_complex():
            with values.while_counting():  # leaves the read to the ghost, which has just been given the bytes
                value = tensor.item()
            if ghost.last_read_known():
                values.known.put(tensor, Known(value), fresh=True)
        return result


class _NoGrad:
    """``torch._C._InferenceMode``, without inference tensors.

    What else it does to memory: autocast keeps no cast weights under inference mode. That is the one
    difference in allocations between the two modes, so autocast's cache is off in here. Like the original
    it ends at the latest when nobody holds it any more: torch.compile enters it and drops it.
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
        """Say whether this thread is under inference mode."""
        return getattr(cls._inside, "active", False)

    @classmethod
    def set_cache(cls, enabled: bool) -> None:
        """Stand in for ``torch.set_autocast_cache_enabled``, which ``torch.autocast`` calls on entering."""
        cls._set_cache(enabled and not cls.active())
