"""The GPUs in memfit's table: their figures, and the source of each.

    devices.toml   a row per card, a table per compute capability and chip, a source per figure,
                   and observations of a process's memory outside PyTorch's allocator
         |  read once, without torch
    find_device("rtx 4090")             -> Device
    find_device("A100-80GB:1g.10gb")    -> Device    a MIG slice: its parent's row, scaled

The figures and their sources are in ``devices.toml``; this module reads them and derives others.
"""

import difflib
import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memfit.errors import UnknownDeviceError

DEFAULT = "A100-80GB"
"""The card of a run without ``--gpu``."""
NO_LIMIT = 2 << 40
"""Bytes of a card that stands for unlimited memory. With more, expandable segments would exhaust the ghost's
addresses: they reserve several times the capacity."""

_MIB, _GIB = 1 << 20, 1 << 30
OBSERVED_SPREAD, SCALED_SPREAD = 0.21, 0.5
"""How much larger a context may be than is assumed, as a share of it. Observed on that card: 683 MiB where an
H100 held 823 with other software, the most of any two observations of a card. Scaled from another
card: 265 MiB where an L4 holds 194 by an L40S, and 115 where an RTX 4060 holds 80."""
_MEMORY_SLICES = 8  # MIG divides memory, its bus and the L2 cache into eighths
_BRAND_NAMES = re.compile(r"^(?:nvidia|geforce|tesla|quadro|rtx|gtx)+(?=.)")
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or one MIG slice of one. Bytes, bits, hertz, bytes/s and FLOP/s."""

    name: str
    """The name in memfit's output and for ``--gpu``: ``A100-80GB``, ``A100-80GB:1g.10gb``."""
    reported_as: str
    """The driver's name: ``NVIDIA A100-SXM4-80GB``."""
    compute_capability: tuple[int, int]
    total_bytes: int
    """Bytes as ``cudaMemGetInfo`` and ``torch.cuda.get_device_properties`` report them."""
    multiprocessors: int
    max_threads_per_multiprocessor: int
    max_blocks_per_multiprocessor: int
    shared_memory_per_block: int
    """Bytes available to a block by default; ``shared_memory_per_block_optin`` is the maximum on request."""
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    l2_cache: int
    memory_bus_width: int
    memory_clock: int
    memory_bandwidth: float
    clock: int
    rates: Mapping[str, float] = field(hash=False)
    """Dense FLOP/s by dtype, accumulating in fp32. Use ``rate``, which covers missing dtypes."""
    tensor_cores: frozenset[str]
    """The dtypes with matrix units: none on a GTX 1660, not bf16 on a T4."""
    host_bandwidth: int
    """Bytes/s between host and device, one direction."""
    peer_bandwidth: int
    """The same to all other cards of a machine together: over NVLink, or else over the link to the host."""
    nvml_total_bytes: int | None
    """The total that nvidia-smi and NVML report; None for a slice of a card. What it exceeds ``total_bytes``
    by, the driver reserves."""
    context_bytes: int
    """Bytes a process holds outside PyTorch's allocator after a training step. Always assumed."""
    sources: Mapping[str, str] = field(hash=False, repr=False)
    """The source of each figure, by field; ``limits`` covers the limits of a multiprocessor or block."""
    approximate: frozenset[str]
    """The keys of ``sources`` whose figure is derived by a rule; their source states the rule."""

    @property
    def driver_reserved(self) -> int | None:
        """Bytes that the driver keeps for itself, which no process can use; None for a slice of a card.

        >>> find_device("H100").driver_reserved // 2**20
        479
        """
        return None if self.nvml_total_bytes is None else self.nvml_total_bytes - self.total_bytes

    @property
    def context_spread(self) -> float:
        """How much larger the context may be than ``context_bytes``, as a share of it."""
        return SCALED_SPREAD if "context_bytes" in self.approximate else OBSERVED_SPREAD

    def rate(self, dtype: str) -> float:
        """Return the dense FLOP/s of matrix products in a dtype; that of fp32 if the dtype has no rate.

        >>> find_device("T4").rate("bf16") == find_device("T4").rate("fp32")
        True
        """
        return self.rates.get(dtype, self.rates["fp32"])

    def fast(self, dtype: str) -> bool:
        """Return whether the card has matrix units for a dtype; without them, it saves memory but not time.

        >>> find_device("GTX 1660").fast("fp16"), find_device("A100").fast("bf16")
        (False, True)
        """
        return dtype in self.tensor_cores


