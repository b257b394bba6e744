"""How many elements an op finds when that depends on values: as many as there can be, or as the user chose.

PyTorch's own kernel runs, so that its temporaries are all there; only the count it copies to the host, and
sizes its result by, is answered.

    op                                        at most                       answered by
    --------------------------------------    --------------------------    ----------------------------
    nonzero (and x[mask], where, masked_*)    every element; of a mask      the ghost: its small copies
                                              made by index, as many
                                              indices
    mode                                      every element of a slice      the ghost: its small copies
    unique, unique_consecutive, coalesce      every element, row or entry   the ghost: its small copies
    matrix_exp                                groups scaled alike: one     the ghost, prepared
    repeat_interleave                         no bound: one each            prepared (``Values.prepared``)
    one_hot, bincount without a size          no bound: 1,000               prepared
    nested tensors for padded batches         the padded batch              the batch stays padded
"""

from collections.abc import Callable

import torch

from memfit.ghost.ffi import Ghost
from memfit.ghost.patching.kernel_overrides import Overrides, Run
from memfit.ghost.values.known_values import Basis
from memfit.ghost.values.stand_ins import Values

_CLASSES = 1000
"""Classes where nothing bounds them: as many as ImageNet's, the commonest large label set."""

_SHORT_SLICE = 2048


def count_sizes(overrides: Overrides, values: Values, ghost: Ghost) -> None:
    """Override every op whose result has as many elements as its input's values decide."""
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
    """Count the values of a slice that ``mode`` may have to sort out; a short slice it does without.

    Source: ``mode_kernel_impl``, aten/src/ATen/native/cuda/TensorModeKernel.cpp, PyTorch 2.14.
    """
    size = tensor.size(dim) if tensor.dim() else 1
    return size if size > _SHORT_SLICE else 0


def _answer_by_ghost(
    overrides: Overrides, values: Values, ghost: Ghost, op: str, key: str, bound: Callable[..., int]
) -> None:
    """Have the ghost answer the small copies that ``op`` makes with how many elements are found."""

    @overrides.add(op, key)
    def count(run: Run, tensor: torch.Tensor, *args: object) -> object:
        upper = bound(tensor, *args)
        if upper == 0:
            return run(tensor, *args)
        if op == "nonzero":
            upper = _most(values, tensor)
        found = values.next_prepared()
        if found is None and op == "nonzero":
            found = _known_count(values, tensor)
        if found is None:
            found = values.choices.count_of(upper)
            name = op.removeprefix("_").removesuffix("2")
            text = f"{name} was taken to find {found:,} of at most {upper:,}"
            _note(values, found, text, bounded=True)
        with values.while_counting(), ghost.answering_counts(int(found)):
            result = run(tensor, *args)
        if op == "nonzero" and len(result) != found:
            # Beyond 2**31 elements it counts in pieces and copies all counts at once: more than 8 bytes.
            short = f"nonzero of {upper:,} elements found {len(result):,}, as it could not be told more"
            _note(values, len(result), short)
        return result


def _scale_alike(overrides: Overrides, values: Values, ghost: Ghost) -> None:
    """Let ``matrix_exp`` find that all its matrices are squared as often: one group, with all of them in it.

    Source: ``compute_T18_scale_square``, aten/src/ATen/native/LinearAlgebra.cpp, PyTorch 2.14.
    """

    @overrides.add("linalg_matrix_exp", "CUDA")
    def matrix_exp(run: Run, tensor: torch.Tensor) -> object:
        if tensor.numel() == 0:
            return run(tensor)
        matrices = tensor.numel() // (tensor.size(-1) * tensor.size(-2))
        text = f"matrix_exp was taken to scale all of {matrices:,} matrices alike, as GPU values decide."
        values.assume("count", matrices, text)
        with values.prepared(1), ghost.answering_counts(matrices):
            return run(tensor)


def _most(values: Values, tensor: torch.Tensor) -> int:
    """Return how many elements can be nonzero at most; what only a check vouches for may be anything."""
    known = values.known.mostly(tensor)
    if known is None or known.basis is Basis.CHECKED or known.value:
        return tensor.numel()
    return min(known.exceptions or tensor.numel(), tensor.numel())


def _known_count(values: Values, tensor: torch.Tensor) -> int | None:
    """Count the nonzero elements of a uniform tensor; one that only a check vouches for may select any."""
    known = values.known.get(tensor)
    if known is None or known.basis is Basis.CHECKED:
        return None
    found = tensor.numel() if known.value else 0
    if known.basis is Basis.FINITE:
        values.assume("count", found, f"GPU values are taken to be finite: {found:,} were selected.")
    return found


def _answer_by_reads(overrides: Overrides, values: Values) -> None:
    """Prepare what ops without an upper bound read of their input before they size their result."""

    @overrides.add("repeat_interleave.Tensor", "CUDA")
    def repeat_interleave(run: Run, repeats: torch.Tensor, *, output_size: int | None = None) -> object:
        if output_size is not None or repeats.numel() == 0:
            return run(repeats, output_size=output_size)
        known = values.known.get(repeats)
        if known is not None:
            total = int(known.value) * repeats.numel()
        else:
            total = values.choices.count_of(repeats.numel())
            _note(
                values,
                total,
                f"repeat_interleave was taken to repeat {total:,} times in all, once each if all",
            )
        with values.prepared(total, True):  # the sum of the repeats, and that none is negative
            return run(repeats)

    @overrides.add("one_hot", "AutogradCUDA")
    def one_hot(run: Run, tensor: torch.Tensor, num_classes: int = -1) -> object:
        if num_classes != -1 or type(tensor) is not torch.Tensor or tensor.numel() == 0:
            return run(tensor, num_classes)
        with values.prepared(_classes(values, "one_hot", "num_classes") - 1):
            return run(tensor)

    @overrides.add("bincount", "CUDA")
    def bincount(
        run: Run, tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
    ) -> object:
        if tensor.numel() == 0:
            return run(tensor, weights, minlength)
        bins = minlength or _classes(values, "bincount", "minlength")
        with values.prepared(bins - 1):
            return run(tensor, weights, minlength)


def _keep_padding(overrides: Overrides, values: Values) -> None:
    """Have ``nn.TransformerEncoder`` keep the padding that it would take out of a batch to run faster.

    It asks first whether the padding is all at the end, and goes on with the padded batch if not.
    """

    @overrides.add("_nested_tensor_from_mask_left_aligned", "CUDA")
    def left_aligned(_run: Run, _tensor: torch.Tensor, mask: torch.Tensor) -> bool:
        text = "a padded batch was taken to stay padded, which takes the most memory"
        values.assume("count", mask.numel(), f"A size that depends on GPU values: {text}.")
        return False


def _classes(values: Values, op: str, argument: str) -> int:
    count = values.choices.count
    classes = count if isinstance(count, int) else _CLASSES
    _note(values, classes, f"{op} was taken to find {classes:,} classes; pass {argument} to say how many")
    return max(classes, 1)


def _note(values: Values, found: int, text: str, *, bounded: bool = False) -> None:
    other = "1: the least memory" if values.choices.count == "upper" else "upper: the most memory"
    how = f"--values count=… chooses otherwise{f' (count={other})' if bounded else ''}."
    values.assume("count", found, f"A size that depends on GPU values: {text}. {how}")
