"""Read public tables of measured kernels: what each row measured, on which card, and its seconds.

FOLDER has what ``[source]`` in kernel_times.toml names: ``aiconfigurator`` (``gemm_CARD.parquet``,
``context_attention_CARD.parquet`` and ``nccl_CARD.parquet``), ``neusight`` (``test_*.csv``; ``conv/*.csv``
from train/collect/conv; ``jobs/CARD__JOB.csv`` from label), ``estimate_train_time`` (``*_fp16.csv``),
``simumax`` (``*.json``), ``deepbench`` (``DeepBench_NV_*.xlsx`` from results/train); what is not there, not.
"""

import ast
import csv
import json
import math
import re
import sys
import xml.etree.ElementTree as ET
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from memfit.devices import Device
from memfit.records.step_operations import Operand, Operation
from memfit.timing.kernel_times import LONG, measured_device
from memfit.timing.kernel_work import EMBEDDING_PASSES, KernelWork, work_of

FEWEST = 6
"""Rows of a kind on a card; fewer are left out."""
ROWS_OF_PRODUCT, KEYS, WIDTH, ROW = 64, 512, 256, 8192
"""What tables have and training does not is left out: products of fewer rows, attention over fewer keys or
with wider heads, and longer rows of a norm or a softmax."""
HOST, SHORT, NETWORK = 8e-6, 1e-5, 1e10
"""Seconds that NeuSight's times have of the host, and below which a kernel inside of a job is left out; FLOPs
of the smallest convolution."""
AI_CARDS = {
    "a100_sxm": "A100-80GB",
    "h100_sxm": "H100-80GB",
    "h200_sxm": "H200",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTX PRO 6000",
    "b200_sxm": "B200",
}
NEUSIGHT = {  # the table's card, and where this one differs from it: bandwidth of PCIe cards, clock
    "NVIDIA A100 80GB PCIe": ("A100-80GB", 1.935e12, 1.0),
    "NVIDIA A100-PCIE-40GB": ("A100-40GB", 1.555e12, 1.0),
    "NVIDIA H100 80GB HBM3": ("H100-80GB", 3.352e12, 1.0),
    "NVIDIA L4": ("L4", 0.300e12, 1.0),
    "Tesla T4": ("T4", 0.320e12, 1.0),
    "Tesla V100-PCIE-32GB": ("V100-32GB", 0.898e12, 1380 / 1530),
}
ETT = {"Perlmutter_NVIDIAA100-SXM4-80GB": "A100-80GB", "Vista_NVIDIAGH200120GB": "GH200"}


@dataclass(frozen=True)
class Row:
    """Kernels that were measured together."""

    works: tuple[KernelWork, ...]
    seconds: float
    device: Device
    source: str
    warm: bool = False
    """Whether the card had worked for long, on random numbers, as in training."""


Rows = dict[tuple[str, str], list[Row]]  # by kind and card


def matrix(dtype: str, batch: int, m: int, n: int, k: int) -> KernelWork:
    """Return the work of a matrix product."""
    size = 4 if dtype == "float32" else 2
    traffic = size * batch * (m * k + k * n + m * n)
    return KernelWork("product", dtype, traffic, 2.0 * batch * m * n * k, ((batch, m, n, k),))


def attention(kind: str, heads: int, keys: int, width: int, causal: bool, copied: int = 0) -> KernelWork:
    """Return the work of an attention in 16 bit; ``copied``: bytes besides."""
    backward = kind.endswith("backward")
    traffic = 2 * heads * keys * width * (8 if backward else 4) + copied
    flops = (10.0 if backward else 4.0) * heads * keys * keys * width
    sizes = heads, keys, keys, width
    return KernelWork(kind, "bfloat16", traffic, flops, attention=sizes, causal=causal)