@dataclass(frozen=True, slots=True)
class ContextObservation:
    """An observation of the memory that a process held on a card outside PyTorch's allocator."""

    card: str
    """A name of the table, a driver's name of a card, or another card."""
    what: str
    """``bare`` (after the first tensor), ``after work`` (after a script has computed), or a description."""
    bytes: int
    torch: str
    """Empty if the source does not give it, as for the next two fields; ``2`` is any PyTorch 2."""
    cuda: str
    driver: str
    source: str

    def __str__(self) -> str:
        versions = ("torch", self.torch), ("CUDA", self.cuda), ("driver", self.driver)
        known = "".join(f", {name} {version}" for name, version in versions if version)
        return f"observed {self.what} on {self.card}{known}: {self.source}"


@functools.cache
def context_observations() -> tuple[ContextObservation, ...]:
    """Return all observations, in the table's order.

    >>> {seen.what for seen in context_observations() if seen.card == "RTX 3090"} == {"bare", "after work"}
    True
    """
    absent, sources = dict.fromkeys(("torch", "cuda", "driver"), ""), _table()["sources"]
    return tuple(
        ContextObservation(
            **absent | {key: row[key] for key in row.keys() - {"mib", "source"}},
            bytes=row["mib"] * _MIB,
            source=sources.get(row["source"], row["source"]),
        )
        for row in _table()["outside"]["seen"]
    )


@functools.cache
def all_devices() -> tuple[Device, ...]:
    """Return every card in the table, in its order; ``mig_slices`` returns their slices.

    >>> len(all_devices()) >= 20
    True
    """
    return tuple(_read(name, row) for name, row in _table()["device"].items())


@functools.cache
def mig_slices(device: Device) -> tuple[Device, ...]:
    """Return a card's MIG slices, smallest first; empty for a card without MIG.

    Multiprocessors and memory are as the driver lists them. Bus and L2 cache are proportional to the eighths
    of memory (a ``1g`` slice has one eighth of the cache whatever its memory), rates and context to the
    multiprocessors.

    Source: NVIDIA Multi-Instance GPU User Guide, supported profiles; see ``devices.toml``.

    >>> [piece.name for piece in mig_slices(find_device("A100-80GB"))][:2]
    ['A100-80GB:1g.10gb', 'A100-80GB:1g.20gb']
    """
    profiles = dict(_table()["mig"].get(device.name, {}))
    source = _table()["sources"].get(profiles.pop("source", None), "")
    return tuple(_slice(device, profile, source, *figures) for profile, figures in profiles.items())


@functools.cache
def find_device(name: str) -> Device:
    """Find a card or a MIG slice by name.

    Case, spaces, dashes, underscores and brand names (NVIDIA, GeForce, Tesla, RTX, ...) do not matter.
    A short name that matches several cards returns the card that ``devices.toml`` lists it under
    (``a100`` is ``A100-80GB``, ``v100`` is ``V100-32GB``); the result has the full name.

    Args:
        name: ``A100-80GB``, ``rtx4090``, ``3090``, ``NVIDIA H100 80GB HBM3``; a slice is its card's
            name, a colon and the profile: ``a100:1g.10gb``.

    >>> find_device("a100").name, find_device("NVIDIA GeForce RTX 4090").name
    ('A100-80GB', 'RTX 4090')
    """
    card, _, profile = name.partition(":")
    device = _by_key().get(_key(card))
    if device is None:
        if re.fullmatch(r"(cuda:?)?[0-9]{0,2}", name):
            raise UnknownDeviceError(
                f"--gpu takes the model of a GPU, such as RTX-3090, not the index of a device ({name}). "
                "`memfit gpus` lists all models. If --gpu is the script's own option, write "
                f"it after the script: memfit dry-run --gpu RTX-3090 -- SCRIPT --gpu {name}"
            )
        nearest = ", ".join(_nearest(card))
        raise UnknownDeviceError(
            f"memfit has no GPU named {card!r}. Nearest: {nearest}. `memfit gpus` lists all GPUs that memfit "
            "knows. For any other GPU, name one of the same generation, and pass your GPU's memory as well: "
            "--memory 12GiB, or --budget where a command has it."
        )
    if not profile:
        return device
    slices = mig_slices(device)
    for piece in slices:
        if _key(piece.name.partition(":")[2]) == _key(profile):
            return piece
    known = (
        f"Its slices are: {', '.join(piece.name for piece in slices)}."
        if slices
        else "memfit knows no slices of it."
    )
    raise UnknownDeviceError(
        f"{device.name} has no MIG slice named {profile!r}. {known} `memfit gpus` lists all GPUs that memfit "
        "knows."
    )


