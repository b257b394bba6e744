"""The table of GPUs: figures and their sources, names, MIG slices, and the PyTorch builds for each."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit import devices
from memfit.devices import (
    DEFAULT,
    OBSERVED_SPREAD,
    SCALED_SPREAD,
    ContextObservation,
    Device,
    _key,
    _table,
    all_devices,
    can_device_run_architectures,
    context_observations,
    find_device,
    mig_slices,
    why_torch_lacks_kernels,
)
from memfit.errors import UnknownDeviceError

TABLE = _table()
EVERY = [*all_devices(), *(piece for device in all_devices() for piece in mig_slices(device))]
GIB = 1 << 30

every_device = pytest.mark.parametrize("device", EVERY, ids=lambda device: device.name)


def test_the_table_has_every_required_card():
    cards = """GTX 1660, RTX 3060, RTX 3090, RTX 4060, RTX 4070, RTX 4080, RTX 4090, RTX 5090, T4, V100, A10,
        L4, L40S, A6000, A100 40GB, A100 80GB, H100, H200, B200"""
    assert len({find_device(name.strip()).name for name in cards.split(",")}) == 19
    assert find_device(DEFAULT).name == DEFAULT


@every_device
def test_every_figure_is_within_the_bounds_of_real_cards(device: Device):
    assert (7, 0) <= device.compute_capability <= (12, 9)
    assert 4 * GIB < device.total_bytes < 288 * 10**9
    assert device.total_bytes % (1 << 10) == 0 or "total_bytes" in device.approximate
    assert 14 <= device.multiprocessors <= 192
    assert device.max_threads_per_multiprocessor in {1024, 1536, 2048}
    assert device.max_blocks_per_multiprocessor in {16, 24, 32}
    assert (
        device.shared_memory_per_block
        < device.shared_memory_per_block_optin
        <= device.shared_memory_per_multiprocessor
        <= 228 << 10
    )
    assert 1 << 20 <= device.l2_cache <= 128 << 20
    assert 128 <= device.memory_bus_width <= 8192
    assert 150e9 < device.memory_bandwidth < 8.1e12
    assert 0.8e9 < device.memory_clock < 15e9
    assert 1e9 < device.clock < 3e9
    assert 15e9 < device.host_bandwidth < 64e9
    assert device.host_bandwidth <= device.peer_bandwidth <= 1e12
    assert 30 << 20 < device.context_bytes < 1 << 30


@every_device
def test_rates_rise_as_dtypes_shrink_if_the_card_has_tensor_cores(device: Device):
    assert 2e12 < device.rate("fp32") < 110e12
    assert set(device.rates) <= {"fp32", "tf32", "fp16", "bf16", "fp8", "int8"}
    assert device.tensor_cores <= set(device.rates)
    assert device.rate("fp32") <= device.rate("tf32") <= device.rate("fp16") <= device.rate("int8") * 2
    assert device.rate("bf16") in {device.rate("fp16"), device.rate("fp32")}
    assert device.fast("bf16") == (device.compute_capability >= (8, 0))
    assert device.fast("fp8") == (device.compute_capability >= (8, 9))
    assert device.rate("float128") == device.rate("fp32")


def test_fast_is_false_for_dtypes_without_matrix_units():
    assert not find_device("GTX 1660").tensor_cores
    assert find_device("T4").fast("fp16")
    assert not find_device("T4").fast("bf16")
    assert not find_device("V100").fast("tf32")


@pytest.mark.parametrize(
    ("name", "dtype", "published"),
    [
        ("V100", "fp16", 125e12),
        ("T4", "fp16", 65e12),
        ("A10", "fp16", 125e12),
        ("RTX 3090", "fp16", 71e12),
        ("RTX 3090", "fp32", 35.6e12),
        ("RTX 4090", "bf16", 165.2e12),
        ("RTX 4090", "fp8", 330.3e12),
        ("RTX 4090", "int8", 660.6e12),
        ("A100", "tf32", 156e12),
        ("A100", "bf16", 312e12),
        ("A100", "int8", 624e12),
        ("H100", "fp32", 66.9e12),
        ("H100", "bf16", 989.4e12),
        ("H100", "fp8", 1978.9e12),
        ("H100 PCIe", "bf16", 756e12),
        ("H200", "tf32", 494.7e12),
        ("B200", "bf16", 2250e12),
    ],
)
def test_derived_rates_equal_the_published_ones(name, dtype, published):
    assert find_device(name).rate(dtype) == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(
    ("name", "published"),
    [("T4", 320e9), ("A100-40GB", 1555e9), ("A100 80GB PCIe", 1935e9), ("H100", 3350e9), ("H200", 4800e9)],
)
def test_derived_bandwidth_equals_the_published_one(name, published):
    assert find_device(name).memory_bandwidth == pytest.approx(published, rel=0.002)


@every_device
def test_every_figure_has_a_source_or_a_rule(device: Device):
    limits = {name for name in Device.__dataclass_fields__ if name.startswith(("max_", "shared_"))}
    words = {"name", "reported_as", "tensor_cores", "sources", "approximate"}
    assert set(device.sources) == set(Device.__dataclass_fields__) - limits - words | {"limits"}
    documents, rules = set(TABLE["sources"].values()), set(TABLE["rules"].values())
    assert "observed after work on " in device.sources["context_bytes"] or ":" in device.name
    for figure, source in device.sources.items():
        if figure == "context_bytes":
            continue
        assert (source in rules) == (figure in device.approximate), figure
        assert source in rules or source.partition("; CUDA ")[0] in documents, figure


def test_every_key_of_the_table_is_used():
    rows = TABLE["device"].values()
    used = {"devicequery", *TABLE["source"].values()} | {row["log"] for row in rows if "log" in row}
    used |= {key for row in rows for key in row.get("sources", {}).values()}
    used |= {slices["source"] for slices in TABLE["mig"].values()} | {"slice", "log", "context-like"}
    places = {seen["source"] for seen in TABLE["outside"]["seen"]}
    used |= {place for place in places if "://" not in place and not place.startswith("memfit doctor")}
    assert used == {"log", *TABLE["sources"], *TABLE["rules"]}
    assert {row["chip"] for row in rows} == set(TABLE["chip"])
    assert {row["link"] for row in rows} == set(TABLE["link"])
    assert {chip["capability"] for chip in TABLE["chip"].values()} == set(TABLE["capability"])
    assert set(TABLE["mig"]) <= set(TABLE["device"])
    known = """reported_as aliases chip link total_bytes nvml_total_mib driver multiprocessors l2_cache
        memory_bus_width memory_clock clock tensor_clock context_like log sources nvlink"""
    assert {key for row in rows for key in row} == set(known.split())


def test_an_unobserved_context_is_scaled_from_another_card():
    likes = {name: row["context_like"] for name, row in TABLE["device"].items() if "context_like" in row}
    assert likes["RTX 3060"] == "RTX A6000"
    for name, like in likes.items():
        device, known = find_device(name), find_device(like)
        assert "context_bytes" in device.approximate - known.approximate
        share = device.multiprocessors / known.multiprocessors
        assert device.context_bytes == int(known.context_bytes * share), name
        assert device.sources["context_bytes"].endswith(known.sources["context_bytes"])
    assert find_device("A100-40GB").context_bytes == find_device("A100-80GB").context_bytes


def test_the_largest_context_observed_with_the_newest_torch_is_used():
    # Three for the RTX 4090 (495 with 2.6; 473 and 504 with an unnamed 2), two for the T4 (150, 135).
    assert find_device("RTX 4090").context_bytes == 495 << 20
    assert find_device("T4").context_bytes == 150 << 20
    source = find_device("RTX 4090").sources["context_bytes"]
    for part in ("RTX 4090", "torch 2.6", "CUDA 12.1", "driver 560.35.03", "github.com/pytorch/torchchat"):
        assert part in source


@pytest.mark.parametrize(
    ("card", "what", "mib", "torch", "cuda"),
    [
        ("RTX 3090", "bare", 1639, "1.9", "11.4"),
        ("V100", "bare", 1351, "1.9", "10.2"),
        ("V100-16GB", "bare", 1343, "1", "11.2"),
        ("A100", "NCCL, 2 ranks", 544, "", ""),
    ],
)
def test_published_observations_are_in_the_table(card, what, mib, torch, cuda):
    seen = [
        o for o in context_observations() if (o.card, o.what, o.torch, o.cuda) == (card, what, torch, cuda)
    ]
    assert [o.bytes for o in seen] == [mib << 20]


def test_every_observation_has_a_source():
    keys = {"card", "what", "mib", "torch", "cuda", "driver", "source"}
    for row, seen in zip(TABLE["outside"]["seen"], context_observations(), strict=True):
        assert set(row) <= keys
        assert seen.source.startswith("https://") or row["source"] in TABLE["sources"]
        assert seen.source in str(seen)


@every_device
def test_names_round_trip(device: Device):
    assert find_device(device.name) is device
    assert find_device(device.name.lower()).name == device.name


def test_every_name_belongs_to_one_card():
    rows = TABLE["device"]
    names = [
        {_key(known) for known in (name, row["reported_as"], *row.get("aliases", ()))}
        for name, row in rows.items()
    ]
    assert sum(map(len, names)) == len(set().union(*names))


@given(
    st.sampled_from(all_devices()),
    st.lists(st.sampled_from(["", " ", "-", "_", "  "]), min_size=40, max_size=40),
    st.lists(st.booleans(), min_size=40, max_size=40),
    st.sampled_from(["", "NVIDIA ", "nvidia-", "NVIDIA GeForce ", "Tesla_", "rtx "]),
)
def test_case_spaces_dashes_and_brand_names_do_not_matter(device, gaps, upper, prefix):
    letters = [letter for letter in device.name if letter not in " -_"]
    spelt = "".join(
        gap + (letter.upper() if big else letter.lower())
        for gap, big, letter in zip(gaps, upper, letters, strict=False)
    )
    assert find_device(prefix + spelt) is device


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("a100", "A100-80GB"),
        ("v100", "V100-32GB"),
        ("h100", "H100-80GB"),
        ("3090", "RTX 3090"),
        ("rtx3090", "RTX 3090"),
        ("1660", "GTX 1660"),
        ("a6000", "RTX A6000"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("a100:3G.40GB", "A100-80GB:3g.40gb"),
    ],
)
def test_short_names_and_driver_names_are_found(short, name):
    assert find_device(short).name == name


def test_an_unknown_name_raises_with_the_three_nearest():
    with pytest.raises(UnknownDeviceError) as refused:
        find_device("RTX 3095")
    message = str(refused.value)
    assert "'RTX 3095'" in message
    nearest = message.partition("Nearest: ")[2].partition(". ")[0].split(", ")
    assert nearest[0] == "RTX 3090"
    assert len(set(nearest)) == 3
    assert {find_device(name).name for name in nearest} == set(nearest)
    assert "memfit gpus" in message
    assert refused.value.exit_code == 2


@given(st.text())
def test_any_text_raises_unknown_device_error_at_worst(text):
    try:
        device = find_device(text)
    except UnknownDeviceError as refused:
        assert "memfit gpus" in str(refused)  # noqa: PT017 - most texts are unknown, a few are names
    else:
        assert device in EVERY


def test_an_unknown_slice_raises_with_the_cards_slices():
    with pytest.raises(UnknownDeviceError, match=r"A100-80GB has no MIG slice named '1g\.5gb'.*:1g\.10gb"):
        find_device("a100:1g.5gb")
    with pytest.raises(
        UnknownDeviceError,
        match=r"RTX 4090 has no MIG slice named '1g.10gb'\. memfit knows no slices",
    ):
        find_device("rtx 4090:1g.10gb")


def test_a_slices_figures_are_its_parents_scaled():
    parent, piece = find_device("A100-80GB"), find_device("A100-80GB:3g.40gb")
    assert piece.total_bytes == 42_412_802_048  # as CUDA reported it inside a 4g.40gb
    assert find_device("a100:1g.10gb").total_bytes == 9728 << 20  # as torch reported it inside one
    assert piece.multiprocessors == 42
    assert piece.rate("bf16") == pytest.approx(parent.rate("bf16") * 42 / 108)
    assert piece.memory_bandwidth == parent.memory_bandwidth / 2
    assert piece.memory_bus_width == 2560
    assert piece.l2_cache == parent.l2_cache // 2
    assert find_device("a100:1g.20gb").l2_cache == find_device("a100:1g.10gb").l2_cache
    assert piece.context_bytes < parent.context_bytes
    assert piece.compute_capability == parent.compute_capability
    assert piece.shared_memory_per_multiprocessor == parent.shared_memory_per_multiprocessor
    assert "context_bytes" in piece.approximate


@pytest.mark.parametrize(
    "device", [d for d in all_devices() if mig_slices(d)], ids=lambda device: device.name
)
def test_slices_fit_on_their_card(device: Device):
    for piece in mig_slices(device):
        profile = piece.name.partition(":")[2]
        compute, gigabytes = int(profile[0]), int(profile.partition(".")[2].removesuffix("gb"))
        assert 0 < piece.multiprocessors <= device.multiprocessors
        assert piece.multiprocessors >= compute * 14
        assert 0.85 * gigabytes < piece.total_bytes / 1e9 < 1.1 * gigabytes
        assert piece.total_bytes <= device.total_bytes + GIB // 4  # the listing is in eighths of a GiB


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ("RTX 4090", ["sm_89"], True),  # its own
        ("RTX 4090", ["sm_80"], True),  # binary code of an earlier minor version
        ("RTX 3090", ["sm_89"], False),  # of a later one
        ("A100", ["sm_86"], False),
        ("H100", ["sm_80", "sm_86"], False),  # another major version
        ("RTX 5090", ["sm_100"], False),
        ("H100", ["compute_80"], True),  # PTX is compiled for what comes later
        ("B200", ["sm_75", "compute_120"], False),  # not for what came before
        ("H100", ["sm_90a"], True),
        ("RTX 5090", ["compute_90a"], False),  # tied to its own capability
        ("RTX 5090", ["sm_120f"], True),
        ("RTX 5090", ["compute_100f"], False),  # tied to its major version
        ("A100", [], False),
        ("A100", ["gfx90a"], False),
    ],
)
def test_binary_and_ptx_compatibility(capability, architectures, runs):
    assert can_device_run_architectures(find_device(capability), architectures) is runs


CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
CUDA_12_6 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


def test_a_v100_is_refused_under_cuda_13_with_the_builds_that_support_it():
    message = why_torch_lacks_kernels(find_device("v100"), CUDA_13, "2.14.1+cu130")
    assert message is not None
    for part in ("PyTorch 2.14.1+cu130", "V100-32GB", "7.0", "sm_75, sm_80", "CUDA 12.6", "+cu126", "--gpu"):
        assert part in message
    assert why_torch_lacks_kernels(find_device("v100"), CUDA_12_6, "2.14.1+cu126") is None
    assert ": this build supports no GPU. " in str(why_torch_lacks_kernels(find_device("v100"), [], "2.14.1"))


def test_cuda_13_supports_every_other_card_and_cuda_12_6_all_but_blackwell():
    refused = {device.name for device in EVERY if why_torch_lacks_kernels(device, CUDA_13, "2.14.1+cu130")}
    assert refused == {"V100-16GB", "V100-32GB"}
    refused = {
        device.name for device in all_devices() if why_torch_lacks_kernels(device, CUDA_12_6, "2.14.1+cu126")
    }
    assert refused == {"RTX 5090", "B200"}
    assert "CUDA 12.8 or later" in str(
        why_torch_lacks_kernels(find_device("B200"), CUDA_12_6, "2.14.1+cu126")
    )


def test_a_contributed_measurement_names_the_card_as_its_driver_does(monkeypatch):
    newer = ContextObservation("NVIDIA L40S", "after work", 400 << 20, "9.0", "13.0", "600.1", "an issue")
    known = devices.context_observations()
    monkeypatch.setattr(devices, "context_observations", lambda: (*known, newer))
    (l40s,) = (device for device in devices.all_devices.__wrapped__() if device.name == "L40S")
    assert (l40s.context_bytes, l40s.sources["context_bytes"]) == (newer.bytes, str(newer))


@pytest.mark.process
def test_reading_the_table_does_not_import_torch():
    program = "import sys, memfit.devices as d; d.all_devices(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_driver_reserves_what_nvml_s_total_exceeds_cuda_s_by():
    reserved = {device.name: device.driver_reserved for device in all_devices()}
    assert all(GIB / 10 < size < GIB for size in reserved.values()), reserved
    assert reserved["L40S"] == (46_068 - 45_589) << 20
    assert find_device("A100-80GB:1g.10gb").driver_reserved is None


def test_observations_of_one_card_are_within_the_stated_share_of_each_other():
    """With any software since PyTorch 2."""
    after_work: dict[str, list[int]] = {}
    for seen in context_observations():
        if seen.what == "after work" and not seen.torch.startswith("1"):
            after_work.setdefault(seen.card, []).append(seen.bytes)
    missed = {card: max(sizes) / min(sizes) - 1 for card, sizes in after_work.items()}
    assert 0.2 < max(missed.values()) <= OBSERVED_SPREAD, missed


def test_a_context_scaled_from_another_card_of_its_generation_is_within_the_stated_share():
    """Each card with a figure of its own, as it would be if that were scaled from another such card."""
    observed = [device for device in all_devices() if "context_bytes" not in device.approximate]
    missed = {
        (device.name, other.name): device.context_bytes
        * other.multiprocessors
        / (other.context_bytes * device.multiprocessors)
        - 1
        for device in observed
        for other in observed
        if device.compute_capability == other.compute_capability and device is not other
    }
    assert 0.4 < max(missed.values()) <= SCALED_SPREAD, missed
    assert find_device("RTX 3060").context_spread == SCALED_SPREAD
    assert find_device("H100").context_spread == OBSERVED_SPREAD
