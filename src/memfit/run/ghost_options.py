"""From the options of a dry run to what its process is told of the ghost."""

import itertools
import os

from memfit.card.context import kept_context
from memfit.devices import Device, find_device
from memfit.errors import UsageError
from memfit.ghost.build.runtime_library import build
from memfit.ghost.build.torch_install import find_torch
from memfit.ghost.load import GhostDevice
from memfit.ghost.values.value_options import ValueChoices
from memfit.ghost.workspaces import WorkspaceSource
from memfit.records import DeviceUse, Figure, Provenance
from memfit.run.settings import GhostSettings


def ghost_settings(
    *,
    gpu: str,
    memory: int | None,
    in_use: int,
    values: str,
    host_memory: bool,
    weights: bool,
    workspaces: str,
) -> GhostSettings:
    """Check what ``api.dry_run`` was given about the GPU, and build the ghost.

    The arguments are those of ``api.dry_run``.

    Raises:
        UsageError: one of them is not what it should be, or nothing is left to measure in.
        MemfitError: no such device, or torch or the platform does not serve.
    """
    _check_bytes(memory=memory, in_use=in_use)
    ValueChoices.parse(values)
    if workspaces not in tuple(WorkspaceSource):
        raise UsageError(f"workspaces must be {', '.join(WorkspaceSource)}, not {workspaces!r}.")
    device = find_device(gpu)
    total = Figure(memory, Provenance.EXACT, "--memory") if memory is not None else _total(device)
    context = kept_context(device, find_torch().version) or Figure(
        device.context_bytes, Provenance.ASSUMED, device.sources["context_bytes"]
    )
    if context.bytes + in_use >= total.bytes:
        raise UsageError(
            f"Nothing is left to measure in: {total.bytes} bytes of memory, of which the CUDA context takes "
            f"{context.bytes} and others {in_use}."
        )
    devices = _visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return GhostSettings(
        build=build(),
        stands_for=GhostDevice.of(device, total.bytes),
        device=DeviceUse(device.name, total, context, in_use),
        devices=devices,
        values=values,
        host_memory=host_memory,
        weights=weights,
        workspaces=WorkspaceSource(workspaces),
    )


def _check_bytes(**amounts: int | None) -> None:
    for name, amount in amounts.items():
        if amount is not None and type(amount) is not int:
            raise UsageError(f"{name} is an int, in bytes (8 GiB is 8 * 2**30), not {amount!r}.")


def _total(device: Device) -> Figure:
    sure = Provenance.ASSUMED if "total_bytes" in device.approximate else Provenance.EXACT
    return Figure(device.total_bytes, sure, device.sources["total_bytes"])


def _visible_devices(variable: str | None) -> int:
    """Return how many devices the script will see, as the CUDA runtime reads ``CUDA_VISIBLE_DEVICES``.

    Raises:
        UsageError: none, which leaves nothing to measure.
    """
    if variable is None:
        return 1
    listed = [name.strip() for name in variable.split(",")]
    seen = list(itertools.takewhile(lambda name: name not in ("", "-1"), listed))
    if not seen:
        raise UsageError(f"CUDA_VISIBLE_DEVICES={variable!r} hides every GPU from the script. Unset it.")
    return len(seen)
