"""`memfit replay` and `memfit allocator`: a dry run then does what they predict."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import warm_process

pytestmark = pytest.mark.process

EXAMPLE = Path(__file__).parents[1] / "examples" / "gan.py"
CONF = "expandable_segments:True"


def memfit(*arguments):
    return warm_process.memfit(*arguments, COLUMNS="150")


def dry_run_under(conf, *arguments):
    """Run `memfit dry-run` in an environment that PyTorch reads."""
    command = [sys.executable, "-m", "memfit", "dry-run", *map(str, arguments)]
    subprocess.run(command, capture_output=True, check=False, env=os.environ | {"PYTORCH_ALLOC_CONF": conf})


def dry_run(folder, *options, conf=""):
    """Run the example as a user would, and return the result."""
    answer = folder / "answer.json"
    dry_run_under(conf, "--json", answer, *options, "--", EXAMPLE, "--steps", "3")
    return json.loads(answer.read_text())


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    dry_run(folder, "-o", folder / "run.memfit")
    return folder / "run.memfit"


def settings(done):
    return {row["setting"]: row for row in json.loads(done.stdout)["settings"]}


@pytest.mark.slow
def test_a_dry_run_under_a_setting_equals_its_replay(trace, tmp_path):
    predicted = settings(memfit("allocator", trace, "--json", "-"))[CONF]
    done = dry_run(tmp_path, conf=CONF)
    assert (predicted["peak_allocated"], predicted["peak_reserved"]) == (
        done["peak"]["allocated"],
        done["peak"]["reserved"],
    )
    smallest = predicted["smallest_capacity"]
    assert dry_run(tmp_path, "--memory", smallest, conf=CONF)["out_of_memory"] is None
    # With less, a workspace of cuDNN fails, which the replay takes for the script's: PyTorch does without it.
    less = dry_run(tmp_path, "--memory", smallest - (2 << 20), conf=CONF)
    assert any("workspaces that cuDNN suggested did not fit" in note["text"] for note in less["notes"])


def test_every_setting_has_a_row_and_a_cost(trace):
    done = memfit("allocator", trace)
    assert done.returncode == 0, done.stderr
    for text in ("default", "  as recorded", CONF, "max_split_size_mb:128", "roundup_power2_divisions:8"):
        assert text in done.stdout
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING=1" in done.stdout
    assert f"Worth setting: PYTORCH_ALLOC_CONF={CONF}" in done.stdout
    assert "assumed" in done.stdout
    assert "simulated" in done.stdout


def test_the_failing_location_is_named(trace):
    done = memfit("replay", trace, "--memory", "900MiB", "--fail")
    assert done.returncode == 1
    assert "default: out of memory in step 1" in done.stdout
    assert "gan.py:" in done.stdout
    assert "The run does not fit under any of these settings." in done.stdout
    (row,) = settings(memfit("replay", trace, "--memory", "900MiB", "--json", "-")).values()
    assert not row["fits"]
    assert row["failure"]["where"]["step"] == 1
    assert row["failure"]["requested"] > row["failure"]["free"]


def test_a_replay_of_an_out_of_memory_run_fails_at_the_same_place(tmp_path):
    path = tmp_path / "run.memfit"
    first = dry_run(tmp_path, "-o", path, "--memory", "900MiB")
    assert first["verdict"] == "out of memory"
    done = memfit("replay", path, "--fail")
    assert done.returncode == 1
    assert "default: out of memory in step 1" in done.stdout
    (row,) = settings(memfit("replay", path, "--json", "-")).values()
    assert row["failure"]["free"] == first["out_of_memory"]["free"]
    larger = memfit("replay", path, "--fail", "--memory", "8GiB")
    assert larger.returncode == 0
    assert "The allocations that would have followed are unknown" in larger.stdout


SETS = """
import torch
torch.cuda.set_per_process_memory_fraction(0.25)
torch._C._accelerator_setAllocatorSettings("max_split_size_mb:64")
kept = [torch.empty(30 << 20, dtype=torch.uint8, device="cuda") for _ in range(4)]
"""


def test_settings_of_the_script_are_in_every_row(tmp_path):
    (tmp_path / "sets.py").write_text(SETS)
    path = tmp_path / "run.memfit"
    memfit("dry-run", "--memory", "1GiB", "-o", path, tmp_path / "sets.py")
    done = memfit("replay", path, "--alloc-conf", CONF, "--memory", "600MiB", "--json", "-")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    (note,) = [note["text"] for note in answer["notes"] if "The script itself sets" in note["text"]]
    assert "per_process_memory_fraction:0.25" in note
    assert "max_split_size_mb:64" in note
    assert "expandable" not in note
    assert [row["setting"] for row in answer["settings"]] == ["", CONF]
    assert not any(row["fits"] for row in answer["settings"])  # of 600 MiB it may have 150
    assert settings(memfit("replay", path, "--memory", "1GiB", "--json", "-"))[""]["fits"]


@pytest.mark.parametrize(
    "conf",
    [
        CONF,
        pytest.param("max_split_size_mb:128,garbage_collection_threshold:0.6", marks=pytest.mark.slow),
        pytest.param("roundup_power2_divisions:4", marks=pytest.mark.slow),
        pytest.param("roundup_power2_divisions:[1:2,8:4,64:8,>:2]", marks=pytest.mark.slow),
        pytest.param("per_process_memory_fraction:0.9,large_segment_size_mb:48", marks=pytest.mark.slow),
        pytest.param("expandable_segments:False", marks=pytest.mark.slow),
    ],
)
def test_settings_of_the_environment_are_not_the_scripts(tmp_path, conf):
    (tmp_path / "small.py").write_text('import torch\nx = torch.empty(3 << 20, device="cuda")\n')
    dry_run_under(conf, "-o", tmp_path / "run.memfit", tmp_path / "small.py")
    answer = json.loads(memfit("replay", tmp_path / "run.memfit", "--json", "-").stdout)
    assert [row["setting"] for row in answer["settings"]] == [conf]
    assert not [note for note in answer["notes"] if "The script itself" in note["text"]]


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ("max_split_size_mb:3", "must be at least 20"),
        ("max_split_size_mb:many", "must be a whole number of MiB"),
        ("expandable_segments:yes", "must be True or False"),
        ("nonsense:1", "is not an allocator setting"),
        ("garbage_collection_threshold:1", "less than 1"),
        ("roundup_power2_divisions:3", "not a power of two"),
        ("max_split_size_mb", "Cannot parse PYTORCH_ALLOC_CONF="),
        ("backend:cudaMallocAsync", "memfit has no model of CUDA's own allocator"),
        ("expandable_segments:True,large_segment_size_mb:13", "With large_segment_size_mb:13, PyTorch fails"),
    ],
)
def test_an_invalid_setting_is_an_error_message(trace, conf, words):
    done = memfit("replay", trace, "--alloc-conf", conf)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