def aiconfigurator(folder: Path, rows: Rows) -> None:
    """Products and attention in bfloat16."""
    try:
        from pyarrow import parquet
    except ImportError:
        sys.exit(
            "Cannot read the parquet tables of aiconfigurator: pyarrow is missing. Run: pip install pyarrow"
        )
    for key, card in AI_CARDS.items():
        device = measured_device(card)
        for row in parquet.read_table(folder / f"gemm_{key}.parquet").to_pylist():
            if row["gemm_dtype"] == "bfloat16" and row["m"] >= ROWS_OF_PRODUCT:
                work = matrix("bfloat16", 1, row["m"], row["n"], row["k"])
                rows["product_16", card].append(Row((work,), row["latency"] / 1e3, device, "aiconfigurator"))
        for row in parquet.read_table(folder / f"context_attention_{key}.parquet").to_pylist():
            kernel = "flash" if re.search("fa2|vllm_flash_attn$", row["kernel_source"]) else "cudnn"
            plain = row["kv_cache_dtype"] == "bfloat16" and not row["step"] and not row.get("window_size")
            if plain and row["num_heads"] == row["num_key_value_heads"] and row["isl"] >= KEYS:
                heads, keys, width = row["batch_size"] * row["num_heads"], row["isl"], row["head_dim"]
                if (
                    width <= WIDTH
                    and "decode" not in row["kernel_source"]
                    and "triton" not in row["kernel_source"]
                ):
                    work = attention(kernel, heads, keys, width, True, 8 * heads * keys * width)
                    rows[kernel, card].append(Row((work,), row["latency"] / 1e3, device, "aiconfigurator"))


def collectives(folder: Path, rows: Rows) -> None:
    """Collectives of 16 bit on 2, 4 and 8 cards: cards do not add up integers in the switch."""
    from pyarrow import parquet

    for file in sorted(folder.glob("nccl_*.parquet")):
        card = AI_CARDS[file.stem.removeprefix("nccl_")]
        for row in parquet.read_table(file).to_pylist():
            if row["nccl_dtype"] == "half":
                kind, work = collective(row["op_name"], row["num_gpus"], row["message_size"])
                measured = Row((work,), row["latency"] / 1e3, measured_device(card), "aiconfigurator")
                rows[kind, card].append(measured)


def collective(name: str, ranks: int, elements: int) -> tuple[str, KernelWork]:
    """Return the kind and the work of a collective of nccl-tests: its sizes are those of the larger side."""
    operation = Operation(
        f"nccl.{name.replace('alltoall', 'all_to_all')}",
        *(-1, -1, (), (), (), 0, 0, "float16", False, 0.0, 0),
        operands=(Operand((elements,), "float16"),),
        ranks=ranks,
    )
    work = work_of(operation)
    return work.kind, work


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{(key or "").strip(): value for key, value in row.items()} for row in csv.DictReader(file)]


def neusight_card(name: str) -> tuple[str, Device] | None:
    """Return the card of a row, as it was."""
    if name not in NEUSIGHT:
        return None
    card, bandwidth, clock = NEUSIGHT[name]
    device = measured_device(card)
    rates = {dtype: rate * clock for dtype, rate in device.rates.items()}
    return card, replace(device, memory_bandwidth=bandwidth, rates=rates)


