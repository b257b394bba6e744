"""Calls of cuBLAS, cuDNN, attention and other layers, large enough to show workspaces: for operators.py."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from call_makers import CUDA, Make, Run, call, integers, module_call, named, random, with_backward
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


def layer_calls() -> dict[str, Make]:
    """Return the calls by name, which ends in the size."""
    found: dict[str, Make] = {}
    for part in (_products, _attention, _convolutions, _recurrent, _norms, _losses, _others, _optimizers):
        found |= dict(part())
    return found


def _products() -> Iterator[tuple[str, Make]]:
    for dtype, n in product((FLOAT32, torch.float64, BFLOAT16, FLOAT16), (256, 1000, 4096)):
        square = partial(random, n, n, dtype=dtype, grad=True)
        yield named("matmul", dtype, n), call(torch.matmul, square, square)
        yield (
            named("addmm", dtype, n),
            call(torch.addmm, partial(random, n, dtype=dtype, grad=True), square, square),
        )
        yield named("mv", dtype, n), call(torch.mv, square, partial(random, n, dtype=dtype, grad=True))
        batch = partial(random, 32, n // 4, 64, dtype=dtype, grad=True)
        yield (
            named("bmm", dtype, f"32x{n // 4}x64"),
            call(lambda a, b: torch.bmm(a, b.mT), batch, batch),
        )
        linear = partial(nn.Linear, n, 2 * n, device=CUDA, dtype=dtype)
        yield named("linear", dtype, n), module_call(linear, partial(random, 64, n, dtype=dtype, grad=True))
    for p in (1.0, 2.0):
        points = partial(random, 1000, 64, grad=True)
        yield named("cdist", p, FLOAT32, "1000x64"), call(partial(torch.cdist, p=p), points, points)
    yield (
        "einsum float32 8x64x128",
        call(partial(torch.einsum, "bij,bkj->bik"), *[partial(random, 8, 64, 128, grad=True)] * 2),
    )


def _attention() -> Iterator[tuple[str, Make]]:
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    for (name, backend), dtype, causal in product(
        backends.items(), (BFLOAT16, FLOAT16, FLOAT32), (False, True)
    ):
        if dtype is FLOAT32 and name in ("flash", "cudnn"):
            continue
        for length, width in ((1024, 64), (1000, 128), (333, 96)):
            heads = partial(random, 4, 8, length, width, dtype=dtype, grad=True)
            size = f"4x8x{length}x{width}" + " causal" * causal
            yield (
                named("attention", name, dtype, size),
                call(partial(_attend, backend, causal), heads, heads, heads),
            )


def _attend(backend: SDPBackend, causal: bool, *heads: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(*heads, is_causal=causal)


def _convolutions() -> Iterator[tuple[str, Make]]:
    layers: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
        "conv1d": (partial(nn.Conv1d, 64, 128, 5, padding=2), (16, 64, 1000)),
        "conv2d 3x3": (partial(nn.Conv2d, 64, 128, 3, padding=1), (16, 64, 56, 56)),
        "conv2d 1x1": (partial(nn.Conv2d, 256, 64, 1, bias=False), (16, 256, 56, 56)),
        "conv2d 7x7 stride": (partial(nn.Conv2d, 3, 64, 7, stride=2, padding=3), (16, 3, 224, 224)),
        "conv2d dilated": (partial(nn.Conv2d, 64, 64, 3, padding=2, dilation=2), (8, 64, 56, 56)),
        "conv2d grouped": (partial(nn.Conv2d, 64, 64, 3, padding=1, groups=8), (8, 64, 56, 56)),
        "conv2d depthwise": (partial(nn.Conv2d, 64, 64, 3, padding=1, groups=64), (8, 64, 56, 56)),
        "conv3d": (partial(nn.Conv3d, 16, 32, 3, padding=1), (2, 16, 16, 56, 56)),
        "conv_transpose2d": (partial(nn.ConvTranspose2d, 64, 32, 4, stride=2, padding=1), (8, 64, 28, 28)),
        "conv_transpose3d": (partial(nn.ConvTranspose3d, 16, 8, 2, stride=2), (2, 16, 8, 28, 28)),
    }
    kinds = {"float32": FLOAT32, "tf32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}
    for (name, (layer, shape)), (kind, dtype), last in product(layers.items(), kinds.items(), (False, True)):
        if last and name == "conv1d":
            continue
        size = "x".join(map(str, shape)) + " channels_last" * last
        yield named(name, kind, size), partial(_convolution, layer, shape, (kind == "tf32", dtype, last))


def _convolution(
    layer: Callable[..., nn.Module], shape: tuple[int, ...], kind: tuple[bool, torch.dtype, bool]
) -> Run:
    tf32, dtype, last = kind
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = formats[len(shape)] if last else torch.contiguous_format
    module = layer(device=CUDA, dtype=dtype).to(memory_format=layout)
    image = random(*shape, dtype=dtype).to(memory_format=layout).requires_grad_()
    run = with_backward(lambda: module(image), [*module.parameters(), image])

    def with_flags() -> object:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
            return run()

    return with_flags


def _recurrent() -> Iterator[tuple[str, Make]]:
    for layer, dtype, (layers, dropout, both) in product(
        (nn.RNN, nn.LSTM, nn.GRU), (FLOAT32, FLOAT16, BFLOAT16), ((1, 0.0, False), (2, 0.5, True))
    ):
        build = partial(
            layer, 128, 256, layers, dropout=dropout, bidirectional=both, device=CUDA, dtype=dtype
        )
        size = f"35x16x128 layers {layers}" + " bidirectional" * both
        inputs = partial(random, 35, 16, 128, dtype=dtype, grad=True)
        yield named(layer.__name__, dtype, size), module_call(build, inputs)


def _norms() -> Iterator[tuple[str, Make]]:
    image, text = (16, 64, 56, 56), (8, 512, 768)
    for dtype in (FLOAT32, BFLOAT16, FLOAT16):
        for name, layer, shape in (
            ("batch_norm", partial(nn.BatchNorm2d, 64), image),
            ("batch_norm 1d", partial(nn.BatchNorm1d, 768), (4096, 768)),
            ("group_norm", partial(nn.GroupNorm, 8, 64), image),
            ("instance_norm", partial(nn.InstanceNorm2d, 64, affine=True), image),
            ("layer_norm", partial(nn.LayerNorm, 768), text),
            ("rms_norm", partial(nn.RMSNorm, 768), text),
        ):
            build = partial(layer, device=CUDA, dtype=dtype)
            inputs = partial(random, *shape, dtype=dtype, grad=True)
            yield named(name, dtype, "x".join(map(str, shape))), module_call(build, inputs)


def _losses() -> Iterator[tuple[str, Make]]:
    for dtype in (FLOAT32, BFLOAT16):
        for name, options in (("", {}), ("label_smoothing", {"label_smoothing": 0.1})):
            scores = partial(random, 2048, 30_000, dtype=dtype, grad=True)
            function = partial(functional.cross_entropy, **options)
            yield (
                named("cross_entropy", name, dtype, "2048x30000"),
                call(function, scores, partial(integers, 30_000, 2048)),
            )
        yield named("softmax", dtype, "2048x30000"), call(partial(torch.softmax, dim=-1), scores)
    for length in (100, 1000):
        yield named("ctc_loss", FLOAT32, f"{length}x16x40"), partial(_ctc, length, torch.long)
    yield "ctc_loss cudnn float32 100x16x40", partial(_ctc, 100, torch.int32)


def _ctc(length: int, kind: torch.dtype) -> Run:
    """Targets of type int32 on the CPU select cuDNN's implementation."""
    scores = random(length, 16, 40, grad=True)
    device = "cpu" if kind is torch.int32 else CUDA
    targets = torch.randint(1, 40, (16 * 20,), dtype=kind, device=device)
    lengths = torch.full((16,), length, dtype=kind), torch.full((16,), 20, dtype=kind)
    return with_backward(lambda: functional.ctc_loss(scores.log_softmax(2), targets, *lengths), [scores])


