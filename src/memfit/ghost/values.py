"""What a script is told when it reads a value from the ghost, where nothing is computed.

    it reads                        it is told
    ----------------------------    ------------------------------------------------------------------
    one element                     what is known of it (``rules.py``), or the bytes the ghost remembers,
                                    or a stand-in: 1.0, 0 or False
    how many elements there are     as many as there can be (``sizes.py``)
    many elements (``tolist()``)    zeros

What is not known is noted with the line that asked. PyTorch's own kernels run all the same, so every
allocation is theirs; the overrides here only add the answer.

On the ghost ``torch.inference_mode`` is ``torch.no_grad``: tensors made under inference mode carry no
version, so nothing could be known of them. The allocations are the same.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from memfit.ghost import overrides as kernels
from memfit.ghost.answers import Note, Read, Values
from memfit.ghost.choices import ValueChoices
from memfit.ghost.known import Known, is_plain, known_number
from memfit.ghost.load import Ghost
from memfit.ghost.overrides import Overrides, Run
from memfit.ghost.rules import RULES, Facts, Rule, unscaled, updated_scale
from memfit.ghost.sizes import count_sizes
from memfit.ghost.where import calls
from memfit.records import Provenance

__all__ = ["Read", "ValueChoices", "Values", "install"]

_FACTORIES = frozenset(
    (
        "full",
        "ones",
        "zeros",
        "full_like",
        "ones_like",
        "zeros_like",
        "new_full",
        "new_ones",
        "new_zeros",
        "scalar_tensor",
    )
)
_SMALL = 1 << 16
"""Elements of a CPU copy that are worth writing, where the value is known."""


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
            f"reads are zeros, and sizes that depend on them are 0. PyTorch 2.10 and later can.",
            "",
        )
        return values
    overrides = Overrides()
    facts = Facts(values.known, all=choices.all, any=choices.truth)
    _answer_scalars(overrides, values, ghost)
    _answer_copies(overrides, values, ghost)
    _answer_checks(overrides, values, facts)
    for op, rule in RULES.items():
        _follow(overrides, facts, op, rule)
    _follow_grad_scaler(overrides, facts)
    _follow_constants(overrides, values, ghost)
    count_sizes(overrides, values, ghost)
    _watch_ways_around_the_version(values)
    torch._C._InferenceMode = _NoGrad  # type: ignore[misc,assignment]
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


def _answer_copies(overrides: Overrides, values: Values, ghost: Ghost) -> None:
    """Carry what is known through ``to()``; answer a copy of one element to the CPU as ``item()`` is."""

    @overrides.add("_to_copy", "AutogradCUDA")
    def copy(run: Run, tensor: torch.Tensor, **options: Any) -> object:
        result = run(tensor, **options)
        if not is_plain(tensor) or not tensor.numel():
            return result
        known = values.known.get(tensor)
        if result.is_cuda:
            values.known.put(result, known)
        elif result.is_cpu and (known is not None or not ghost.last_read_known()):
            if tensor.numel() == 1 or (known is not None and tensor.numel() <= _SMALL):
                result.data.fill_(values.tell(tensor, known))  # past autograd: the copy's history stays
            else:
                text = "The script copied GPU values to the CPU: zeros, as nothing is computed on the ghost."
                values.assume("zeros", 0, text)
        return result


def _answer_checks(overrides: Overrides, values: Values, facts: Facts) -> None:
    """Answer what ops read to check their own arguments, or to compare two tensors."""

    def agree(run: Run, a: torch.Tensor, b: torch.Tensor, **options: Any) -> object:
        known = RULES["eq.Tensor"](facts, a, b)
        with values.prepared(facts.all if known is None else known.value) as unread:
            result = run(a, b, **options)
        if known is None and not unread:
            values.assume(
                "all", facts.all, f"Two GPU tensors were compared; the script was told {facts.all}."
            )
        return result

    overrides.add("equal", "CUDA")(agree)
    overrides.add("allclose", "CUDA")(agree)

    @overrides.add("_linalg_check_errors", "CUDA")
    def solved(run: Run, *args: object, **options: Any) -> object:
        with values.prepared(0, 0):
            return run(*args, **options)


def _follow(overrides: Overrides, facts: Facts, op: str, rule: Rule) -> None:
    """Note what the result of ``op`` holds, as far as ``rule`` can say."""

    @overrides.add(op, "AutogradCUDA")
    def follow(run: Run, *args: object, **options: object) -> object:
        known = rule(facts, *args, **options)
        result = run(*args, **options)
        facts.values.put(result[0] if isinstance(result, tuple) else result, known)
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
    """Note what ``torch.full``, ``zeros`` and the like, and ``torch.tensor`` of one number, were given.

    They reach a GPU below autograd's key, where PyTorch's own kernels also fill tensors that they go on to
    write; only a fill that the script's line itself calls for is the last word.
    """
    for op in ("fill_.Scalar", "zero_"):

        @overrides.add(op, "CUDA")
        def fill(run: Run, tensor: torch.Tensor, *value: object) -> object:
            result = run(tensor, *value)
            if calls(sys._getframe(1).f_back, _FACTORIES):  # frame 1 is the override's own
                values.known.put(tensor, known_number(value[0] if value else 0))
            return result

    @overrides.add("lift_fresh", "CUDA")
    def lift(run: Run, tensor: torch.Tensor) -> object:
        result = run(tensor)
        if is_plain(tensor) and tensor.numel() == 1 and not tensor.is_complex():
            with values.while_counting():  # leaves the read to the ghost, which has just been given the bytes
                value = tensor.item()
            if ghost.last_read_known():
                values.known.put(tensor, Known(value))
        return result


def _watch_ways_around_the_version(values: Values) -> None:
    """Forget tensors whose memory is handed out where autograd cannot count what is written to it."""

    def expose(tensor: torch.Tensor) -> None:
        if is_plain(tensor) and tensor.is_cuda:
            values.known.expose(tensor)

    data = torch.Tensor.data

    def get_data(self: torch.Tensor) -> torch.Tensor:
        expose(self)
        return data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    def set_data(self: torch.Tensor, other: torch.Tensor) -> None:
        expose(self)
        expose(other)
        data.__set__(self, other)  # type: ignore[attr-defined]

    def exposing(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: torch.Tensor, *args: object, **options: object) -> Any:
            expose(self)
            return method(self, *args, **options)

        return call

    torch.Tensor.data = property(get_data, set_data, doc=data.__doc__)  # type: ignore[assignment]
    torch.Tensor.data_ptr = exposing(torch.Tensor.data_ptr)  # type: ignore[method-assign]
    torch.Tensor.__dlpack__ = exposing(torch.Tensor.__dlpack__)  # type: ignore[method-assign]


class _NoGrad:
    """``torch._C._InferenceMode``, without inference tensors."""

    def __init__(self, enabled: bool = True) -> None:
        self._grad = not enabled

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._grad)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)
