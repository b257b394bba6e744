"""Measure what a process holds on this machine's GPU outside PyTorch's allocator, and keep the result.

context_probe.py in a fresh process ─> bytes after each stage of an ordinary script
  and once more with each change ────> which changes lower them, tried on this machine
                                    └> <cache>/contexts/CARD-DRIVER-TORCH.json ─> later dry runs of that card
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from memfit.atomic_files import write_output_file
from memfit.card.detect_card import detect_card
from memfit.devices import Device, context_observations, find_device
from memfit.errors import FileFormatError, TargetError, UnknownDeviceError
from memfit.input_files import read_input_file
from memfit.native_build import cache_folder
from memfit.python_command import output_of_module
from memfit.records import (
    CardContextReport,
    CardContextStage,
    CardContextTrial,
    Figure,
    MachineKind,
    Provenance,
)
from memfit.units import format_bytes

_TASK = "measure the CUDA context"
_TIMEOUT = 180  # seconds for one process; the first on a machine may compile kernels
_KIND = "contexts"
_MAX_FILE = 1 << 20  # bytes of a kept measurement; it takes some thousand


_EAGER = "CUDA_MODULE_LOADING=EAGER"
_ALL_AT_ONCE = f"after work, {_EAGER}"


@dataclass(frozen=True, slots=True)
class _ContextChange:
    """A setting that changes the bytes held, and why."""

    what: str
    why: str
    environment: Mapping[str, str]
    cudnn: bool = True


CHANGES = (
    _ContextChange(
        _EAGER,
        "CUDA loads every kernel at once; PyTorch sets LAZY unless this variable is already set",
        {"CUDA_MODULE_LOADING": "EAGER"},
    ),
    _ContextChange(
        "torch.backends.cudnn.enabled = False",
        "PyTorch never calls cuDNN, so the library is never loaded",
        {},
        cudnn=False,
    ),
    _ContextChange(
        "CUBLAS_WORKSPACE_CONFIG=:0:0",
        "cuBLAS uses no workspace (PyTorch would allocate one); some matrix products get slower",
        {"CUBLAS_WORKSPACE_CONFIG": ":0:0"},
    ),
)


def measure_context() -> CardContextReport:
    """Measure the context of this machine's first GPU, in a fresh process for each change: half a minute.

    Raises:
        UnsuitableEnvironmentError: there is no GPU.
        TargetError: PyTorch cannot use it; the message quotes the last lines of its error.
    """
    detect_card(_TASK)
    plain = _probe({})
    trials = []
    for change in CHANGES:
        failed, stages = "", tuple[CardContextStage, ...]()
        try:
            stages = _probe(change.environment, cudnn=change.cudnn).stages
        except TargetError as error:
            failed = str(error)
        trials.append(CardContextTrial(change.what, change.why, stages, failed))
    return replace(plain, trials=tuple(trials))


def keep_measured_context(report: CardContextReport) -> Path | None:
    """Keep a measurement for later dry runs and return its path; None for a rehearsal, not kept.

    Raises:
        OutputError: the cache folder cannot be written.
    """
    if report.machine is not MachineKind.CARD:
        return None
    name = re.sub(r"[^\w.+]+", "_", f"{report.card}-{report.driver or report.cuda}-{report.torch}")
    path = cache_folder(_KIND) / f"{name}.json"
    write_output_file(path, msgspec.json.format(msgspec.json.encode(report)))
    return path


def saved_context_measurement(device: Device, torch_version: str, *, eager: bool = False) -> Figure | None:
    """Return the context measured for a device with this torch; None without such a measurement.

    Args:
        device: a whole card. A measurement of the card never applies to a slice of it.
        torch_version: as ``torch.__version__``.
        eager: as measured when CUDA loads every kernel at once.
    """
    # A cache that cannot be written may hold some, and the one in its place others.
    folders = {cache_folder(_KIND, "."), cache_folder(_KIND)}
    paths = sorted(path for folder in folders for path in folder.glob("*.json"))
    reports = [report for path in paths if (report := _read(path))]
    matching = [
        report
        for report in reports
        if report.torch == torch_version and _is(report.card, device) and _stages(report, eager=eager)
    ]
    if not matching:
        return None
    latest = max(matching, key=lambda report: report.day)
    last = _stages(latest, eager=eager)[-1]
    source = (
        f"memfit doctor --context, {latest.day}, {latest.card}, driver {latest.driver or 'unknown'}, "
        f"torch {latest.torch}: after the {last.what}{f', {_EAGER}' * eager}"
    )
    return Figure(last.outside, Provenance.MEASURED, source)


def _stages(report: CardContextReport, *, eager: bool) -> tuple[CardContextStage, ...]:
    if not eager:
        return report.stages
    return next((trial.stages for trial in report.trials if trial.what == _EAGER), ())


def _is(name: str, device: Device) -> bool:
    try:
        return find_device(name).name == device.name
    except UnknownDeviceError:
        return False


def _read(path: Path) -> CardContextReport | None:
    """Read a kept measurement; None if the file is not one, or is a rehearsal's."""
    try:
        report = msgspec.json.decode(read_input_file(path, _MAX_FILE), type=CardContextReport)
    except (FileFormatError, msgspec.DecodeError):
        return None
    return report if report.machine is MachineKind.CARD and report.stages else None


def _probe(environment: Mapping[str, str], *, cudnn: bool = True) -> CardContextReport:
    """Run the probe in a fresh process.

    The user's own values of the variables that are tried do not reach it: ``EAGER`` would otherwise count
    in the measurement without it, too.
    """
    tried = {name for change in CHANGES for name in change.environment}
    plain = {name: value for name, value in os.environ.items() if name not in tried}
    printed = output_of_module(
        "memfit.card.context_probe",
        _TASK,
        _TIMEOUT,
        msgspec.json.encode(cudnn).decode(),
        environment={**plain, **environment},
    )
    return msgspec.json.decode(printed.splitlines()[-1], type=CardContextReport)


def loads_kernels_eagerly(environment: Mapping[str, str]) -> bool:
    """Return whether a process with these environment variables loads every kernel when CUDA starts.

    PyTorch sets the variable to LAZY if it is unset, and DEFAULT means LAZY since CUDA 12.2.
    Source: ``_lazy_init``, torch/cuda/__init__.py, PyTorch 2.14.1; CUDA Programming Guide, lazy loading.

    >>> loads_kernels_eagerly({"CUDA_MODULE_LOADING": "EAGER"}), loads_kernels_eagerly({})
    (True, False)
    """
    name, _, value = _EAGER.partition("=")
    return environment.get(name) == value


def eager_kernel_loading_bytes() -> tuple[int, str]:
    """Return the bytes that loading every kernel adds, and their source: the same process, run both ways.

    The code of PyTorch and its libraries is loaded, whatever the size of the card.

    >>> eager_kernel_loading_bytes()[0] >> 20
    1250
    """
    eager = next(seen for seen in context_observations() if seen.what == _ALL_AT_ONCE)
    lazy = next(
        seen
        for seen in context_observations()
        if replace(seen, bytes=0) == replace(eager, bytes=0, what="after work")
    )
    more = eager.bytes - lazy.bytes
    return more, f"{_EAGER} adds {format_bytes(more)}: {eager}, less the same without"
