"""What one operation asks of a GPU: its kind of kernel, and the sizes on which that kind's time depends.

    Operation "aten.addmm.default", operands (3072) (4096, 768) (768, 3072)
         |  work_of
    KernelWork("product", "float32", bytes, flops, products=((1, 4096, 3072, 768),))

Bytes are those that a kernel cannot avoid: each operand read once and each result written once, unless a kind
is known to read or write more or less. An expanded operand counts as nothing: what it repeats is small.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from memfit.records.step_operations import Operand, Operation
from memfit.timing.collective_times import kind_of_collective, link_bytes

_WIDE = {"float64": 8, "complex64": 8, "int64": 8, "complex128": 16, "float32": 4, "int32": 4}
_HALF = {"float16": 2, "bfloat16": 2, "int16": 2}
_BYTES = _WIDE | _HALF
Sizes = tuple[int, int, int, int]
_BATCHED = 4
"""Dimensions of an attention's queries, unless sequences of several lengths are behind each other."""


@dataclass(frozen=True, slots=True)
class KernelWork:
    """What an operation asks of the card."""

    kind: str
    """A kind of ``kernel_times.toml`` without its precision: ``product``, ``softmax``, ``flash_backward``."""
    dtype: str
    """``float32``: of the operands that it computes with."""
    traffic: float
    """Bytes from and to the card's memory."""
    flops: float = 0.0
    products: tuple[Sizes, ...] = ()
    """Of matrix products, and of convolutions as such: batch, and m, n, k of (m, k) x (k, n)."""
    alignment: int = 8
    """Elements: by how many the rows of a product's matrices are divisible, up to 8."""
    attention: Sizes | None = None
    """Of attention: batch x heads, queries, keys, width of a head."""
    causal: bool = False
    channels_last: bool = False
    """Of a convolution: whether its data is in this order, which tensor cores take."""
    reordered: float = 0.0
    """Bytes that kernels before and after a convolution move to bring its data into another order."""
    steps: int = 1
    """Of a recurrent network: how often its layers run, one after the other."""
    over_link: bool = False
    """Whether it copies between the host and the card."""
    ranks: int = 1
    """That take part in a collective. Its traffic is that over the link of each."""


def work_of(operation: Operation) -> KernelWork:
    """Return what an operation asks of the card.

    >>> a, b, c = (Operand(shape, "float32") for shape in ((64, 32), (32, 8), (64, 8)))
    >>> fields = "aten.mm.default", -1, -1, (), (), (), 0, 0, "float32", False, 0.0, 0
    >>> work = work_of(Operation(*fields, operands=(a, b), results=(c,)))
    >>> work.kind, work.products, work.traffic
    ('product', ((1, 64, 8, 32),), 11264)
    """
    if operation.ranks > 1:
        kind = kind_of_collective(operation)
        return KernelWork(kind, operation.dtype, link_bytes(operation), ranks=operation.ranks)
    if not operation.operands and not operation.results:  # of a compiled graph
        kind = "product" if operation.flops else "fused"
        return KernelWork(kind, operation.dtype, operation.moved, operation.flops)
    base = base_name(operation)
    if operation.name.endswith("out"):  # the last operands of an overload such as mm.out are its results
        operation = replace(operation, operands=operation.operands[: -len(operation.results) or None])
    plain = KernelWork("", operation.dtype, _traffic(operation), operation.flops)
    for rule in (_matrix_work, _attention_work, _convolution_work, _list_work, _recurrent_work):
        work = rule(base, operation, plain)
        if work is not None:
            return work
    kind = _KIND.get(base, "")
    if kind == "copy":
        return _copy_work(base, operation, plain)
    passes = _PASSES.get(base)
    return replace(
        plain,
        kind=kind or _kind_by_shapes(base, operation),
        traffic=plain.traffic if passes is None else passes(operation),
    )


def base_name(operation: Operation) -> str:
    """Return an operation's name without namespace, overload, and the ``_`` of one in place: ``add``."""
    parts = operation.name.split(".")
    return parts[min(1, len(parts) - 1)].rstrip("_")


def issues_nothing(operation: Operation) -> bool:
    """Return whether an operation leaves the card alone: views, empty tensors.

    Copies and zeros may be the work of the driver, which counts as no launch.
    """
    return not operation.launches and _KIND.get(base_name(operation)) not in {"copy", "fill"}


def is_solved(operation: Operation) -> bool:
    """Return whether cuSOLVER computes an operation: a decomposition, or the solution of equations."""
    return base_name(operation).startswith(_SOLVED)


_OF_COMPLEX = 4
"""Products of real numbers in one of complex ones."""


