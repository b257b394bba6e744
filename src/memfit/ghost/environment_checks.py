"""Check each thing that a dry run needs, and report how to fix what is missing."""

import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from memfit.devices import DEFAULT, find_device
from memfit.errors import MemfitError
from memfit.ghost.build.runtime_library import Build, build
from memfit.ghost.build.torch_install import find_torch
from memfit.ghost.cudnn.client import NoAnswerError, installed_cudnn
from memfit.ghost.ghost_device import GhostDevice
from memfit.native_build import find_compiler

_DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    serves: bool
    text: str
    """What was found; if the check failed, how to fix it."""
    details: tuple[str, ...] = ()


def diagnose() -> tuple[Check, ...]:
    """Check Python, torch, the compiler, the ghost (built if necessary), its gaps, cuDNN and GPUs.

    Each check reports what was found or how to fix it.
    """
    return (_python(), _torch(), _compiler(), *_ghost(), _gpus())


def _python() -> Check:
    return Check("python", True, f"{platform.python_version()} at {sys.executable}")


def _torch() -> Check:
    try:
        torch = find_torch()
    except MemfitError as error:
        return Check("torch", False, str(error))
    return Check("torch", True, f"{torch.version}, CUDA {torch.cuda} build")


def _compiler() -> Check:
    try:
        return Check("compiler", True, " ".join(find_compiler()))
    except MemfitError as error:
        return Check("compiler", False, str(error))


def _ghost() -> tuple[Check, ...]:
    try:
        built = build()
    except MemfitError as error:
        return (Check("ghost", False, str(error)),)
    state = f"built now in {built.seconds:.1f} s" if built.built else "ready"
    return (
        Check("ghost", True, f"{state}, for torch {built.torch_version}: {built.folder}"),
        _gaps(built),
        _cudnn(built),
    )


def _gaps(built: Build) -> Check:
    text = (
        f"the ghost does not implement {len(built.gaps)} CUDA functions that torch can reach; "
        "a run that calls one reports it"
    )
    return Check("gaps", True, text, tuple(f"{gap.name}: {gap.reason}" for gap in built.gaps))


def _cudnn(built: Build) -> Check:
    try:
        version = installed_cudnn(GhostDevice.of(find_device(DEFAULT)), built).version()
    except NoAnswerError as error:
        text = f"cannot be queried, so convolution workspaces are sized by fixed rules: {error}"
        return Check("cudnn", True, text)
    return Check("cudnn", True, f"version {version}, queried without a GPU for convolution workspaces")


def _gpus() -> Check:
    names = [
        line.partition(":")[2].strip()
        for path in sorted(_DRIVER.glob("*/information"))
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.startswith("Model:")
    ]
    return Check("gpu", True, ", ".join(names) or "none; a dry run needs none")
