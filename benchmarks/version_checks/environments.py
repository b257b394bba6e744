"""An environment for each version of PyTorch, without NVIDIA's libraries, which are most of a download.

    build/torch-versions/2.10.0/bin/python      PyTorch 2.10.0, torchvision 0.25.0, memfit (this repository's
                                                files), and what its tests and trainers need

On the ghost, memfit stands in for NVIDIA's libraries. Without it, ``import torch`` finds empty ones, whose
functions return the status of a machine without a driver.
"""

import hashlib
import os
import re
import subprocess
import tomllib
import venv
from pathlib import Path

from outcomes import REPOSITORY

from memfit.ghost.build.runtime_library import make_forwarding_libraries
from memfit.ghost.build.torch_install import find_torch, scan_nvidia_imports
from memfit.native_build import COMPILE_FLAGS, find_compiler, run_compiler

KEPT = REPOSITORY / "build" / "torch-versions"
"""Where environments are kept: a folder that git ignores."""
_EXTRAS = ("dev", "examples")
_NO_DRIVER = 35  # cudaErrorInsufficientDriver, as NVIDIA's own runtime returns on a machine without a driver
_OF_DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")
_FROM_NVIDIA = re.compile(r"^(Requires-Dist: (?:nvidia|cuda|triton)[^;\n]*)(?:;.*)?$", re.MULTILINE)


def environment(version: str) -> str:
    """Return the interpreter of the environment for a version, which is created or brought up to date.

    Args:
        version: of PyTorch: ``2.10.0``. pip chooses the other packages, those that this version can have.
    """
    folder = KEPT / version
    python = str(folder / "bin" / "python")
    stamp, digest = folder / "installed", _digest()
    if stamp.is_file() and stamp.read_text() == digest:
        return python
    if not Path(python).exists():
        venv.create(folder, with_pip=True)
    exactly = f"torch==={version}"  # not 2.13.0+cpu, which == would match, too
    constraints = folder / "constraints.txt"
    constraints.write_text(f"{exactly}\n")
    # In place of constraints that this machine's pip may have, which may exclude the version.
    environ = os.environ | {"PIP_CONSTRAINT": str(constraints)}
    install = (python, "-m", "pip", "install", "--quiet")
    subprocess.run([*install, "--no-deps", exactly], check=True, env=environ)
    packages = next(folder.glob("lib/python*/site-packages"))
    _make_nvidia_optional(packages)
    subprocess.run([*install, "-e", f"{REPOSITORY}[{','.join(_EXTRAS)}]"], check=True, env=environ)
    _make_libraries(packages)
    stamp.write_text(digest)
    return python


def _digest() -> str:
    """Return a digest of what decides which packages an environment holds."""
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    wanted = (project["dependencies"], [project["optional-dependencies"][extra] for extra in _EXTRAS])
    return hashlib.sha256(repr(wanted).encode() + Path(__file__).read_bytes()).hexdigest()


def _make_nvidia_optional(packages: Path) -> None:
    """Make an extra of what PyTorch requires from NVIDIA, and of Triton, so that pip installs none of it."""
    for metadata in packages.glob("torch-*.dist-info/METADATA"):
        metadata.write_text(_FROM_NVIDIA.sub(r'\1; extra == "nvidia"', metadata.read_text(encoding="utf-8")))


def _make_libraries(packages: Path) -> None:
    """Build the libraries that PyTorch is linked with, where it looks for NVIDIA's.

    The driver's are left out: nothing is linked with them, and a machine without a driver has none.
    """
    folder = packages / "nvidia" / "nccl" / "lib"  # on the RPATH of every version
    folder.mkdir(parents=True, exist_ok=True)
    wanted = scan_nvidia_imports(find_torch(packages / "torch"))
    source, behind = folder / "no_driver.c", folder / "libnodriver.so"
    source.write_text("".join(map(_function, sorted(wanted.symbols))))
    compiler = find_compiler()
    run_compiler(*compiler, *COMPILE_FLAGS, "-fvisibility=default", "-shared", "-o", str(behind), str(source))
    linked = {name: versions for name, versions in wanted.sonames.items() if name not in _OF_DRIVER}
    make_forwarding_libraries(folder, linked, behind, compiler)


def _function(name: str) -> str:
    """Return the C code of a function: it returns a status, or the text of one."""
    if name.endswith(("ErrorString", "ErrorName")):
        return f'const char *{name}(void) {{ return "there is no driver"; }}\n'
    return f"long {name}(void) {{ return {_NO_DRIVER}; }}\n"
