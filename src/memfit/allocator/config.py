"""The allocator settings that decide how large a block is, in the names of ``PYTORCH_ALLOC_CONF``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from memfit.errors import UsageError
from memfit.units import MIB

INTERVALS = 16
"""``roundup_power2_divisions`` has one entry per power of two from 1 MiB to 32 GiB."""

_ENTRY = re.compile(r"(\w+):(\[[^\[\]]*\]|[^,\[\]]+)(?:,|$)")
_MEBIBYTES = re.compile(r"[0-9]{1,9}", re.ASCII)
_BOOLEAN = {"True": True, "False": False}


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """Settings in force; the defaults are PyTorch's.

    Source: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h, PyTorch 2.14.1.
    """

    backend: str = "native"
    """``native`` or ``cudaMallocAsync``."""
    caching: bool = True
    """False under ``PYTORCH_NO_CUDA_MEMORY_CACHING``: every tensor is a cudaMalloc of its own."""
    expandable_segments: bool = False
    max_split_size: int | None = None
    """Bytes; a block as large as this is never split. None: every block may be."""
    large_segment_size: int = 20 * MIB
    """Bytes of a segment made for a request between 1 and 10 MiB."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    """Steps between two powers of two, for sizes from ``2**i`` MiB; 0 or 1 is off."""

    @property
    def has_segments(self) -> bool:
        """Whether blocks are cut out of cached segments: the native caching allocator."""
        return self.caching and self.backend == "native"

    @classmethod
    def read(cls, settings: Mapping[str, str]) -> "AllocatorConfig":
        """Build the configuration from ``Trace.settings``.

        Args:
            settings: names and values of ``PYTORCH_ALLOC_CONF``. The whole string may stand under
                ``conf``; a setting of its own outranks it, for a script may change settings after
                the start. ``PYTORCH_NO_CUDA_MEMORY_CACHING``, set to anything, turns caching off.

        Raises:
            UsageError: a value is not one that PyTorch would take.

        >>> AllocatorConfig.read({"conf": "max_split_size_mb:128"}).max_split_size
        134217728
        """
        values = {**parse(settings.get("conf", "")), **settings}
        return cls(
            backend=values.get("backend", "native"),
            caching=not values.get("PYTORCH_NO_CUDA_MEMORY_CACHING"),
            expandable_segments=_boolean(values, "expandable_segments"),
            max_split_size=_size(values, "max_split_size_mb", default=None),
            large_segment_size=_size(values, "large_segment_size_mb", default=20 * MIB) or 0,
            roundup_power2_divisions=_divisions(values.get("roundup_power2_divisions", "0")),
        )


def parse(conf: str) -> dict[str, str]:
    """Split a ``PYTORCH_ALLOC_CONF`` string into its settings, values as they are written.

    Source: ``ConfigTokenizer``, c10/core/AllocatorConfig.h, PyTorch 2.14.1 (white space is dropped).

    Raises:
        UsageError: the string does not read ``name:value,name:[value,value]``.

    >>> parse("expandable_segments:True, roundup_power2_divisions:[256:4,>:8]")
    {'expandable_segments': 'True', 'roundup_power2_divisions': '[256:4,>:8]'}
    """
    text = "".join(conf.split())
    settings: dict[str, str] = {}
    position = 0
    while position < len(text):
        entry = _ENTRY.match(text, position)
        if entry is None:
            raise UsageError(
                f"PYTORCH_ALLOC_CONF={conf!r} cannot be read from {text[position:]!r} on: "
                "settings are written name:value, separated by commas."
            )
        settings[entry[1]] = entry[2]
        position = entry.end()
    return settings


def _boolean(values: Mapping[str, str], name: str) -> bool:
    value = values.get(name, "False")
    if value not in _BOOLEAN:
        raise UsageError(f"{name}:{value} in the allocator settings is neither True nor False.")
    return _BOOLEAN[value]


def _size(values: Mapping[str, str], name: str, default: int | None) -> int | None:
    value = values.get(name)
    if value is None:
        return default
    if not _MEBIBYTES.fullmatch(value):
        raise UsageError(f"{name}:{value} in the allocator settings is not a number of MiB.")
    return int(value) * MIB


def _divisions(value: str) -> tuple[int, ...]:
    """Read ``4`` or ``[256:1,512:2,>:4]`` into one number of divisions per interval.

    Source: ``parseRoundUpPower2Divisions``, c10/core/AllocatorConfig.cpp, PyTorch 2.14.1. The first
    listed value also serves the smaller sizes, sizes between two listed ones get none, and ``>``
    serves all beyond the last one listed.
    """
    if not value.startswith("["):
        return (_power_of_two(value, value),) * INTERVALS
    divisions = [0] * INTERVALS
    last = -1
    for entry in value[1:-1].split(","):
        boundary, _, count_text = entry.partition(":")
        count = _power_of_two(count_text, value)
        if boundary == ">":
            divisions[last + 1 :] = [count] * (INTERVALS - last - 1)
            continue
        index = min(_power_of_two(boundary, value).bit_length() - 1, INTERVALS - 1)
        if last < 0:
            divisions[:index] = [count] * index
        divisions[index] = count
        last = index
    return tuple(divisions)


def _power_of_two(text: str, value: str) -> int:
    number = int(text) if _MEBIBYTES.fullmatch(text) else -1
    if number < 0 or number & (number - 1):
        raise UsageError(
            f"roundup_power2_divisions:{value} in the allocator settings: {text!r} is not a power of two."
        )
    return number