def can_device_run_architectures(device: Device, architectures: Sequence[str]) -> bool:
    """Return whether code built for these architectures runs on a device.

    Binary code (``sm_86``) runs on its own compute capability and on later ones of the same major
    version; PTX (``compute_90``) is compiled by the driver for any later one. The suffix ``a`` restricts
    either to exactly its own capability, and ``f`` to its major version.

    Source: CUDA C++ Programming Guide, binary compatibility, PTX compatibility, feature sets.

    >>> can_device_run_architectures(find_device("RTX 4090"), ["sm_80", "sm_90"])
    True
    >>> can_device_run_architectures(find_device("V100"), ["sm_75", "sm_80", "compute_120"])
    False
    """
    return any(_runs(device.compute_capability, architecture) for architecture in architectures)


def why_torch_lacks_kernels(device: Device, architectures: Sequence[str], torch_version: str) -> str | None:
    """Return why the installed PyTorch has no kernels for a device, and which version has.

    Returns:
        The message for the user, or None if PyTorch has the kernels.

    >>> print(
    ...     why_torch_lacks_kernels(find_device("V100"), ["sm_75", "sm_80"], "2.14.1+cu130")
    ... )  # doctest: +ELLIPSIS
    PyTorch 2.14.1+cu130 has no kernels for V100-32GB (compute capability 7.0): ...
    """
    if can_device_run_architectures(device, architectures):
        return None
    major, minor = device.compute_capability
    supported = f"only {', '.join(architectures)}" if architectures else "no GPU"
    serves = _table()["capability"][f"{major}.{minor}"]["served_by"]
    return (
        f"PyTorch {torch_version} has no kernels for {device.name} (compute capability {major}.{minor}): "
        f"this build supports {supported}. Install {serves}, "
        "or choose another GPU with --gpu (`memfit gpus` lists them)."
    )


def _runs(capability: tuple[int, int], architecture: str) -> bool:
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None:
        return False
    built = int(match[2]), int(match[3])
    if match[4] == "a":
        return capability == built
    same_major = capability[0] == built[0]
    return capability >= built and (same_major or (match[1] == "compute" and match[4] != "f"))


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))


