"""The kernels that ``memfit doctor --time`` times on a card: some of each kind that memfit predicts.

Tensors are larger than caches where traffic decides, as those of a step are by the time that they are read
again. Each kernel makes what it reads when its turn comes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Run = Callable[[], Any]
_PRODUCTS = ((4096, 4096, 4096), (8192, 3072, 768), (8192, 768, 3072), (2048, 16384, 2048), (512, 4096, 4096))
_ATTENTIONS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
_CONVOLUTIONS = ((64, 64, 56, 3), (256, 64, 56, 1), (256, 256, 14, 3), (512, 2048, 7, 1))
"""Channels in and out, size of the images, and of the window: layers of a ResNet-50."""


@dataclass(frozen=True)
class KernelToTime:
    """Something to time."""

    what: str
    make: Callable[[], Run]
    """Makes what it reads, and returns it."""
    tf32: bool = False


@dataclass(frozen=True)
class Kernels:
    """The kernels that are timed on a device.

    Args:
        device: where.
        halves: its dtypes of 16 bits.
        tf32: whether it computes products in TF32.
        shrink: by how much tensors have fewer rows, for tests.
    """

    device: torch.device
    halves: tuple[torch.dtype, ...]
    tf32: bool
    shrink: int = 1

    def all(self) -> Iterator[KernelToTime]:
        """Yield all, products first."""
        yield from self._products()
        for dtype in (*self.halves, torch.float32):
            yield from self._attentions(dtype)
            yield from self._convolutions(dtype)
        for dtype in (*self.halves[:1], torch.float32):
            yield from self._others(dtype)
        yield from self._optimizers()

    def _products(self) -> Iterator[KernelToTime]:
        for dtype in (*self.halves, torch.float32):
            for m, n, k in _PRODUCTS:

                def make(m: int = m, n: int = n, k: int = k, dtype: torch.dtype = dtype) -> Run:
                    a, b = (self._tensor(rows, k, dtype=dtype).detach() for rows in (m, n))
                    return partial(torch.mm, a, b.t())

                what = f"product of {m} x {n} x {k}, {_name(dtype)}"
                yield KernelToTime(what, make)
                if dtype is torch.float32 and self.tf32:
                    yield KernelToTime(what.replace("float32", "tf32"), make, tf32=True)

    def _attentions(self, dtype: torch.dtype) -> Iterator[KernelToTime]:
        for backend in _ATTENTIONS if dtype in self.halves else (SDPBackend.EFFICIENT_ATTENTION,):
            for batch, length, width in ((16, 1024, 64), (4, 2048, 128)):
                sizes = (
                    16 * batch,
                    1,
                    length,
                    width,
                )  # sequences of one head: as many of 16 heads would take as long

                def attend(
                    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: SDPBackend = backend
                ) -> torch.Tensor:
                    with sdpa_kernel(backend):
                        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

                what = f"attention by {backend.name}, {length} x {width}, {_name(dtype)}"
                yield from _both_ways(what, attend, *[partial(self._tensor, *sizes, dtype=dtype)] * 3)

    def _convolutions(self, dtype: torch.dtype) -> Iterator[KernelToTime]:
        for order in (torch.contiguous_format, torch.channels_last):
            for inside, outside, size, window in _CONVOLUTIONS:

                def given(*shape: int, order: torch.memory_format = order) -> torch.Tensor:
                    made = torch.randn(shape, device=self.device, dtype=dtype)
                    return made.contiguous(memory_format=order).requires_grad_()

                name = "channels last" if order is torch.channels_last else "channels first"
                images = partial(given, max(64 // self.shrink, 1), inside, size, size)
                weight = partial(given, outside, inside, window, window)
                what = f"convolution of {inside} to {outside} x {size}, {name}, {_name(dtype)}"
                yield from _both_ways(what, partial(functional.conv2d, padding=window // 2), images, weight)

    def _others(self, dtype: torch.dtype) -> Iterator[KernelToTime]:
        name = _name(dtype)
        for rows, width in ((65536, 1024), (16384, 4096)):
            what = f"{rows} x {width}, {name}"
            x, ones = partial(self._tensor, rows, width, dtype=dtype), partial(self._ones, width, dtype=dtype)
            norm = partial(_layer_norm, width)
            yield from _both_ways(f"layer norm of {what}", norm, x, ones, ones)
            yield from _both_ways(f"softmax of {what}", partial(torch.softmax, dim=-1), x)
            yield from _both_ways(f"log softmax of {what}", partial(torch.log_softmax, dim=-1), x)
            yield from _both_ways(f"GELU of {what}", functional.gelu, x)
            yield from _both_ways(f"dropout of {what}", partial(functional.dropout, p=0.1), x)
            for of, function, count in (
                ("sum of two", torch.add, 2),
                ("sum over rows", partial(torch.sum, dim=0), 1),
                ("copy", torch.clone, 1),
                ("copy in another order", _swapped, 1),
                ("zeros", torch.zero_, 1),
            ):
                yield _forward(f"{of}, {what}", function, *[x] * count)
        for channels, size in ((64, 56), (1024, 14)):
            images = partial(self._tensor, 256, channels, size, size, dtype=dtype)
            ones = partial(self._ones, channels, dtype=torch.float32)
            what = f"batch norm of {channels} x {size} x {size}, {name}"
            yield from _both_ways(what, _batch_norm, images, ones, ones)
        for vocabulary, width in ((50304, 768), (32000, 4096)):
            known, count = vocabulary // self.shrink, (1 << 26) // width // self.shrink
            indices = torch.randint(known, (count,), device=self.device)
            table = partial(self._tensor, vocabulary, width, dtype=dtype)
            what = f"embedding of {vocabulary} x {width}, {name}"
            yield from _both_ways(what, partial(functional.embedding, indices), table)

    def _optimizers(self) -> Iterator[KernelToTime]:
        for way in ("fused", "foreach"):

            def make(way: str = way) -> Run:
                tensors = [self._tensor(4096, 1024, dtype=torch.float32) for _ in range(16)]
                for each in tensors:
                    each.grad = torch.ones_like(each)
                optimizer = torch.optim.AdamW(tensors, **{way: True})  # type: ignore[arg-type]
                optimizer.step()  # makes its state
                return optimizer.step

            yield KernelToTime(f"AdamW of 16 x 4096 x 1024, {way}", make)

    def _tensor(self, rows: int, *others: int, dtype: torch.dtype) -> torch.Tensor:
        shape = max(rows // self.shrink, 1), *others
        return torch.randn(shape, device=self.device, dtype=dtype).requires_grad_()

    def _ones(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.ones(size, device=self.device, dtype=dtype, requires_grad=True)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layer_norm(width: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, (width,), weight, bias)


def _batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.batch_norm(x, None, None, weight, bias, training=True)


def _swapped(x: torch.Tensor) -> torch.Tensor:
    """Copy (positions, heads x width) to (heads, positions, width), as before an attention."""
    return x.reshape(len(x), 16, -1).transpose(0, 1).contiguous()


def _forward(
    what: str, function: Callable[..., torch.Tensor], *given: Callable[[], torch.Tensor]
) -> KernelToTime:
    return KernelToTime(what, lambda: partial(function, *(make().detach() for make in given)))


def _both_ways(
    what: str, function: Callable[..., torch.Tensor], *given: Callable[[], torch.Tensor]
) -> Iterator[KernelToTime]:
    """Yield a forward, and the backward of one."""

    def backward() -> Run:
        tensors = [make() for make in given]
        out = function(*tensors)
        return partial(torch.autograd.grad, out, tensors, torch.ones_like(out), retain_graph=True)

    yield _forward(what, function, *given)
    yield KernelToTime(f"{what}, backward", backward)