def _matrix_work(base: str, operation: Operation, plain: KernelWork) -> KernelWork | None:
    """A matrix product: of the last two operands, whatever their layout; a linear layer has its bias last."""
    if base == "linear":
        (*several, k), weight = operation.operands[0].shape, operation.operands[1].shape
        batch, m, n = 1, math.prod(several), weight[0]
        pair = operation.operands[:2]
    elif base in _PRODUCTS:
        pair = operation.operands[:2] if base == _SCALED else operation.operands[-2:]
        first, second = (each.shape for each in pair)
        if not (first[1:] and second[1:]):
            return None  # by a vector: traffic alone
        batch, m, n, k = math.prod(first[:-2]), first[-2], second[-1], first[-1]
    else:
        return None
    k *= _OF_COMPLEX if plain.dtype.startswith("complex") else 1
    matrices = pair if base == "linear" else (*pair, *operation.results)
    rows = [  # in memory; of a part, or one that Inductor padded, they begin where the whole's do
        each.shape[-2 if each.layout == "transposed" else -1] for each in matrices if each.layout != "strided"
    ]
    return replace(
        plain,
        kind="product",
        # Autocast casts what an addmm of the script is given; one with out_dtype has a wider result.
        dtype=min(plain.dtype, pair[0].dtype, key=lambda dtype: _BYTES.get(dtype, 1)),
        flops=2.0 * batch * m * n * k,
        products=((batch, m, n, k),),
        alignment=math.gcd(8, *rows),
    )


def _attention_work(base: str, operation: Operation, plain: KernelWork) -> KernelWork | None:
    """An attention: (batch, heads, sequence, width), or (batch, sequence, heads, width)."""
    kernel = next((kernel for kernel in _ATTENTIONS if kernel in base), None)
    if kernel is None or "attention" not in base:
        return None
    backward = "backward" in base
    first = backward and kernel != "flex"  # the gradient comes before the queries
    queries, keys = (each.shape for each in operation.operands[first : first + 2])
    if len(queries) != _BATCHED:
        return replace(plain, kind="product")  # sequences of several lengths, behind each other
    if base.startswith(("_scaled", "flex")):
        sizes = (queries[0] * queries[1], queries[2], keys[2], queries[3])
    else:
        sizes = (queries[0] * queries[2], queries[1], keys[1], queries[3])
    return replace(
        plain,
        kind=f"{kernel}_backward" if backward else kernel,
        # Source: OpMultiplyAddFastF32 in mem_eff_attention/gemm_kernel_utils.h, PyTorch 2.1 to 2.14.
        dtype="float32 by tf32" if plain.dtype == "float32" else plain.dtype,
        flops=2 * (5 if backward else 2) * math.prod(sizes),
        attention=sizes,
        causal=operation.is_causal or kernel == "flex",  # what its mask leaves out is not known: assumed
    )