def _others() -> Iterator[tuple[str, Make]]:
    for dtype in (FLOAT32, FLOAT16):
        image = partial(random, 8, 64, 56, 56, dtype=dtype, grad=True)
        grid = partial(random, 8, 40, 40, 2, dtype=dtype, grad=True)
        yield (
            named("grid_sample", dtype, "8x64x56x56"),
            call(partial(functional.grid_sample, align_corners=False), image, grid),
        )
        for mode in ("nearest", "bilinear", "bicubic", "area"):
            yield (
                named("interpolate", mode, dtype, "8x64x56x56"),
                call(partial(functional.interpolate, scale_factor=2.0, mode=mode), image),
            )
        for name, pooling in (
            ("max_pool2d", partial(functional.max_pool2d, kernel_size=3, stride=2)),
            ("avg_pool2d", partial(functional.avg_pool2d, kernel_size=3, stride=2)),
            ("adaptive_avg_pool2d", partial(functional.adaptive_avg_pool2d, output_size=7)),
            ("dropout", functional.dropout),
            ("unfold", partial(functional.unfold, kernel_size=3)),
            ("gelu", functional.gelu),
        ):
            yield named(name, dtype, "8x64x56x56"), call(pooling, image)


def _optimizers() -> Iterator[tuple[str, Make]]:
    for name, optimizer in (("AdamW", torch.optim.AdamW), ("SGD", partial(torch.optim.SGD, momentum=0.9))):
        for way in ("foreach", "fused", "for loop"):
            yield named(name, way, FLOAT32, "20x512x512"), partial(_optimizer_step, optimizer, way)
    yield "clip_grad_norm_ float32 20x512x512", _clipping


def _parameters() -> list[torch.Tensor]:
    made = [random(512, 512, grad=True) for _ in range(20)]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def _optimizer_step(optimizer: Callable[..., torch.optim.Optimizer], way: str) -> Run:
    options = {"for loop": {"foreach": False}}.get(way) or {way: True}
    made = optimizer(_parameters(), lr=0.01, **options)
    return lambda: (made.step(), made.step())


def _clipping() -> Run:
    parameters = _parameters()
    return lambda: nn.utils.clip_grad_norm_(parameters, 1.0)
