"""Sizes of results that depend on GPU values: the largest possible, or as the user chose.

PyTorch's own kernel runs, so all its temporaries are allocated; only the count that it copies to the host, to
allocate its result, is replaced.

    op                                        upper bound                   answered by
    --------------------------------------    --------------------------    ----------------------------
    nonzero (and x[mask], where, masked_*)    all elements; of a mask       the ghost: its small copies
                                              written by index, the
                                              number of indices
    mode                                      all elements of a slice       the ghost: its small copies
    unique, unique_consecutive, coalesce      all elements, rows, entries   the ghost: its small copies
    matrix_exp                                all matrices, in one group    the ghost, and prepared
    repeat_interleave                         none: one repeat each         ``AssumedValues.prepared``
    one_hot, bincount without a size          none: 1,000 classes           ``AssumedValues.prepared``
    nested tensors for padded batches         the padded batch              the batch stays padded
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from memfit.ghost.kernel_override_registry import Kernel, KernelOverrides
from memfit.ghost.runtime_bindings import GhostRuntime
from memfit.ghost.values.assumed_values import AssumedValues
from memfit.ghost.values.computed_on_cpu import known_elements, run_on_cpu
from memfit.ghost.values.computed_ops import overload_of
from memfit.ghost.values.tensor_facts import KnownValueBasis
from memfit.ghost.values.value_options import chosen_element_count
from memfit.patching.patches import Patch
from memfit.user_lines import frame_locations

_CLASSES = 1000
"""Number of classes without an upper bound: that of ImageNet, the most common large label set."""

_SHORT_SLICE = 2048
_FOUND_ALONG = {"nonzero": None, "_unique2": None, "unique_consecutive": 2, "unique_dim": 0}
"""Op -> which of its arguments after the tensor is the dimension along which its result has what it finds."""
SIZED_KERNELS = Patch(
    "torch:ops.aten",
    *("nonzero", "_unique2", "unique_consecutive", "unique_dim", "_coalesce", "mode", "linalg_matrix_exp"),
    *("repeat_interleave", "one_hot", "bincount", "_nested_tensor_from_mask_left_aligned"),
    why="choose sizes that depend on GPU values",
    source="aten/src/ATen/native/native_functions.yaml",
)
_NAMES = {"_unique2": "unique", "unique_dim": "unique", "_coalesce": "coalesce"}
"""ATen op -> the operator that scripts call."""


def override_ops_with_data_dependent_sizes(
    overrides: KernelOverrides, values: AssumedValues, ghost: GhostRuntime
) -> None:
    """Override every op whose result size depends on its input's values."""
    _answer_by_ghost(overrides, values, ghost, "nonzero", "CUDA", _elements)
    _answer_by_ghost(overrides, values, ghost, "_unique2", "CUDA", _elements)
    _answer_by_ghost(overrides, values, ghost, "unique_consecutive", "CUDA", _slices)
    _answer_by_ghost(overrides, values, ghost, "unique_dim", "CUDA", lambda tensor, dim, *_: tensor.size(dim))
    _answer_by_ghost(overrides, values, ghost, "_coalesce", "SparseCUDA", lambda tensor: tensor._nnz())
    _answer_by_ghost(overrides, values, ghost, "mode", "CUDA", _distinct)
    _scale_alike(overrides, values, ghost)
    _answer_by_reads(overrides, values)
    _keep_padding(overrides, values)


def _elements(tensor: torch.Tensor, *_: object) -> int:
    return tensor.numel()


def _slices(
    tensor: torch.Tensor, _inverse: bool = False, _counts: bool = False, dim: int | None = None
) -> int:
    return tensor.numel() if dim is None else tensor.size(dim)


def _distinct(tensor: torch.Tensor, dim: int = -1, *_: object) -> int:
    """Return the upper bound on distinct values in a slice of ``mode``; 0 for short slices, which need none.

    Source: ``mode_kernel_impl``, aten/src/ATen/native/cuda/TensorModeKernel.cpp, PyTorch 2.14.
    """
    size = tensor.size(dim) if tensor.dim() else 1
    return size if size > _SHORT_SLICE else 0


