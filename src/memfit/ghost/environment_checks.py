"""Check each thing that a dry run needs, and report how to fix what is missing."""

import platform
import sys
from pathlib import Path

from memfit.devices import DEFAULT, find_device
from memfit.errors import MemfitError
from memfit.ghost.build.runtime_library import BuiltGhost, build_ghost
from memfit.ghost.build.torch_install import find_torch
from memfit.ghost.cudnn.client import NoCudnnAnswerError, installed_cudnn_client
from memfit.ghost.ghost_device import GhostDevice
from memfit.native_build import find_compiler
from memfit.records import EnvironmentCheck

_DRIVER = Path("/proc/driver/nvidia/gpus")


def diagnose() -> tuple[EnvironmentCheck, ...]:
    """Check Python, torch, the compiler, the ghost (built if necessary), its gaps, cuDNN and GPUs.

    Each check reports what was found or how to fix it.
    """
    return (_python(), _torch(), _compiler(), *_ghost(), _gpus())


def _python() -> EnvironmentCheck:
    return EnvironmentCheck("python", True, f"{platform.python_version()} at {sys.executable}")


def _torch() -> EnvironmentCheck:
    try:
        torch = find_torch()
    except MemfitError as error:
        return EnvironmentCheck("torch", False, str(error))
    return EnvironmentCheck("torch", True, f"{torch.version}, CUDA {torch.cuda} build")


def _compiler() -> EnvironmentCheck:
    try:
        return EnvironmentCheck("compiler", True, " ".join(find_compiler()))
    except MemfitError as error:
        return EnvironmentCheck("compiler", False, str(error))


def _ghost() -> tuple[EnvironmentCheck, ...]:
    try:
        built = build_ghost()
    except MemfitError as error:
        return (EnvironmentCheck("ghost", False, str(error)),)
    state = f"built now in {built.seconds:.1f} s" if built.built else "ready"
    return (
        EnvironmentCheck("ghost", True, f"{state}, for torch {built.torch_version}: {built.folder}"),
        _gaps(built),
        _cudnn(built),
    )


def _gaps(built: BuiltGhost) -> EnvironmentCheck:
    text = (
        f"the ghost does not implement {len(built.gaps)} CUDA functions that torch can reach; "
        "a run that calls one reports it"
    )
    return EnvironmentCheck("gaps", True, text, tuple(f"{gap.name}: {gap.reason}" for gap in built.gaps))


def _cudnn(built: BuiltGhost) -> EnvironmentCheck:
    try:
        version = installed_cudnn_client(GhostDevice.of(find_device(DEFAULT)), built).version()
    except NoCudnnAnswerError as error:
        text = f"cannot be queried, so convolution workspaces are sized by fixed rules: {error}"
        return EnvironmentCheck("cudnn", True, text)
    return EnvironmentCheck(
        "cudnn", True, f"version {version}, queried without a GPU for convolution workspaces"
    )


def _gpus() -> EnvironmentCheck:
    names = [
        line.partition(":")[2].strip()
        for path in sorted(_DRIVER.glob("*/information"))
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.startswith("Model:")
    ]
    return EnvironmentCheck("gpu", True, ", ".join(names) or "none; a dry run needs none")
