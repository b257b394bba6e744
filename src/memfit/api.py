"""The whole pipeline in one file: read this first.

script ── capture.run ──> trace file ── capture.tracefile ──> Trace ── explain.peak ──> DryRun
             on the ghost                                        no torch from here on
"""

import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from memfit.capture.atomic import write_bytes
from memfit.capture.run import Progress, check_output, check_script, run_on_ghost
from memfit.capture.settings import ChildSettings
from memfit.capture.snapshot import read_snapshot, write_snapshot
from memfit.capture.tracefile import is_trace, read_trace
from memfit.devices import DEFAULT, Device, find_device
from memfit.errors import UsageError
from memfit.explain.peak import summarize
from memfit.ghost.build import build
from memfit.ghost.choices import ValueChoices
from memfit.ghost.doctor import Check, checks
from memfit.ghost.load import GhostDevice
from memfit.records import DeviceUse, DryRun, Figure, Provenance, Trace

__all__ = ["check_output", "diagnose", "dry_run", "read", "summarize", "write_bytes", "write_snapshot"]

STEPS = 3
"""Training steps of a dry run: the first makes the optimizer's state, the second shows the peak with
it, the third shows whether anything still grows."""


def dry_run(  # noqa: PLR0913 - one parameter an option
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    gpu: str = DEFAULT,
    memory: int | None = None,
    in_use: int = 0,
    steps: int = STEPS,
    values: str = "",
    host_memory: bool = True,
    labels: bool = True,
    output: Path | None = None,
    stdout_to_stderr: bool = False,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> DryRun:
    """Run a script on the ghost, unmodified, and say what it would use.

    Args:
        script: path of the script, or a module's name with ``module=True``.
        arguments: the script's own arguments.
        module: run a module as ``python -m`` does.
        gpu: name of a device in the table (``memfit gpus``).
        memory: bytes of device memory instead of that device's.
        in_use: bytes of device memory that other processes hold.
        steps: training steps after which the script is ended.
        values: what the script is told when it reads a GPU value, see ``ValueChoices``.
        host_memory: pass over the filling of large CPU tensors, so that they cost no memory.
        labels: record modules and phases; the figures are the same without.
        output: where the trace is kept; nowhere by default.
        stdout_to_stderr: keep standard output free of what the script prints.
        on_progress: called about ten times a second.

    Returns:
        Verdict, peaks in bytes, and where the peak or the failure was.

    Raises:
        MemfitError: no such script or device, torch or the platform does not serve, or the script
            never used the GPU.

    >>> result = dry_run("train.py", ["--batch-size", "8"], gpu="RTX-3060")  # doctest: +SKIP
    """
    if steps < 1:
        raise UsageError(f"--steps must be at least 1, not {steps}.")
    command = (str(script), *arguments)
    check_script(command, module=module)
    ValueChoices.parse(values)
    if output is not None:
        check_output(output)
    device = find_device(gpu)
    total = Figure(memory, Provenance.EXACT, "--memory") if memory is not None else _total(device)
    context = Figure(device.context_bytes, Provenance.ASSUMED, device.sources["context_bytes"])
    use = DeviceUse(device.name, total, context, in_use)
    if context.bytes + in_use >= total.bytes:
        raise UsageError(
            f"Nothing is left to measure in: {total.bytes} bytes of memory, of which the CUDA context takes "
            f"{context.bytes} and others {in_use}."
        )
    devices = _visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    built = build()
    with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
        path = output if output is not None else Path(folder) / "run.memfit"
        settings = ChildSettings(
            module=module,
            output=str(path.absolute()),
            steps=steps,
            build=built,
            ghost_device=GhostDevice.of(device, total.bytes),
            device=use,
            devices=devices,
            values=values,
            host_memory=host_memory,
            labels=labels,
            progress=-1,
            stdout_to_stderr=stdout_to_stderr,
        )
        run_on_ghost(command, settings, on_progress)
        return summarize(read_trace(path))


def read(path: Path) -> Trace:
    """Read a trace (``.memfit``) or a memory snapshot that PyTorch wrote (a pickle).

    Raises:
        FileFormatError: the file is neither, is damaged, or holds more than plain data.
    """
    return read_trace(path) if is_trace(path) else read_snapshot(path)


def diagnose() -> tuple[Check, ...]:
    """Look at everything memfit needs, and say of each whether it is here and what would mend it."""
    return checks()


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


def _total(device: Device) -> Figure:
    sure = Provenance.ASSUMED if "total_bytes" in device.approximate else Provenance.EXACT
    return Figure(device.total_bytes, sure, device.sources["total_bytes"])