def _answer_by_ghost(
    overrides: KernelOverrides,
    values: AssumedValues,
    ghost: GhostRuntime,
    op: str,
    key: str,
    bound: Callable[..., int],
) -> None:
    """Have the ghost answer the small copies that ``op`` makes with the number of elements found."""

    @overrides.add(op, key)
    def count(run: Kernel, tensor: torch.Tensor, *args: Any) -> object:
        upper = bound(tensor, *args)
        if upper == 0:
            return run(tensor, *args)
        if op == "nonzero":
            upper = _max_nonzero(values, tensor)
        found = values.next_prepared()
        if found is None:
            found = _known_count(values, op, tensor, args)
        if found is None and op == "nonzero":
            found = values.found_in_forward(tensor)
        if found is None:
            name = _NAMES.get(op, op)
            chosen = values.choose("count", name)
            found = chosen_element_count(chosen.value, upper)
            if chosen.value == "upper":
                text = f"{name} is assumed to find as many as possible, {upper:,} elements"
            else:
                text = f"the user assumes that {name} finds {found:,} of at most {upper:,} elements"
            prints = _prints_tensor()
            is_bound = chosen.value == "upper" and not prints
            _note(values, name, found, text, chosen.given, is_bound=is_bound, sizes=not prints)
        if op == "nonzero":
            values.remember_found(tensor, int(found))
        with values.while_counting(), ghost.answering_counts(int(found)):
            result = run(tensor, *args)
        if op == "nonzero" and len(result) != found:
            # Beyond 2**31 elements, nonzero counts in chunks and copies all counts at once: over 8 bytes.
            text = (
                f"A size depends on GPU values: nonzero found {len(result):,} of {upper:,} elements, because "
                "memfit cannot choose the count in a tensor of more than 2**31 elements."
            )
            values.assume("the size of nonzero", "", len(result), text, sizes=True)
        return result


def _scale_alike(overrides: KernelOverrides, values: AssumedValues, ghost: GhostRuntime) -> None:
    """Have ``matrix_exp`` square all its matrices equally often: one group that holds all of them.

    Source: ``compute_T18_scale_square``, aten/src/ATen/native/LinearAlgebra.cpp, PyTorch 2.14.
    """

    @overrides.add("linalg_matrix_exp", "CUDA")
    def matrix_exp(run: Kernel, tensor: torch.Tensor) -> object:
        if tensor.numel() == 0:
            return run(tensor)
        matrices = tensor.numel() // (tensor.size(-1) * tensor.size(-2))
        text = (
            f"The scaling in matrix_exp depends on GPU values: it is assumed to be the same for all "
            f"{matrices:,} matrices."
        )
        values.assume("the scaling in matrix_exp", "", matrices, text, sizes=True)
        with values.prepared(1), ghost.answering_counts(matrices):
            return run(tensor)


def _max_nonzero(values: AssumedValues, tensor: torch.Tensor) -> int:
    """Return an upper bound on nonzero elements; a value known only from a check gives no bound."""
    known = values.known.mostly(tensor)
    if known is None or known.basis is KnownValueBasis.CHECKED or known.value:
        return tensor.numel()
    return min(known.exceptions or tensor.numel(), tensor.numel())


def _known_count(values: AssumedValues, op: str, tensor: torch.Tensor, args: Sequence[Any]) -> int | None:
    """Return how many elements an op finds in a tensor; None if it is not known, or rests on a check."""
    elements = _elements_of(values, tensor)  # first: another rank may send them
    if elements is not None and op in _FOUND_ALONG:
        results = run_on_cpu(overload_of(op), [elements, *args], {})
        along = _FOUND_ALONG[op]
        dim = None if along is None or len(args) <= along else args[along]
        return int(results[0].size(dim or 0)) if results else None
    if op != "nonzero":
        return None
    known = values.known.get(tensor)
    if known is None or known.basis is KnownValueBasis.CHECKED:
        return None
    found = tensor.numel() if known.value else 0
    if known.basis is KnownValueBasis.FINITE:
        text = f"GPU values are assumed to be finite: {found:,} were selected."
        values.assume("the size of nonzero", "", found, text, sizes=True)
    return found


