"""`memfit replay` and `memfit allocator`: what they say is what a dry run then does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "gan.py"
CONF = "expandable_segments:True"


def memfit(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "memfit", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "150", **environment},
    )


def dry_run(folder, *options, conf=""):
    """Run the example as it would be run, and return the answer."""
    answer = folder / "answer.json"
    memfit("dry-run", "--json", answer, *options, EXAMPLE, "--steps", "3", PYTORCH_ALLOC_CONF=conf)
    return json.loads(answer.read_text())


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    dry_run(folder, "-o", folder / "run.memfit")
    return folder / "run.memfit"


def settings(done):
    return {row["setting"]: row for row in json.loads(done.stdout)["settings"]}


def test_a_dry_run_under_a_setting_is_what_the_replay_said(trace, tmp_path):
    said = settings(memfit("allocator", trace, "--json", "-"))[CONF]
    done = dry_run(tmp_path, conf=CONF)
    assert (said["peak_allocated"], said["peak_reserved"]) == (
        done["peak"]["allocated"],
        done["peak"]["reserved"],
    )
    smallest = said["smallest_capacity"]
    assert dry_run(tmp_path, "--memory", smallest, conf=CONF)["verdict"] == "fits"
    assert dry_run(tmp_path, "--memory", smallest - (2 << 20), conf=CONF)["verdict"] != "fits"


def test_every_setting_has_its_row_and_its_price(trace):
    done = memfit("allocator", trace)
    assert done.returncode == 0, done.stderr
    for text in ("default", "  as recorded", CONF, "max_split_size_mb:128", "roundup_power2_divisions:8"):
        assert text in done.stdout
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING=1" in done.stdout
    assert f"Worth setting: PYTORCH_ALLOC_CONF={CONF}" in done.stdout
    assert "assumed" in done.stdout
    assert "simulated" in done.stdout


def test_where_it_would_fail_is_named(trace):
    done = memfit("replay", trace, "--memory", "900MiB", "--fail")
    assert done.returncode == 1
    assert "default: out of memory in step 1" in done.stdout
    assert "gan.py:" in done.stdout
    assert "It fits with none of these." in done.stdout
    (row,) = settings(memfit("replay", trace, "--memory", "900MiB", "--json", "-")).values()
    assert not row["fits"]
    assert row["failure"]["where"]["step"] == 1
    assert row["failure"]["requested"] > row["failure"]["free"]


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ("max_split_size_mb:3", "must be at least 20"),
        ("max_split_size_mb:many", "is not a number of MiB"),
        ("expandable_segments:yes", "neither True nor False"),
        ("nonsense:1", "is not an allocator setting"),
        ("garbage_collection_threshold:1", "less than 1"),
        ("roundup_power2_divisions:3", "not a power of two"),
        ("max_split_size_mb", "cannot be read"),
    ],
)
def test_a_bad_setting_is_refused_in_words(trace, conf, words):
    done = memfit("replay", trace, "--alloc-conf", conf)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
