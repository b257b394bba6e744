"""Read public tables of convolutions in 16 bit, channels last and first: what was measured, and its seconds.

FOLDER has what ``[source]`` in kernel_times.toml names: ``code_snippet`` (``a100-c8cd883.json``, from
conv3d-channels-last/a100/res-c8cd883.json) and ``tvm_cutlass_eval`` (from its conv2d:
``cutlass_result_grad.csv``, ``resnet50_cutlass_profiler_result_fp16_fp32_accum.csv``, ``wgrad_n256.txt``).
"""

import ast
import json
import re
from pathlib import Path

from measured_kernels import Row, Rows, measured_device, read_csv

from memfit.records.step_operations import Operand, Operation
from memfit.timing.kernel_times import LONG, on_tensor_cores
from memfit.timing.kernel_work import KernelWork, work_of

CHANNELS = 128
"""Volumes with fewer are left out: their kernels are slow, and networks of images have few such layers."""
HALF, FLOAT = "float16", "float32"


def works(
    data: tuple[int, ...], weight: tuple[int, ...], out: tuple[int, ...], *, last: bool, made: str = HALF
) -> tuple[KernelWork, KernelWork]:
    """Return the work of a convolution of float16, and of its backward.

    Args:
        data: sizes of the images, channels second; so are those of the others.
        weight: sizes.
        out: sizes of the result.
        last: whether channels are last in memory.
        made: dtype of the result, and of the gradient of the images.
    """
    layout = "permuted" if last else ""
    fields = -1, -1, (), (), (), 0, 0, HALF, False, 0.0, 0
    images, window, result = (Operand(sizes, HALF, layout) for sizes in (data, weight, out))
    forward = Operation(
        "aten.convolution.default", *fields, operands=(images, window), results=(Operand(out, made, layout),)
    )
    backward = Operation(
        "aten.convolution_backward.default",
        *fields,
        operands=(result, images, window),
        results=(Operand(data, made, layout), window),
    )
    return on_tensor_cores(work_of(forward)), on_tensor_cores(work_of(backward))


def code_snippet(folder: Path, rows: Rows) -> None:
    """Convolutions of volumes in PyTorch, cuDNN 8.0, timed with the host: shorter ones are left out."""
    table = json.loads((folder / "a100-c8cd883.json").read_text(encoding="utf-8"))
    device = measured_device("A100-40GB")
    for key, times in table.items():
        if not key.startswith("("):
            continue
        n, c, side, k, window, pad, stride = ast.literal_eval(key)
        if min(c, k) < CHANNELS:
            continue
        end = (side + 2 * pad - window) // stride + 1
        sizes = (n, c, *[side] * 3), (k, c, *[window] * 3), (n, k, *[end] * 3)
        for layout in ("channels-last-3d", "contiguous"):
            forward, backward = works(*sizes, last=layout != "contiguous")
            for name, work, shortest in (("forward", forward, LONG), ("backward", backward, 2 * LONG)):
                seconds = times[f"{layout}-{name}"] / 1e3
                if seconds > shortest:
                    row = Row((work,), seconds, device, "code-snippet")
                    rows[f"{work.kind}_16", device.name].append(row)


def tvm_cutlass_eval(folder: Path, rows: Rows) -> None:
    """Layers of ResNet-50 on an RTX 3070, sums in float32: CUTLASS's fastest kernels, and cuDNN's of weights.

    cuDNN's other kernels summed in float16 there, twice as fast on such a card.
    """
    device = measured_device("RTX 3070")
    fastest: dict[tuple[int, ...], dict[str, float]] = {}
    sizes = ("n", "h", "w", "c", "k", "r", "s", "p", "q")
    for name in ("resnet50_cutlass_profiler_result_fp16_fp32_accum.csv", "cutlass_result_grad.csv"):
        for row in read_csv(folder / name):
            if row["Disposition"] == "passed":
                times = fastest.setdefault(tuple(int(row[each]) for each in sizes), {})
                kind, seconds = row["conv_kind"], float(row["Runtime"]) / 1e3
                times[kind] = min(seconds, times.get(kind, seconds))
    by_weight = {}
    for line in (folder / "wgrad_n256.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("{"):
            layer, _, cudnn = re.split(r" , ", line)
            by_weight[tuple(ast.literal_eval(layer)[each] for each in "nhwckrs")] = float(cudnn) / 1e3
    for layer, times in fastest.items():
        n, h, w, c, k, r, s, p, q = layer
        forward, backward = works((n, c, h, w), (k, c, r, s), (n, k, p, q), last=True, made=FLOAT)
        for work, seconds in ((forward, times["fprop"]), (backward, times["dgrad"] + by_weight[layer[:7]])):
            rows[f"{work.kind}_16", device.name].append(Row((work,), seconds, device, "tvm-cutlass-eval"))


READERS = {"code_snippet": (code_snippet,), "tvm_cutlass_eval": (tvm_cutlass_eval,)}
