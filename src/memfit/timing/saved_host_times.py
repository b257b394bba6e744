"""Where this machine's measurement of its host is kept; ``run/measure_host_times.py`` makes it."""

import platform
import re
from pathlib import Path

import msgspec

from memfit.errors import FileFormatError
from memfit.input_files import read_input_file
from memfit.native_build import cache_folder
from memfit.records import HostTimes

_KIND = "host-times"
_MAX_FILE = 1 << 16  # bytes; a measurement takes some hundred
_CPU_INFO = Path("/proc/cpuinfo")


def host_times_file(torch_version: str) -> Path:
    """Return where the measurement of this processor with this Python and a version of torch is kept."""
    name = re.sub(r"[^\w.+]+", "_", f"{_processor()}-{torch_version}-{platform.python_version()}")
    return cache_folder(_KIND) / f"{name}.json"


def saved_host_times(torch_version: str) -> HostTimes | None:
    """Return what was measured on this machine with a version of torch; None without such a file."""
    try:
        content = read_input_file(host_times_file(torch_version), _MAX_FILE)
        return msgspec.json.decode(content, type=HostTimes)
    except (FileFormatError, msgspec.DecodeError):
        return None


def _processor() -> str:
    try:
        names = re.search(r"^model name\s*:\s*(.+)$", _CPU_INFO.read_text(), re.MULTILINE)
    except OSError:
        names = None
    return names[1] if names else platform.machine()
