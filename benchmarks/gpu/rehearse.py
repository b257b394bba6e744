"""Start a script again with the ghost in place of a GPU."""

import os
import sys
from pathlib import Path

from memfit.devices import find_device
from memfit.errors import UnknownDeviceError

HERE = Path(__file__).resolve().parent


def rehearse(gpu: str) -> None:
    """Replace this process by itself with the ghost loaded; return if that has been done.

    Args:
        gpu: the GPU that the ghost stands in for.
    """
    if "MEMFIT_REHEARSAL" in os.environ:
        return
    try:
        find_device(gpu)
    except UnknownDeviceError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
    os.environ["MEMFIT_REHEARSAL"] = gpu
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(HERE / "rehearsal"), os.environ.get("PYTHONPATH")))
    )
    os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606 - the same command again
