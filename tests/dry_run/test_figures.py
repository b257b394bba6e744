"""Figures of a dry run: the terms of the summary, PyTorch's own counters, and every allocator setting."""

import os
import textwrap

import pytest

from memfit.analysis.breakdown import CATEGORY_NAMES, ROUNDING
from support.scripts import TRAIN, figures


@pytest.mark.warm
def test_one_tensor_takes_one_block_and_one_segment(dry_run):
    run = dry_run('import torch; x = torch.empty(1, device="cuda")')
    assert run.code == 0
    assert run.answer["peak"]["allocated"] == 512
    assert run.answer["peak"]["reserved"] == 2_097_152
    assert run.answer["peak"]["line"].endswith("script.py:1")


@pytest.mark.warm
def test_parameters_gradients_and_optimizer_state_are_distinguished(dry_run):
    run = dry_run(TRAIN + "    for _ in range(9): step()\n")
    held = figures(run.answer)
    requested = sum(4 * n for n in (256 * 512, 512, 512 * 8, 8))
    assert run.answer["steps"] == 3
    assert run.answer["verdict"] == "fits"
    assert held["parameters"] == requested
    assert held["gradients"] == requested
    assert held["optimizer state"] == 2 * requested
    assert held["unknown"] == 0
    parts = (*CATEGORY_NAMES.values(), ROUNDING)
    assert sum(held[part] for part in parts) == held["allocated"] == run.answer["peak"]["allocated"]
    assert held["allocated"] + held["cached, not allocated"] == held["reserved"]
    assert held["reserved"] + held["CUDA context"] == held["process"] == run.answer["peak"]["process"]
    assert {term["provenance"] for term in run.answer["terms"]} == {"exact", "assumed"}


@pytest.mark.warm
def test_memfits_peaks_equal_torchs_own(dry_run):
    script = TRAIN + "    for _ in range(3): step(); print(torch.cuda.max_memory_allocated(), end=' ')\n"
    run = dry_run(script + "    print(torch.cuda.max_memory_reserved())\n", options=("--steps", "4"))
    *_, allocated, reserved = map(int, run.out.splitlines()[0].split())
    assert (allocated, reserved) == (run.answer["peak"]["allocated"], run.answer["peak"]["reserved"])
    assert not any("counter" in note["text"] for note in run.answer["notes"])


@pytest.mark.warm
def test_labels_do_not_change_the_figures(dry_run):
    script = TRAIN.replace("64, 256", "8192, 256") + "    for _ in range(4): step()\n"
    with_labels, without = dry_run(script).answer, dry_run(script, options=("--no-labels",)).answer
    for figure in ("allocated", "reserved", "process"):
        assert with_labels["peak"][figure] == without["peak"][figure]
    assert with_labels["peak"]["module"]


READ_WITH_CUDA = (
    "max_split_size_mb:32",
    "roundup_power2_divisions:4",
    "garbage_collection_threshold:0.6",
    "large_segment_size_mb:40",
    "per_process_memory_fraction:0.5",
)
"""Settings that PyTorch reads when CUDA is initialised."""


@pytest.mark.parametrize(
    "conf",
    [
        "expandable_segments:True",
        pytest.param("backend:cudaMallocAsync", marks=pytest.mark.slow),
        *(pytest.param(conf, marks=pytest.mark.warm) for conf in READ_WITH_CUDA),
    ],
)
def test_allocator_settings_work(dry_run, conf):
    script = f"import os; os.environ['PYTORCH_ALLOC_CONF'] = {conf!r}\n" + textwrap.dedent(TRAIN)
    script += "for _ in range(2): step()\nprint(torch.cuda.max_memory_allocated())\n"
    run = dry_run(script)
    assert run.code == 0, run.err
    assert int(run.out.splitlines()[0]) == run.answer["peak"]["allocated"]
    assert run.answer["notes"] == [] or "cudaMallocAsync" in run.answer["notes"][0]["text"]


@pytest.mark.slow
def test_no_caching_mode_works(dry_run):
    run = dry_run(
        TRAIN + "    for _ in range(4): step()\n", env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    )
    assert run.answer["steps"] == 3
    assert run.answer["peak"]["allocated"] > 3 * 4 * 256 * 512


@pytest.mark.warm
def test_a_gpu_runs_kernels_that_were_compiled_for_an_older_one_of_its_generation(dry_run):
    """PyTorch has binaries for 8.6, which a GPU of 8.9 runs: CUB, which sorts, fails on any other version."""
    script = "import torch\nassert torch.arange(1 << 16, device='cuda').sort()[0].shape == (1 << 16,)\n"
    assert dry_run(script, options=("--gpu", "RTX-4090")).answer["verdict"] == "fits"
