"""The allocator's settings, in the names and the grammar of ``PYTORCH_ALLOC_CONF``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from memfit.errors import UsageError
from memfit.records import ARENA
from memfit.units import MIB

INTERVALS = 16
"""``roundup_power2_divisions`` has one entry per power of two from 1 MiB to 32 GiB."""

DEVICE_SETTINGS = frozenset(
    {
        "backend",
        "expandable_segments",
        "garbage_collection_threshold",
        "large_segment_size_mb",
        "max_non_split_rounding_mb",
        "max_split_size_mb",
        "per_process_memory_fraction",
        "roundup_power2_divisions",
        "throw_on_cudamalloc_oom",
    }
)
"""Settings that affect device memory."""
FIRST_VERSION = {
    "large_segment_size_mb": (2, 11),
    "throw_on_cudamalloc_oom": (2, 12),
}
"""The first version of PyTorch with a setting, if later than 2.10. Source: the names in libc10_cuda.so."""
HOST_SETTINGS = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
    }
)
"""PyTorch's other settings: they do not affect device memory."""

_LARGE_SEGMENT = 20 * MIB
_LEAST_LARGE_SEGMENT = 11  # MiB
_BACKENDS = ("native", "cudaMallocAsync")
_ENTRY = re.compile(r"(\w+):(\[[^\[\]]*\]|[^,\[\]]+)(?:,|$)")
_MEBIBYTES = re.compile(r"[0-9]{1,9}", re.ASCII)
_FRACTION = re.compile(r"[0-9]*\.?[0-9]+|[0-9]+\.", re.ASCII)
_BOOLEAN = {"True": True, "False": False}


