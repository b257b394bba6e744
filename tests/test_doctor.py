"""`memfit doctor` and `memfit gpus`."""

import subprocess
import sys

import pytest

from memfit.devices import all_devices, find_device
from memfit.ghost.build.runtime_library import read_ghost_gaps

pytestmark = pytest.mark.process


def memfit(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "memfit", *arguments], capture_output=True, text=True, check=False, **options
    )


def test_doctor_passes_every_check_on_this_machine():
    done = memfit("doctor", "--gaps")
    assert done.returncode == 0, done.stdout
    for found in ("python", "torch", "compiler", "ghost", "gaps", "cudnn", "gpu"):
        assert f"ok    {found}" in done.stdout
    gaps, _ = read_ghost_gaps()
    assert any(gap.name in done.stdout for gap in gaps)


def test_doctor_names_a_missing_compiler_and_how_to_install_one(tmp_path):
    done = memfit("doctor", env={"PATH": str(tmp_path), "MEMFIT_CACHE": str(tmp_path / "cache")})
    assert done.returncode == 3
    assert "FAILS compiler" in done.stdout
    assert "Install one" in done.stdout


def test_doctor_lists_every_name_that_memfit_replaces_and_pytorch_has_them_all():
    done = memfit("doctor", "--patches")
    assert done.returncode == 0, [line for line in done.stdout.splitlines() if line.startswith("absent")]
    assert not done.stderr, "imported libraries must not print their warnings among memfit's output"
    *rows, last = done.stdout.splitlines()
    assert last.endswith(" names, 0 missing")
    assert len(rows) > 200
    listed = {row.split()[1].removesuffix(":") for row in rows}
    assert {"torch._C._InferenceMode", "torch.ops.aten.nonzero", "torch._foreach_*_"} <= listed
    assert not [row for row in rows if row.startswith("absent torch") and "PyTorch" not in row]


def test_gpus_lists_every_gpu_by_a_name_that_find_device_accepts():
    rows = memfit("gpus").stdout.splitlines()[1:]
    listed = [row.split()[0] for row in rows[: len(all_devices())]]
    assert [find_device(name) for name in listed] == list(all_devices())
