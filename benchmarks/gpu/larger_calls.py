"""Calls whose workspaces NVIDIA's libraries size, large enough for them to show: for operators.py.

PyTorch's own samples are so small that a workspace disappears when the allocator rounds to 512 bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from call_makers import CUDA, Make, Run, call, integers, module_call, named, random
from torch import linalg, nn

FLOAT32, FLOAT64 = torch.float32, torch.float64


def library_calls() -> dict[str, Make]:
    """Return the calls of cuSOLVER, cuFFT, thrust, cub and cuSPARSE by name, which ends in the size."""
    found: dict[str, Make] = {}
    for part in (_decompositions, _transforms, _sorts, _scatters, _sparse):
        found |= dict(part())
    return found


def _decompositions() -> Iterator[tuple[str, Make]]:
    functions: dict[str, tuple[str, Callable[..., Any]]] = {
        "svd": ("general", linalg.svd),
        **{
            f"svd {driver}": ("general", partial(linalg.svd, full_matrices=False, driver=driver))
            for driver in ("gesvd", "gesvdj", "gesvda")
        },
        "svdvals": ("general", linalg.svdvals),
        "eigh": ("symmetric", linalg.eigh),
        "eigvalsh": ("symmetric", linalg.eigvalsh),
        "eig": ("general", linalg.eig),
        "qr": ("general", linalg.qr),
        "cholesky": ("symmetric", linalg.cholesky),
        "cholesky_inverse": ("symmetric", torch.cholesky_inverse),
        "lu_factor": ("general", linalg.lu_factor),
        "ldl_factor": ("symmetric", linalg.ldl_factor),
        "inv": ("general", linalg.inv),
        "det": ("general", linalg.det),
        "solve": ("general", lambda a: linalg.solve(a, a[..., :8].contiguous())),
        "lstsq": ("general", lambda a: linalg.lstsq(a, a[..., :8].contiguous())),
        "householder_product": ("general", lambda a: linalg.householder_product(a, a[..., 0].contiguous())),
    }
    shapes = ((256, 256), (1024, 1024), (32, 64, 64), (1024, 256))
    for (name, (kind, function)), shape, dtype in product(functions.items(), shapes, (FLOAT32, FLOAT64)):
        if shape[-1] != shape[-2] and name.split()[0] not in ("svd", "qr", "lstsq"):
            continue
        matrix = partial(_matrix, shape, dtype, symmetric=kind == "symmetric")
        yield named("linalg", name, dtype, "x".join(map(str, shape))), call(function, matrix)
    for name in ("svd", "eigh", "qr", "cholesky", "inv", "solve", "det"):
        kind, function = functions[name]
        matrix = partial(_matrix, (256, 256), FLOAT32, symmetric=kind == "symmetric", grad=True)
        reduced = partial(function, full_matrices=False) if name == "svd" else function
        yield named("linalg", name, FLOAT32, "256x256 with backward"), call(reduced, matrix)


def _matrix(shape: Sequence[int], dtype: torch.dtype, *, symmetric: bool, grad: bool = False) -> torch.Tensor:
    """Return a well-conditioned matrix, or a batch of them."""
    made = random(*shape, dtype=dtype)
    if symmetric:
        made = made @ made.mT
    made.diagonal(dim1=-2, dim2=-1).add_(shape[-1])
    return made.requires_grad_(grad)


def _transforms() -> Iterator[tuple[str, Make]]:
    real, spectrum = FLOAT32, torch.complex64
    for n in (1 << 16, 3**10, 65_537, 100_000):
        for name, dtype in product(("fft", "rfft", "irfft", "hfft"), (real, FLOAT64)):
            complex_input = name in ("irfft", "hfft")
            kind = {real: spectrum, FLOAT64: torch.complex128}[dtype] if complex_input else dtype
            yield (
                named("fft", name, kind, f"8x{n}"),
                call(getattr(torch.fft, name), partial(random, 8, n, dtype=kind)),
            )
    for n, name in product((256, 243, 251), ("fft2", "rfft2", "irfft2", "fftn", "rfftn")):
        shape = (32, n, n) if name not in {"fftn", "rfftn"} else (n // 4, n // 4, n)
        kind = spectrum if name in ("fft2", "irfft2", "fftn") else real
        yield (
            named("fft", name, kind, "x".join(map(str, shape))),
            call(getattr(torch.fft, name), partial(random, *shape, dtype=kind)),
        )
    yield (
        "fft fft2 float32 8x128x128 with backward",
        call(torch.fft.fft2, partial(random, 8, 128, 128, grad=True)),
    )
    yield "fft stft float32 4x100000", call(_stft, partial(random, 4, 100_000))


def _stft(signal: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(512, device=CUDA)
    return torch.stft(signal, 512, hop_length=128, window=window, return_complex=True)


def _sorts() -> Iterator[tuple[str, Make]]:
    functions: dict[str, Callable[..., Any]] = {
        "sort": torch.sort,
        "sort stable": partial(torch.sort, stable=True),
        "argsort": torch.argsort,
        "msort": torch.msort,
        "topk": partial(torch.topk, k=100),
        "kthvalue": partial(torch.kthvalue, k=10),
        "cumsum": partial(torch.cumsum, dim=0),
        "cumprod": partial(torch.cumprod, dim=0),
        "cummax": partial(torch.cummax, dim=0),
        "logcumsumexp": partial(torch.logcumsumexp, dim=0),
        "sum": torch.sum,
        "max": torch.max,
        "argmax": torch.argmax,
        "norm": torch.norm,
        "var": torch.var,
        "median": torch.median,
        "mode": torch.mode,
        "histc": torch.histc,
        "unique": torch.unique,
        "unique with counts": partial(torch.unique, return_inverse=True, return_counts=True),
        "unique_consecutive": torch.unique_consecutive,
        "nonzero": torch.nonzero,
        "masked_select": lambda x: torch.masked_select(x, x > 0),
        "multinomial": lambda x: torch.multinomial(x[: 1 << 24].abs(), 10, replacement=True),
        "multinomial without replacement": lambda x: torch.multinomial(x[: 1 << 24].abs(), 10),
    }
    for (name, function), n in product(functions.items(), (1000, 100_000, 10_000_000)):
        yield named(name, FLOAT32, n), call(function, partial(random, n))
    for name, n in product(("sort", "unique", "cumsum"), (1000, 100_000, 10_000_000)):
        yield named(name, torch.int64, n), call(functions[name], partial(integers, 1000, n))
    for name in ("sort", "topk", "cumsum", "median", "mode"):
        rows = {"median": partial(torch.median, dim=1), "cumsum": partial(torch.cumsum, dim=1)}
        function = rows.get(name, functions[name])
        for shape in ((64, 10_000), (10_000, 200), (4, 500_000)):
            if name != "mode" or shape != (4, 500_000):
                yield named(name, FLOAT32, "x".join(map(str, shape))), call(function, partial(random, *shape))
    for n in (1000, 100_000, 10_000_000):
        yield named("bincount", torch.int64, n), call(torch.bincount, partial(integers, 1000, n))
        yield named("randperm", torch.int64, n), call(partial(torch.randperm, n, device=CUDA))


def _scatters() -> Iterator[tuple[str, Make]]:
    for n in (1000, 100_000, 10_000_000):
        indices = partial(integers, 1000, n)
        yield named("index_put accumulate", FLOAT32, n), call(_index_put, indices)
        yield named("scatter_add", FLOAT32, n), call(_scatter_add, indices)
        yield named("index_add", FLOAT32, n), call(_index_add, indices)
        yield (
            named("indexing backward", FLOAT32, n),
            call(lambda found, table: table[found], indices, partial(random, 1000, 4, grad=True)),
        )
    for tokens, padding in product((1000, 100_000), (None, 0)):
        embedding = partial(nn.Embedding, 30_000, 256, padding_idx=padding, device=CUDA)
        name = named("embedding", FLOAT32, tokens, f"padding {padding}")
        yield name, module_call(embedding, partial(integers, 30_000, tokens))
    scaled = partial(nn.Embedding, 30_000, 256, scale_grad_by_freq=True, device=CUDA)
    yield (
        "embedding scale_grad_by_freq float32 100000",
        module_call(scaled, partial(integers, 30_000, 100_000)),
    )
    for mode in ("sum", "mean", "max"):
        bag = partial(nn.EmbeddingBag, 30_000, 64, mode=mode, device=CUDA)
        yield (
            named("embedding_bag", mode, FLOAT32, "512x40"),
            module_call(bag, partial(integers, 30_000, 512, 40)),
        )


def _index_put(indices: torch.Tensor) -> torch.Tensor:
    ones = torch.ones(len(indices), device=CUDA)
    return torch.zeros(1000, device=CUDA).index_put((indices,), ones, accumulate=True)


def _scatter_add(indices: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1000, device=CUDA).scatter_add(0, indices, torch.ones(len(indices), device=CUDA))


def _index_add(indices: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1000, device=CUDA).index_add(0, indices, torch.ones(len(indices), device=CUDA))


def _sparse() -> Iterator[tuple[str, Make]]:
    for layout, dtype, n in product(("csr", "coo", "bsr"), (FLOAT32, FLOAT64), (1000, 20_000)):
        size = (n, dtype, layout)
        yield named("sparse", layout, "@ dense", dtype, n), _sparse_call(size, torch.matmul, (n, 64))
        if layout != "bsr":
            yield named("sparse", layout, "@ vector", dtype, n), _sparse_call(size, torch.mv, (n,))
        if layout == "csr":
            yield named("sparse", layout, "@ itself", dtype, n), _sparse_call(size, lambda a, _: a @ a, (1,))
            yield named("sparse", layout, "+ itself", dtype, n), _sparse_call(size, lambda a, _: a + a, (1,))
            yield named("sparse", layout, "sampled", dtype, n), _sparse_call(size, _sampled, (n, 32))
            yield (
                named("sparse", layout, "to coo", dtype, n),
                _sparse_call(size, lambda a, _: a.to_sparse(), (1,)),
            )
        if layout == "coo":
            yield named("sparse", layout, "coalesce", dtype, n), _sparse_call(size, _coalesced, (1,))
            yield (
                named("sparse", layout, "to csr", dtype, n),
                _sparse_call(size, lambda a, _: a.to_sparse_csr(), (1,)),
            )


def _sparse_call(
    size: tuple[int, torch.dtype, str], function: Callable[..., Any], shape: Sequence[int]
) -> Make:
    """Return a call of a matrix with 16 entries a row and a dense tensor; the entries' places are fixed."""
    n, dtype, layout = size

    def make() -> Run:
        rows = torch.arange(n, device=CUDA).repeat_interleave(16, output_size=16 * n)
        columns = torch.arange(16, device=CUDA).repeat(n) * (n // 16)
        if layout == "coo":
            values = random(16 * n, dtype=dtype)
            matrix = torch.sparse_coo_tensor(torch.stack([rows, columns]), values, (n, n), is_coalesced=True)
        elif layout == "csr":
            matrix = torch.sparse_csr_tensor(
                torch.arange(n + 1, device=CUDA) * 16, columns, random(16 * n, dtype=dtype), (n, n)
            )
        else:
            matrix = torch.sparse_bsr_tensor(
                torch.arange(n // 4 + 1, device=CUDA),
                torch.arange(n // 4, device=CUDA),
                random(n // 4, 4, 4, dtype=dtype),
                (n, n),
            )
        dense = random(*shape, dtype=dtype)
        return lambda: function(matrix, dense)

    return make


def _sampled(matrix: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    return torch.sparse.sampled_addmm(matrix, dense, dense.mT)


def _coalesced(matrix: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(matrix.indices(), matrix.values(), matrix.shape).coalesce()