def neusight(folder: Path, rows: Rows) -> None:
    """Products, element-wise kernels, LayerNorm, softmax and convolutions in float32, timed with the host.

    An operation that launches nothing takes 8 us there, which is subtracted; rows below 100 us are left out.
    """
    passes = dict.fromkeys(("add", "mul", "div", "pow"), 3)
    for file in [*sorted(folder.glob("test_*.csv")), *sorted(folder.glob("conv/*.csv"))]:
        for row in read_csv(file):
            known, what = neusight_card(row["Device"]), row["OPName"]
            seconds = float(row["Latency"]) / 1e3 - HOST
            if known is None or seconds < LONG or file.name == "test_vec.csv" or int(row.get("H", 0)) > ROW:
                continue
            if what in {"linear", "bmm"}:
                batch, m, n, k = (int(row[key]) for key in "BMNK")
                work = matrix("float32", *((1, batch * m) if what == "linear" else (batch, m)), n, k)
                kind = "product_32"
            elif what == "conv":
                names = (
                    "B",
                    "Input_Channel",
                    "Output_Channel",
                    "Kernel_Szie",
                    "Input_Size",
                    "Stride",
                    "Padding",
                )
                b, c, o, window, size, stride, pad = (int(row[name]) for name in names)
                side = (size + 2 * pad - window) // stride + 1
                work = matrix("float32", 1, b * side * side, o, c * window * window)
                work = replace(work, traffic=4.0 * (b * c * size**2 + b * o * side**2 + o * c * window**2))
                kind = "convolution_32"
                if work.flops < NETWORK:
                    continue  # smaller than a network's, and of any numbers of channels
            else:
                kind = {"ln": "layer_norm", "softmax": "softmax"}.get(what, "pointwise")
                work = KernelWork(kind, "float32", 4.0 * int(row["B"]) * int(row["H"]) * passes.get(what, 2))
            rows[kind, known[0]].append(Row((work,), seconds, known[1], "neusight"))


def jobs(folder: Path, rows: Rows) -> None:
    """Operations inside of NeuSight's training jobs, forward and backward; whole jobs are not read.

    An operation that launches nothing, ``view``, says how much of each time is the host's.
    """
    for file in sorted(folder.glob("*.csv")):
        known = neusight_card(
            file.name.split("__")[0].replace("_", " ").replace("Tesla V100-PCIE 32GB", "Tesla V100-PCIE-32GB")
        )
        table = read_csv(file)
        if known is None or not table:
            continue
        host = median([float(row["fw_latency"]) for row in table if row["target"] == "view"] or [0.008])
        seen = set()
        for row in table:
            try:
                out, given = ast.literal_eval(row["output_shape"]), ast.literal_eval(row["input_shapes"])
            except (SyntaxError, ValueError):
                continue
            size = 4.0 * math.prod(out)
            for kind, traffic, column in job_kinds(row["target"], size, given):
                seconds = (float(row[column]) - host) / 1e3
                key = kind, traffic, row[column]
                if seconds > SHORT and size > 1 << 22 and key not in seen:
                    seen.add(key)
                    rows[kind, known[0]].append(
                        Row((KernelWork(kind, "float32", traffic),), seconds, known[1], "neusight")
                    )


def job_kinds(target: str, size: float, given: list[list[int]]) -> Iterator[tuple[str, float, str]]:
    """Yield the kind, the bytes and the column of what a row of a job measures."""
    forward, backward = "fw_latency", "bw_latency"
    if "softmax" in target:
        yield "softmax", 2 * size, forward
        yield "softmax_backward", 6 * size, backward
    elif re.search("ln_|LayerNorm|layer_norm", target):
        yield "layer_norm", 2 * size, forward
        yield "layer_norm_backward", 5 * size, backward
    elif "drop" in target:
        yield "dropout", 2.25 * size, forward
    elif target == "contiguous":
        yield "transpose", 2 * size, forward
    elif words := re.search("wte|word_embeddings|embed_tokens", target):
        table = (
            {"wte": 50257, "word_embeddings": 30522, "embed_tokens": 50272}[words[0]]
            * size
            / given[0][0]
            / given[0][1]
        )
        yield "gather", 2 * size, forward
        yield "embedding_backward", table + EMBEDDING_PASSES * size, backward
    elif re.search("function (gelu|truediv)|method tanh", target):
        yield "pointwise", 2 * size, forward
        yield "pointwise", (2 if "truediv" in target else 3) * size, backward
    elif re.search("function (add|mul)>", target) and given[1:] == given[:1]:
        yield "pointwise", 3 * size, forward


