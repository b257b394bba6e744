"""The table of GPUs on the terminal."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from memfit.devices import Device
from memfit.units import format_gib


def print_devices(devices: Iterable[Device], console: Console) -> None:
    """Print one row per GPU: its name for --gpu, and the figures that decide whether a job fits."""
    table = Table(box=None, pad_edge=False)
    for heading, justify in (
        ("--gpu", "left"),
        ("memory", "right"),
        ("sm", "right"),
        ("units", "right"),
        ("context", "right"),
        ("fast dtypes", "left"),
    ):
        table.add_column(heading, justify="right" if justify == "right" else "left", no_wrap=True)
    for device in devices:
        table.add_row(
            device.name.replace(" ", "-"),  # needs no quotes in a shell
            ("≈ " if "total_bytes" in device.approximate else "") + format_gib(device.total_bytes),
            "{}{}".format(*device.compute_capability),
            str(device.multiprocessors),
            "≈ " + format_gib(device.context_bytes),
            " ".join(dtype for dtype in ("tf32", "bf16", "fp16", "fp8") if device.fast(dtype)) or "none",
        )
    console.print(table)
    console.print("sm: compute capability; units: multiprocessors; context: CUDA's own memory.", style="dim")
    console.print(
        "≈ approximate or assumed; memfit/devices.toml gives the source of every figure.", style="dim"
    )
