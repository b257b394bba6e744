"""Resolve the options of a dry run: look up the device and its context, check, and build the ghost."""

import itertools
import os

from memfit.card.context_measurement import (
    eager_kernel_loading_bytes,
    loads_kernels_eagerly,
    saved_context_measurement,
)
from memfit.devices import NO_LIMIT, Device, find_device
from memfit.errors import UsageError
from memfit.ghost.build.runtime_library import build_ghost
from memfit.ghost.build.torch_install import find_torch
from memfit.ghost.ghost_device import GhostDevice
from memfit.ghost.values.value_options import GpuValueOptions
from memfit.ghost.workspaces import WorkspaceSource
from memfit.records import DeviceUse, Figure, Provenance
from memfit.run.child_start import GhostSettings
from memfit.run.options import RunOptions
from memfit.units import format_bytes


def resolve_ghost_settings(options: RunOptions) -> GhostSettings:
    """Check the options that concern the GPU, and build the ghost.

    Raises:
        UsageError: an option is out of range, or leaves no memory to measure in.
        MemfitError: there is no such device, or torch or the platform cannot run the ghost.
    """
    memory, in_use = options.memory, options.in_use
    _check_bytes(memory=memory, in_use=in_use)
    GpuValueOptions.parse(options.values)
    if options.workspaces not in tuple(WorkspaceSource):
        raise UsageError(
            f"workspaces must be one of {', '.join(WorkspaceSource)}, not {options.workspaces!r}."
        )
    device = find_device(options.gpu)
    total = Figure(memory, Provenance.EXACT, "--memory") if memory is not None else _total(device)
    shown_memory = None
    if options.unlimited:
        shown_memory, total = total.bytes, Figure(NO_LIMIT, Provenance.EXACT, "--memory")
    context = _context(device)
    if context.bytes + in_use >= total.bytes:
        raise UsageError(
            f"The GPU has no memory left for the script: of its {format_bytes(total.bytes)}, the CUDA "
            f"context uses {format_bytes(context.bytes)}, and other processes use {format_bytes(in_use)}."
        )
    visible_devices = max(_visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES")), options.rank.devices)
    return GhostSettings(
        build=build_ghost(),
        stands_for=GhostDevice.of(device, total.bytes),
        device=DeviceUse(
            *(device.name, total, context, in_use),
            driver=_driver(device),
            context_spread=device.context_spread,
        ),
        visible_devices=visible_devices,
        shown_memory=shown_memory,
    )


def _check_bytes(**amounts: int | None) -> None:
    for name, amount in amounts.items():
        if amount is not None and type(amount) is not int:
            raise UsageError(f"{name} must be an int, in bytes (8 GiB is 8 * 2**30), not {amount!r}.")


def _total(device: Device) -> Figure:
    provenance = Provenance.ASSUMED if "total_bytes" in device.approximate else Provenance.EXACT
    return Figure(device.total_bytes, provenance, device.sources["total_bytes"])


def _context(device: Device) -> Figure:
    eager = loads_kernels_eagerly(os.environ)
    kept = saved_context_measurement(device, find_torch().version, eager=eager)
    if kept is not None:
        return kept
    more, why = eager_kernel_loading_bytes() if eager else (0, "")
    source = "; ".join(filter(None, (device.sources["context_bytes"], why)))
    return Figure(device.context_bytes + more, Provenance.ASSUMED, source)


def _driver(device: Device) -> Figure | None:
    if device.driver_reserved is None:
        return None
    source = f"NVML's total ({device.sources['nvml_total_bytes']}) less CUDA's"
    return Figure(device.driver_reserved, Provenance.ASSUMED, source)


def _visible_devices(variable: str | None) -> int:
    """Return how many devices the script will see, as the CUDA runtime reads ``CUDA_VISIBLE_DEVICES``.

    >>> _visible_devices("0, 2,-1,3"), _visible_devices(None)
    (2, 1)
    """
    if variable is None:
        return 1
    listed = [name.strip() for name in variable.split(",")]
    seen = list(itertools.takewhile(lambda name: name not in ("", "-1"), listed))
    if not seen:
        raise UsageError(f"CUDA_VISIBLE_DEVICES={variable!r} hides every GPU from the script. Unset it.")
    return len(seen)