def _convolution_work(base: str, operation: Operation, plain: KernelWork) -> KernelWork | None:
    """A convolution as the matrix product that it is: positions x channels out x (channels in x window).

    Its backward is two: for the gradient of the data, and for that of the weight. Groups count as if they lay
    beside each other. A transposed one makes of its data what another's gradient of the data is.
    """
    if "convolution" not in base:
        return None
    backward = "backward" in base
    data, weight = operation.operands[backward], operation.operands[1 + backward].shape
    out = operation.operands[0].shape if backward else operation.results[0].shape
    into, made = data.shape, [each.shape for each in operation.results]
    if into[1] == weight[0] and math.prod(out[2:]) > math.prod(into[2:]):  # transposed
        into, out = out, into
    channels, window, groups = weight[0], math.prod(weight[2:]), max(1, into[1] // max(weight[1], 1))
    end = "_backward" if backward else ""
    if groups > 1 and weight[1] == 1:
        return replace(plain, kind=f"depthwise{end}", flops=0)  # PyTorch counts far more in the backward
    positions, depth = out[0] * math.prod(out[2:]), weight[1] * window
    places = into[0] * math.prod(into[2:])
    products: list[Sizes] = [(1, positions, channels, depth)]
    if backward:
        outwards = (1, places, into[1], positions * channels * window // groups // places)
        products = [outwards] * (data.shape in made) + [(1, channels, depth, positions)] * (weight in made)
    flops = sum(2.0 * math.prod(sizes) for sizes in products)
    passed_over = max(0.0, 1 - positions * window / places)  # with strides longer than the window
    last = data.layout in {"permuted", "transposed"}
    return replace(
        plain,
        kind=f"convolution{end}",
        flops=flops,
        traffic=plain.traffic - _size(data) * passed_over,
        products=tuple(products),
        channels_last=last,
    )


def _list_work(base: str, operation: Operation, plain: KernelWork) -> KernelWork | None:
    """An operation on lists of tensors: optimizers. One in place returns none, and writes its first list."""
    if base in _KIND or not base.startswith(("_foreach", "_fused", "_amp_foreach")):
        return None
    read = sum(map(_size, operation.operands))
    if base.startswith("_fused"):  # all but gradients, a quarter or a third, are written
        return replace(plain, kind="optimizer", traffic=read * (5 / 3 if "sgd" in base else 7 / 4))
    written: float = sum(map(_size, operation.results))
    if operation.name.split(".")[1].endswith("_") or not operation.results:
        several = {"_foreach_addcdiv": 3, "_foreach_addcmul": 3, "_foreach_lerp": 2, "_foreach_copy": 2}
        written = read / several.get(base, 2 if operation.name.endswith(".List") else 1)
    unread = {"_foreach_zero": read, "_foreach_copy": written}.get(base, 0)
    return replace(plain, kind="optimizer", traffic=read + written - unread)


def _recurrent_work(base: str, operation: Operation, plain: KernelWork) -> KernelWork | None:
    """A recurrent network in cuDNN: a product with all weights, which are read again in each step."""
    if "cudnn_rnn" not in base:
        return None
    sequences, *others = operation.operands
    weights = [each for each in others if each.shape[1:] and not each.shape[2:]]
    batch = next((each.shape[1] for each in others if each.shape[2:]), 1)  # of the hidden state
    rows = math.prod(sequences.shape[:-1])
    times = 2 if "backward" in base else 1
    return replace(
        plain,
        kind="recurrent",
        steps=times * max(1, rows // batch),
        flops=2.0 * times * rows * sum(math.prod(each.shape) for each in weights),
        traffic=plain.traffic + times * rows // batch * sum(map(_size, weights)),
    )


def _copy_work(base: str, operation: Operation, plain: KernelWork) -> KernelWork:
    """A copy: on the card, in the order of elements or another, or between host and card."""
    source = operation.operands[-1:] if base == "copy" else operation.operands
    target = operation.results or operation.operands[:1]
    layouts = {each.layout for each in (*source, *target)} - {"expanded"}
    traffic = sum(map(_size, (*source, *target)))
    if "host" in layouts:
        return replace(plain, kind="copy", traffic=traffic / 2, over_link=True)
    return replace(plain, kind="transpose" if len(layouts) > 1 else "copy", traffic=traffic)


def _kind_by_shapes(base: str, operation: Operation) -> str:
    """Return the kind of an operation that no table names: by elements, to fewer elements, or another."""
    if operation.flops:
        return "product"
    if any(part in base for part in _OF_SEVERAL_KERNELS):
        return "other"
    most = max((math.prod(each.shape) for each in operation.operands), default=0)
    made = max((math.prod(each.shape) for each in operation.results), default=0)
    return "pointwise" if made >= most or "backward" in base else "reduction"


def _size(tensor: Operand) -> int:
    if tensor.layout == "expanded":
        return 0
    return math.prod(tensor.shape) * _BYTES.get(tensor.dtype, 1)


def _traffic(operation: Operation) -> int:
    return sum(map(_size, (*operation.operands, *operation.results)))


def _results(operation: Operation) -> float:
    return sum(map(_size, operation.results))


def _gathered(operation: Operation) -> float:
    """Rows of the result are read and written; of the table, no others. Indices are small."""
    return 2 * _results(operation) + sum(map(_size, operation.operands[1:]))


def _embedding_gradient(operation: Operation) -> float:
    """The whole table is filled with zeros. Indices are sorted, and rows summed in several kernels."""
    return _results(operation) + EMBEDDING_PASSES * _size(operation.operands[0])


def _softmax_gradient(operation: Operation) -> float:
    """Two kernels: gradient x result, and that and the result to the gradient.

    Source: softmax_backward_cuda_out in aten/src/ATen/native/cuda/SoftMax.cu, PyTorch 2.1 to 2.14.
    """
    return 6 * _results(operation)


def _norm_gradient(operation: Operation) -> float:
    """One kernel reads both for the gradient of the input, another again for those of weight and bias."""
    return _traffic(operation) + sum(map(_size, operation.operands[:2]))


def _norm_of_channels(operation: Operation) -> float:
    """One kernel reads the input for mean and variance, another again to apply them."""
    return _traffic(operation) + _size(operation.operands[0])


def _scattered(operation: Operation) -> float:
    """Values are read, and rows read and written; in a copy of the table, unless in place."""
    copied = 0 if operation.name.split(".")[1].endswith("_") else 2 * _results(operation)
    return copied + 3 * _size(operation.operands[-1])


def _losses(operation: Operation) -> float:
    """One number of each row is read; the gradient is filled with zeros."""
    return _results(operation) + sum(map(_size, operation.operands[2:]))


EMBEDDING_PASSES = 12
"""Passes over the gradient in the backward of an embedding; fitted to the jobs of NeuSight."""
_OF_SEVERAL_KERNELS = (
    *("linalg", "svd", "fft", "sort", "topk", "cumsum", "cumprod", "nms", "unique", "nonzero", "multinomial"),
    *("pack_padded", "grid_sampler", "upsample", "ctc_loss", "cdist", "histc", "bincount"),
)
_SCALED = "_scaled_mm"
"""A product of matrices with 8 bits; its scales are the operands behind them."""
_SOLVED = (
    *("_linalg_svd", "_linalg_eig", "linalg_eig", "_linalg_solve", "_linalg_det", "_linalg_slogdet"),
    *("linalg_qr", "linalg_cholesky", "linalg_ldl", "linalg_lu", "linalg_inv", "linalg_lstsq"),
    *("linalg_householder_product", "geqrf", "ormqr", "cholesky", "lu_", "triangular_solve", "lobpcg"),
)
"""What the names of operations begin with that cuSOLVER computes, in steps that no size tells."""
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "_scaled_mm", "_int_mm", "_addmm_activation"}
_ATTENTIONS = ("flash", "efficient", "cudnn", "flex")
_KIND = {
    **dict.fromkeys(("_softmax", "_log_softmax", "softmax", "log_softmax"), "softmax"),
    "_softmax_backward_data": "softmax_backward",
    "_log_softmax_backward_data": "softmax_backward",
    "_fused_rms_norm": "layer_norm",
    "_fused_rms_norm_backward": "layer_norm_backward",
    "native_layer_norm": "layer_norm",
    "native_layer_norm_backward": "layer_norm_backward",
    "native_group_norm": "layer_norm",
    "native_group_norm_backward": "layer_norm_backward",
    "native_batch_norm": "batch_norm",
    "native_batch_norm_backward": "batch_norm_backward",
    "_native_batch_norm_legit": "batch_norm",
    "_batch_norm_with_update": "batch_norm",
    "cudnn_batch_norm": "batch_norm",
    "cudnn_batch_norm_backward": "batch_norm_backward",
    "batch_norm_backward": "batch_norm_backward",
    "native_dropout": "dropout",
    "linalg_vector_norm": "reduction",
    "embedding": "gather",
    "index_select": "gather",
    "index": "gather",
    "gather": "gather",
    "take": "gather",
    "embedding_dense_backward": "embedding_backward",
    "index_put": "scatter",
    "_index_put_impl": "scatter",
    "index_add": "scatter",
    "scatter": "scatter",
    "scatter_add": "scatter",
    "nll_loss_forward": "pointwise",
    "nll_loss_backward": "pointwise",
    "nll_loss2d_forward": "pointwise",
    "nll_loss2d_backward": "pointwise",
    **dict.fromkeys(("copy", "clone", "_to_copy", "contiguous"), "copy"),
    **dict.fromkeys(("fill", "zero", "zeros", "zeros_like", "new_zeros"), "fill"),
    **dict.fromkeys(("ones_like", "new_ones", "full_like", "new_full"), "fill"),
    **dict.fromkeys(("normal", "uniform", "bernoulli", "random", "rand_like", "randn_like"), "fill"),
}
"""By the name of an operation, without its overload and the ``_`` of one in place."""
_PASSES: dict[str, Callable[[Operation], float]] = {
    **dict.fromkeys((name for name, kind in _KIND.items() if kind == "gather"), _gathered),
    **dict.fromkeys((name for name, kind in _KIND.items() if kind == "scatter"), _scattered),
    **dict.fromkeys((name for name in _KIND if "norm" in name and "backward" in name), _norm_gradient),
    **dict.fromkeys((name for name, kind in _KIND.items() if kind == "batch_norm"), _norm_of_channels),
    "native_group_norm": _norm_of_channels,
    **dict.fromkeys((name for name in _KIND if name.startswith("nll")), _losses),
    **dict.fromkeys((name for name, kind in _KIND.items() if kind == "fill"), _results),
    "embedding_dense_backward": _embedding_gradient,
    "_softmax_backward_data": _softmax_gradient,
}
"""Bytes of operations that are not those of their operands and results, each once."""