def _read(name: str, row: Mapping[str, Any]) -> Device:
    chip = dict(_table()["chip"][row["chip"]])
    capability = chip.pop("capability")
    limits = _table()["capability"][capability]
    major, minor = map(int, capability.split("."))
    tensor_cores = frozenset(chip.pop("tensor_cores"))
    clock, memory_clock = row["clock"] * 10**6, row["memory_clock"] * 10**6
    tensor_clock = row.get("tensor_clock", row["clock"]) * 10**6
    keys = _table()["source"] | row.get("sources", {})
    context, context_source = _context(name, row)
    return Device(
        name=name,
        reported_as=row["reported_as"],
        compute_capability=(major, minor),
        total_bytes=row["total_bytes"],
        nvml_total_bytes=row["nvml_total_mib"] * _MIB,
        multiprocessors=row["multiprocessors"],
        max_threads_per_multiprocessor=limits["threads"],
        max_blocks_per_multiprocessor=limits["blocks"],
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=limits["shared_memory_optin"],
        shared_memory_per_multiprocessor=limits["shared_memory"],
        l2_cache=row["l2_cache"],
        memory_bus_width=row["memory_bus_width"],
        memory_clock=memory_clock,
        memory_bandwidth=2 * memory_clock * row["memory_bus_width"] / 8,
        clock=clock,
        rates={
            dtype: float(
                row["multiprocessors"] * per_clock * (tensor_clock if dtype in tensor_cores else clock)
            )
            for dtype, per_clock in chip.items()
        },
        tensor_cores=tensor_cores,
        host_bandwidth=_table()["link"][row["link"]],
        peer_bandwidth=row.get("nvlink", _table()["link"][row["link"]]),
        context_bytes=context,
        sources={figure: _source(key, row, figure) for figure, key in keys.items()}
        | {"context_bytes": context_source},
        approximate=frozenset(figure for figure, key in keys.items() if key in _table()["rules"])
        | ({"context_bytes"} if "context_like" in row else set()),
    )


def _context(name: str, row: Mapping[str, Any]) -> tuple[int, str]:
    """Return the bytes that a process holds outside PyTorch's allocator after work, and their source."""
    like = row.get("context_like", name)
    names = {like, _table()["device"][like]["reported_as"]}  # the second in contributed measurements
    seen = max(
        (seen for seen in context_observations() if seen.card in names and seen.what == "after work"),
        key=lambda seen: ([int(part) for part in seen.torch.split(".")], seen.bytes),
    )
    if like == name:
        return seen.bytes, str(seen)
    share = row["multiprocessors"] / _table()["device"][like]["multiprocessors"]
    return int(seen.bytes * share), f"{_table()['rules']['context-like']}; {seen}"


def _source(key: str, row: Mapping[str, Any], figure: str) -> str:
    key = row.get("log", "devicequery") if key == "log" else key
    text: str = (_table()["sources"] | _table()["rules"])[key]
    return f"{text}; CUDA {row['driver']} driver" if figure == "total_bytes" and "driver" in row else text


def _slice(
    parent: Device, profile: str, source: str, multiprocessors: int, gib: float, eighths: int
) -> Device:
    share = multiprocessors / parent.multiprocessors
    cache = 1 if profile.startswith("1g") else eighths
    derived = dict.fromkeys(
        ("l2_cache", "memory_bus_width", "memory_bandwidth", "context_bytes"), _table()["rules"]["slice"]
    )
    return replace(
        parent,
        name=f"{parent.name}:{profile}",
        reported_as=f"{parent.reported_as} MIG {profile}",
        total_bytes=int(gib * _GIB),
        nvml_total_bytes=None,
        multiprocessors=multiprocessors,
        l2_cache=parent.l2_cache * cache // _MEMORY_SLICES,
        memory_bus_width=parent.memory_bus_width * eighths // _MEMORY_SLICES,
        memory_bandwidth=parent.memory_bandwidth * eighths / _MEMORY_SLICES,
        rates={dtype: rate * share for dtype, rate in parent.rates.items()},
        context_bytes=int(parent.context_bytes * share),
        sources={**parent.sources, "total_bytes": source, "multiprocessors": source, **derived},
        approximate=(parent.approximate - {"total_bytes"}) | derived.keys(),
    )


def _key(name: str) -> str:
    """Return a name without case, spaces, dashes, underscores and brand names."""
    return _BRAND_NAMES.sub("", re.sub(r"[\s_-]+", "", name.casefold()))


@functools.cache
def _by_key() -> dict[str, Device]:
    rows = _table()["device"]
    return {
        _key(name): device
        for device in all_devices()
        for name in (device.name, device.reported_as, *rows[device.name].get("aliases", ()))
    }


def _nearest(name: str, count: int = 3) -> list[str]:
    """Return the names of the cards that are most similar to a misspelt name."""
    ranked = difflib.get_close_matches(_key(name), _by_key(), n=len(_by_key()), cutoff=0)
    return list(dict.fromkeys(_by_key()[key].name for key in ranked))[:count]