@dataclass(frozen=True, slots=True)
class AllocatorConfig:
    """The settings in force; the defaults are PyTorch's.

    Source: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h, PyTorch 2.14.1.
    """

    backend: str = "native"
    """``native``, ``cudaMallocAsync``, or ``records.ARENA``."""
    caching: bool = True
    """False under ``PYTORCH_NO_CUDA_MEMORY_CACHING``: every tensor is a cudaMalloc of its own."""
    expandable_segments: bool = False
    max_split_size: int | None = None
    """Bytes; a block of at least this size is never split. None: every block may be split."""
    large_segment_size: int = _LARGE_SEGMENT
    """Bytes of a segment made for a request between 1 and 10 MiB."""
    max_non_split_rounding: int = _LARGE_SEGMENT
    """Bytes by which a block that is never split may exceed the request it serves."""
    garbage_collection_threshold: float = 0.0
    """Fraction of the reserved limit beyond which cached segments are released; 0 is never."""
    per_process_memory_fraction: float | None = None
    """Fraction of the device that may be reserved; None is no limit. Without a limit PyTorch collects no
    garbage either: the threshold is a share of this limit."""
    throw_on_cudamalloc_oom: bool = False
    """Fail when cudaMalloc would, instead of releasing the cache and retrying."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    """Steps between two powers of two, for sizes from ``2**i`` MiB; 0 or 1 is off."""

    @property
    def has_segments(self) -> bool:
        """Whether blocks come from cached segments: the native caching allocator."""
        return self.caching and self.backend == "native"

    @property
    def records_requests(self) -> bool:
        """Whether a history made under these settings records every request."""
        return self.has_segments or self.backend == ARENA

    @classmethod
    def read(cls, settings: Mapping[str, str]) -> "AllocatorConfig":
        """Read the settings of a trace.

        Args:
            settings: ``Trace.settings``: names and values of ``PYTORCH_ALLOC_CONF``. The whole string may be
                under ``conf``; an individual setting takes precedence, as a script may change settings after
                the start. ``PYTORCH_NO_CUDA_MEMORY_CACHING``, set to anything, turns caching off.

        Raises:
            UsageError: PyTorch would not accept a value.

        >>> AllocatorConfig.read({"conf": "max_split_size_mb:128"}).max_split_size
        134217728
        """
        values = {**parse_allocator_conf(settings.get("conf", "")), **settings}
        if settings.get("backend") == ARENA:
            return cls(backend=ARENA)
        large = _size(values, "large_segment_size_mb") or _LARGE_SEGMENT
        fraction = _fraction(values, "per_process_memory_fraction")
        return cls(
            backend=_backend(values),
            caching=not values.get("PYTORCH_NO_CUDA_MEMORY_CACHING"),
            expandable_segments=_boolean(values, "expandable_segments"),
            max_split_size=_size(values, "max_split_size_mb"),
            large_segment_size=large,
            max_non_split_rounding=_size(values, "max_non_split_rounding_mb") or large,
            garbage_collection_threshold=_threshold(values),
            per_process_memory_fraction=None if fraction == 1 else fraction,
            throw_on_cudamalloc_oom=_boolean(values, "throw_on_cudamalloc_oom"),
            roundup_power2_divisions=_divisions(values.get("roundup_power2_divisions", "")),
        )

    @classmethod
    def of(cls, conf: str) -> "AllocatorConfig":
        """Read a ``PYTORCH_ALLOC_CONF`` string.

        Raises:
            UsageError: PyTorch would not accept it. Values that PyTorch accepts by accident are refused, too:
                it reads ``128abc`` as 128, and ``-1`` as no limit.

        >>> AllocatorConfig.of("expandable_segments:True").expandable_segments
        True
        """
        values = parse_allocator_conf(conf)
        for name in values:
            if name not in DEVICE_SETTINGS | HOST_SETTINGS:
                raise UsageError(
                    f"{name!r} is not an allocator setting of PyTorch 2.14. The settings that affect "
                    f"device memory are {', '.join(sorted(DEVICE_SETTINGS))}."
                )
        config = cls.read({"conf": conf})
        large = config.large_segment_size // MIB
        _check_least(values, "large_segment_size_mb", _LEAST_LARGE_SEGMENT)
        _check_least(values, "max_split_size_mb", large)
        _check_least(values, "max_non_split_rounding_mb", large)
        return config


def check_torch_has_settings(conf: str, version: tuple[int, int]) -> None:
    """Raise if a version of PyTorch lacks a setting.

    Raises:
        UsageError: a setting is newer; the message names it.
    """
    for name in parse_allocator_conf(conf):
        if version < FIRST_VERSION.get(name, (0, 0)):
            first, of = (".".join(map(str, numbers)) for numbers in (FIRST_VERSION[name], version))
            raise UsageError(
                f"The allocator setting {name} needs PyTorch {first} or later, but the trace was made with "
                f"PyTorch {of}."
            )


def allocator_settings_made_by_script(settings: Mapping[str, str]) -> str:
    """Return the settings that the script made itself, beyond those of the environment.

    ``memfit.arena`` is left out: PyTorch's allocator cannot be replayed under it.

    >>> allocator_settings_made_by_script({"conf": "expandable_segments:True", "expandable_segments": "True"})
    ''
    >>> allocator_settings_made_by_script({"conf": "", "per_process_memory_fraction": "0.5"})
    'per_process_memory_fraction:0.5'
    >>> allocator_settings_made_by_script({"backend": ARENA})
    ''
    """
    conf = allocator_conf_from_environment(settings)
    by_conf = AllocatorConfig.read({"conf": conf})
    in_force = {**parse_allocator_conf(settings.get("conf", "")), **settings}
    return ",".join(
        f"{name}:{value}"
        for name, value in in_force.items()
        if name in DEVICE_SETTINGS
        and value != ARENA
        and AllocatorConfig.read({"conf": conf, name: value}) != by_conf
    )


def allocator_conf_from_environment(settings: Mapping[str, str]) -> str:
    """Return ``PYTORCH_ALLOC_CONF``; a snapshot holds only the last string that PyTorch received."""
    return settings.get("environment", settings.get("conf", ""))


def parse_allocator_conf(conf: str) -> dict[str, str]:
    """Split a ``PYTORCH_ALLOC_CONF`` string into its settings, values as written.

    Source: ``ConfigTokenizer``, c10/core/AllocatorConfig.h, PyTorch 2.14.1 (white space is dropped).

    Raises:
        UsageError: the string is not of the form ``name:value,name:[value,value]``.

    >>> parse_allocator_conf("expandable_segments:True, roundup_power2_divisions:[256:4,>:8]")
    {'expandable_segments': 'True', 'roundup_power2_divisions': '[256:4,>:8]'}
    """
    text = "".join(conf.split())
    settings: dict[str, str] = {}
    position = 0
    while position < len(text):
        entry = _ENTRY.match(text, position)
        if entry is None:
            raise UsageError(
                f"Cannot parse PYTORCH_ALLOC_CONF={conf!r}: expected name:value pairs separated by commas, "
                f"but found {text[position:]!r}."
            )
        settings[entry[1]] = entry[2]
        position = entry.end()
    return settings


def _invalid(name: str, value: str, expected: str) -> UsageError:
    return UsageError(f"{name}:{value} in the allocator settings is invalid: the value must be {expected}.")


def _boolean(values: Mapping[str, str], name: str) -> bool:
    value = values.get(name, "False")
    if value not in _BOOLEAN:
        raise _invalid(name, value, "True or False")
    return _BOOLEAN[value]


def _backend(values: Mapping[str, str]) -> str:
    backend = values.get("backend", _BACKENDS[0])
    if backend not in _BACKENDS:
        raise _invalid("backend", backend, " or ".join(_BACKENDS))
    return backend


def _size(values: Mapping[str, str], name: str) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if not _MEBIBYTES.fullmatch(value):
        raise _invalid(name, value, "a whole number of MiB")
    return int(value) * MIB


def _check_least(values: Mapping[str, str], name: str, least: int) -> None:
    if name in values and int(values[name]) < least:
        raise _invalid(name, values[name], f"at least {least}")


def _fraction(values: Mapping[str, str], name: str) -> float | None:
    value = values.get(name)
    if value is None:
        return None
    if not _FRACTION.fullmatch(value) or float(value) > 1:
        raise _invalid(name, value, "a fraction from 0 to 1")
    return float(value)


def _threshold(values: Mapping[str, str]) -> float:
    name = "garbage_collection_threshold"
    threshold = _fraction(values, name)
    if threshold in (0, 1):
        raise _invalid(name, values[name], "more than 0 and less than 1")
    return threshold or 0.0


def _divisions(value: str) -> tuple[int, ...]:
    """Parse ``4`` or ``[256:1,512:2,>:4]`` into one number of divisions per interval.

    Source: ``parseRoundUpPower2Divisions``, c10/core/AllocatorConfig.cpp, PyTorch 2.14.1. The first
    listed value also applies to smaller sizes, sizes between two listed ones get none, and ``>``
    applies to all sizes beyond the last one listed.
    """
    if not value:
        return (0,) * INTERVALS
    if not value.startswith("["):
        return (_power_of_two(value, value, least=1),) * INTERVALS
    divisions = [0] * INTERVALS
    last = 0
    first = True
    for entry in filter(None, value[1:-1].split(",")):
        boundary, _, count_text = entry.partition(":")
        count = _power_of_two(count_text, value)
        if boundary == ">":
            divisions[last + 1 :] = [count] * (INTERVALS - last - 1)
            continue
        last = min(_power_of_two(boundary, value, least=1).bit_length() - 1, INTERVALS - 1)
        if first:
            divisions[:last] = [count] * last
        divisions[last] = count
        first = False
    return tuple(divisions)


def _power_of_two(text: str, value: str, *, least: int = 0) -> int:
    number = int(text) if _MEBIBYTES.fullmatch(text) else None
    if number is None or number < least or number & (number - 1):
        raise UsageError(
            f"roundup_power2_divisions:{value} in the allocator settings is invalid, because {text!r} is not "
            "a power of two."
        )
    return number