def estimate_train_time(folder: Path, rows: Rows) -> None:
    """Products, additions and FlashAttention 2 in float16. GH200's backward of attention is not usable."""
    linear = {"linear1": (1, 3), "linear2": (1, 1), "linear3": (1, 4), "linear4": (4, 1)}
    for key, card in ETT.items():
        device = measured_device(card)

        def add(
            kind: str, works: list[KernelWork], time: str, card: str = card, device: Device = device
        ) -> None:
            rows[kind, card].append(Row(tuple(works), float(time) / 1e6, device, "estimate-train-time"))

        for name in (*linear, "bmm", "res_add", "flash_atten"):
            for row in read_csv(folder / f"{key}_{name}_fp16.csv"):
                b, length, dim = (int(float(row[each])) for each in ("b", "l", "dim"))
                mp, h = int(float(row.get("mp", 1))), int(float(row.get("h", 1)))
                forward, backward = row["F_dur(us)"], row["B_dur(us)"]
                if name in linear:
                    k, n = (dim * each for each in linear[name])
                    k, n = (k // mp, n) if name in {"linear2", "linear4"} else (k, n // mp)
                    m = b * length
                    add("product_16", [matrix("float16", 1, m, n, k)], forward)
                    add(
                        "product_16", [matrix("float16", 1, m, k, n), matrix("float16", 1, n, k, m)], backward
                    )
                elif name == "bmm":
                    add("product_16", [matrix("float16", b * h // mp, length, dim // h, length)], forward)
                elif name == "flash_atten" and dim // h % 32:
                    continue  # widths that no kernel is made for, and few models have
                elif name == "flash_atten":
                    add("flash", [attention("flash", b * h // mp, length, dim // h, False)], forward)
                    if card != "GH200":
                        add(
                            "flash_backward",
                            [attention("flash_backward", b * h // mp, length, dim // h, False)],
                            backward,
                        )
                else:
                    add("pointwise", [KernelWork("pointwise", "float16", 6.0 * b * length * dim)], forward)


def simumax(folder: Path, rows: Rows) -> None:
    """Products of two cards and a B200's attention, as shares of rates; all scores of an attention count."""
    for name, card in (("a100_pcie", "A100-80GB PCIe"), ("b200_bf16", "B200")):
        table = json.loads((folder / f"{name}.json").read_text())["accelerator"]["op"]
        device, rate = measured_device(card), 1e12 * table["matmul"]["tflops"]
        for key, share in table["matmul"]["accurate_efficient_factor"].items():
            size = {each: int(number) for each, number in re.findall(r"(\w+)=(\d+)", key)}
            work = matrix("bfloat16", *(size[each] for each in "bmnk"))
            # 100 of each ran behind each other on random numbers: the power limit lowers the clock.
            row = Row((work,), work.flops / (rate * share), device, "simumax", warm=True)
            rows["product_16", card].append(row)
    for kind, name in (("cudnn", "sdp_fwd"), ("cudnn_backward", "sdp_bwd")):
        for key, share in table[name]["accurate_efficient_factor"].items():
            size = {each: int(number) for each, number in re.findall(r"(\w+)=(\d+)", key)}
            if size["qk_head_dim"] == size["v_head_dim"]:
                work = attention(
                    kind, size["batch"] * size["head_num"], size["seq_len"], size["v_head_dim"], True
                )
                rows[kind, "B200"].append(Row((work,), work.flops / (2250e12 * share), device, "simumax"))


def sheet(book: zipfile.ZipFile, number: int) -> Iterator[dict[str, str]]:
    """Yield the cells of each row of a spreadsheet, by column."""
    name = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
    shared = ET.fromstring(book.read("xl/sharedStrings.xml"))  # noqa: S314 - a table of a known repository
    texts = ["".join(part.text or "" for part in each.iter(f"{name}t")) for each in shared]
    cells_of_rows = ET.fromstring(book.read(f"xl/worksheets/sheet{number}.xml"))  # noqa: S314
    for row in cells_of_rows.iter(f"{name}row"):
        cells = {}
        for cell in row:
            if (value := cell.findtext(f"{name}v")) is not None:
                column = cell.attrib["r"].rstrip("0123456789")
                cells[column] = texts[int(value)] if cell.get("t") == "s" else value
        yield cells


def number_in(cells: dict[str, str], column: str) -> float:
    """Return the number in a cell; 0 if there is none."""
    text = cells.get(column, "")
    return float(text) if re.fullmatch(r"[\d.E+-]+", text) else 0.0


def deepbench(folder: Path, rows: Rows) -> None:
    """Products and convolutions, forward and backward, of layers in float32 and float16, channels first."""
    for name, card in {"V100": "V100-32GB", "T4": "T4"}.items():
        book, device = zipfile.ZipFile(folder / f"DeepBench_NV_{name}.xlsx"), measured_device(card)

        def add(kind: str, work: KernelWork, time: float, card: str = card, device: Device = device) -> None:
            rows[kind, card].append(Row((work,), time / 1e3, device, "deepbench"))

        for number, dtype in enumerate(("float32", "float16"), 1):
            bits, part = (32 if dtype == "float32" else 16), ""
            for cells in sheet(book, number):
                part = cells.get("A", part)
                if part.startswith("Dense") and number_in(cells, "I"):
                    add(
                        f"product_{bits}",
                        matrix(dtype, 1, *(int(cells[each]) for each in "CDE")),
                        number_in(cells, "I"),
                    )
                elif part == "Convolution" and number_in(cells, "N"):
                    w, h, c, n, k, s, r = (int(cells[each]) for each in "CDEFGHI")
                    p, q = int(cells["R"]), int(cells["S"])
                    forward = matrix(dtype, 1, n * p * q, k, c * s * r)
                    size = 4 if bits == 32 else 2  # noqa: PLR2004
                    read, weight, made = n * c * w * h * size, k * c * s * r * size, n * k * p * q * size
                    if bits == 16 and (c % 8 or k % 8):  # noqa: PLR2004 - no tensor cores, in this cuDNN
                        continue
                    forward = replace(forward, traffic=read + weight + made)
                    add(f"convolution_{bits}", forward, number_in(cells, "N"))
                    inputs = number_in(cells, "O")  # none of a network's first layer
                    moved = made + (1 + bool(inputs)) * (read + weight)
                    products = [(1, k, c * s * r, n * p * q), (1, n * w * h, c, p * q * k * s * r // (w * h))]
                    backward = replace(forward, products=tuple(products[: 1 + bool(inputs)]), traffic=moved)
                    add(f"convolution_backward_{bits}", backward, number_in(cells, "P") + inputs)


Readers = dict[str, tuple[Callable[[Path, Rows], None], ...]]
READERS: Readers = {
    "aiconfigurator": (aiconfigurator, collectives),
    "neusight": (neusight,),
    "neusight/jobs": (jobs,),
    "estimate_train_time": (estimate_train_time,),
    "simumax": (simumax,),
    "deepbench": (deepbench,),
}


def is_of_step(work: KernelWork, device: Device) -> bool:
    """Return whether a training step has such a kernel: none that runs on what its cache holds."""
    return bool(work.flops) or work.ranks > 1 or work.traffic > device.l2_cache


def rows_by_kind(folder: Path, tables: Readers) -> dict[str, dict[str, list[Row]]]:
    """Return the rows of some tables, by kind and card."""
    rows: Rows = defaultdict(list)
    for name, readers in tables.items():
        if not (folder / name).is_dir():
            print(f"{folder / name} is not there: without its rows", file=sys.stderr)
            continue
        for read in readers:
            read(folder / name, rows)
    kinds: dict[str, dict[str, list[Row]]] = defaultdict(dict)
    for (kind, card), measured in rows.items():
        some = [row for row in measured if is_of_step(row.works[0], row.device)]
        if len(some) >= FEWEST:
            kinds[kind][card] = some
    return kinds