def _elements_of(values: AssumedValues, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the elements of a small tensor that the script has set; None if they are unknown or assumed."""
    known = known_elements(values.known, tensor)
    return None if known is None or known.routing or known.basis else known.values


def _answer_by_reads(overrides: KernelOverrides, values: AssumedValues) -> None:
    """Prepare the values that ops without an upper bound read before they allocate their result."""

    @overrides.add("repeat_interleave.Tensor", "CUDA")
    def repeat_interleave(run: Kernel, repeats: torch.Tensor, *, output_size: int | None = None) -> object:
        if output_size is not None or repeats.numel() == 0:
            return run(repeats, output_size=output_size)
        elements, known = _elements_of(values, repeats), values.known.get(repeats)
        if elements is not None:
            total = int(elements.sum())
        elif known is not None:
            total = int(known.value) * repeats.numel()
        else:
            total = _repeated(values, repeats.numel())
        with values.prepared(total, True):  # the sum of the repeats, and that none is negative
            return run(repeats)

    @overrides.add("one_hot", "AutogradCUDA")
    def one_hot(run: Kernel, tensor: torch.Tensor, num_classes: int = -1) -> object:
        if num_classes != -1 or type(tensor) is not torch.Tensor or tensor.numel() == 0:
            return run(tensor, num_classes)
        with values.prepared(_largest(values, tensor, "one_hot", "num_classes")):
            return run(tensor)

    @overrides.add("bincount", "CUDA")
    def bincount(
        run: Kernel, tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
    ) -> object:
        if tensor.numel() == 0:
            return run(tensor, weights, minlength)
        largest = minlength - 1 if minlength else _largest(values, tensor, "bincount", "minlength")
        with values.prepared(largest):
            return run(tensor, weights, minlength)


def _keep_padding(overrides: KernelOverrides, values: AssumedValues) -> None:
    """Have ``nn.TransformerEncoder`` keep the padding that it would otherwise remove to run faster.

    The encoder first checks whether all padding is at the end, and uses the padded batch if it is not.
    """

    @overrides.add("_nested_tensor_from_mask_left_aligned", "CUDA")
    def left_aligned(_run: Kernel, _tensor: torch.Tensor, mask: torch.Tensor) -> bool:
        text = "a padded batch is assumed to stay padded, which takes the most memory"
        values.assume("padding", "", mask.numel(), f"A size depends on GPU values: {text}.", sizes=True)
        return False


def _repeated(values: AssumedValues, elements: int) -> int:
    """Return how many elements ``repeat_interleave`` returns: as chosen, or one for each input element."""
    chosen = values.choose("count", "repeat_interleave")
    is_number = type(chosen.value) is int  # which nothing bounds
    total = chosen.value if is_number else chosen_element_count(chosen.value, elements)
    if chosen.given:
        text = f"the user assumes that repeat_interleave returns {total:,} elements"
    else:
        text = f"repeat_interleave is assumed to return {total:,} elements, one for each entry of repeats"
    _note(values, "repeat_interleave", total, text, chosen.given)
    return total


def _largest(values: AssumedValues, tensor: torch.Tensor, op: str, argument: str) -> int:
    """Return the largest class in a tensor: the largest element, if known, or else as assumed or chosen."""
    elements = _elements_of(values, tensor)
    if elements is not None:
        return int(elements.max())
    chosen = values.choose("count", op)
    given = type(chosen.value) is int  # a share has nothing to refer to
    classes = max(chosen.value, 1) if given else _CLASSES
    who = f"the user assumes that {op} finds" if given else f"{op} is assumed to find"
    text = f"{who} {classes:,} classes; pass {argument} to set the number of classes"
    _note(values, op, classes, text, chosen.given if given else "")
    return classes - 1


def _note(
    values: AssumedValues,
    op: str,
    found: int,
    text: str,
    given: str,
    *,
    is_bound: bool = False,
    sizes: bool = True,
) -> None:
    """Note a size; ``given`` is the pair of ``--values`` that set it, or empty."""
    advice = f" (--values {given})." if given else f". --values {op}=… or, for one line, FILE:LINE=… sets it."
    text = f"A size depends on GPU values: {text}{advice}"
    values.assume(f"the size of {op}", op, found, text, sizes=sizes, bound=op if is_bound else "")


def _prints_tensor() -> bool:
    """Return whether PyTorch formats a tensor as text, which frees what it selects for that at once."""
    return any(file.endswith("torch/_tensor_str.py") for file, _ in frame_locations())
