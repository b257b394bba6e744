"""PyTorch on the ghost with the arena as its allocator: the expected output of ``cuda_scenarios.py``."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.torch_release import RELEASE, needs_torch

pytestmark = pytest.mark.process

SCENARIOS = Path(__file__).with_name("cuda_scenarios.py")
SEEDS = RELEASE < (2, 14)
"""Whether PyTorch allocates a seed and an offset, on a page of their own, as a capture begins."""
OUTPUT = {
    "planned": "3 2 0 0 True\nTrue True\nTrue\nTrue\nTrue\n",
    "configured": "True [(128, 256, 1, 1)]\n[(3, 3, 0), (2, 2, 0)]\n",
    "own_stream": "True False 16.0 0.0\n0.0\n",
    "other_stream": "False 8.0\nTrue 0.0\nTrue\n",
    "placed_and_used_by_another_stream": "False\nTrue\n2 1\n",
    "used_by_the_stream_of_a_later_step": "False\nTrue\n",
    "several_arenas_in_turn": "False True True\n",
    "plans_of_another_process": "[(1, 0, 0), (2, 1, 0)] True\n[(0, 1, 0), (0, 1, 0)] True\n",
    "lent": "2 0 2 True\n0 1048576\n",
    "closed": "0 True\n",
    "precisions": "3\n",
    "engine": "4 16 1\n",
    "pages_move": "50.0 True 33554432\n",
    "arena_short_of_memory": "True False 48.0\nTrue 16\n",
    "captured": "16.0 False 48.0\n2.0\n" if SEEDS else "14.0 False 46.0\n2.0\n",
    "pool_of_two_graphs": "16.0\n0.0\n" if SEEDS else "14.0\n0.0\n",
    "capture_within_a_step": "2 0 0\n0 0 2\n",
    "recorded_with_another_stream": "[[1048576, -2, -1], [2097152, 2, -1]]\n",
    "forked": "0 8.0\n",
}
MESSAGES = {
    "out_of_memory": (
        "CUDA out of memory. Tried to allocate 64.00 MiB.",
        "GPU 0 has a total capacity of 81152.75 MiB of which 48.00 MiB is free.",
        "memfit.arena holds 0.00 MiB for its plan and 16.00 MiB for other allocations,",
        "of which 16.00 MiB is in use.",
        "All unused memory was released first.",
        "CUDA out of memory. Tried to allocate 1099511627776.00 MiB.",
        "48 16.0 0 16",
    ),
    "capture_out_of_memory": (
        "A CUDA graph is being captured, so unused memory could not be released.",
        "14",
    ),
    "two_captures": ("memfit.arena: two CUDA graphs are being captured at once on one GPU.",),
    "fraction": ("limited by torch.cuda.set_per_process_memory_fraction.", "True"),
    "benchmark": (
        "does not yet support cacheInfo",
        "cuda_training_scenarios.py: memfit.arena: torch.backends.cudnn.benchmark is on",
    ),
    "mem_pool": ("pluggable does not yet support createOrIncrefPool.",),  # PyTorch's own refusal
    "configured_too_late": (
        "The engine's configuration asks for an arena, but none is open, and CUDA is already in use.",
        "arena = memfit.arena(configuration)",
        "False native",
    ),
    "too_late": (
        "memfit.arena was created too late: CUDA is already in use",
        "Create the arena at the start of the script",
    ),
    "several_gpus": (
        "True 4 0",
        "4 16",
        "This step runs on cuda:0, but memfit.arena's memory is on another GPU.",
    ),
}
MARKS = {
    "two_captures": needs_torch((2, 12), "PyTorch itself refuses a second capture"),
    "capture_within_a_step": needs_torch((2, 14), "PyTorch itself allocates in the step as a capture begins"),
}
TRAINING = ("default", "expandable", "heap")


def marked(scenarios):
    return [pytest.param(name, marks=MARKS.get(name, ())) for name in scenarios]


@pytest.fixture(scope="module")
def printed():
    names = [*OUTPUT, *MESSAGES, *TRAINING]
    command = [sys.executable, str(SCENARIOS), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_scenario_is_run():
    files = [SCENARIOS.with_name(f"cuda_{part}_scenarios.py") for part in ("training", "memory")]
    functions = {
        name for file in files for name in re.findall(r"^def (\w+)\(\):", file.read_text(), re.MULTILINE)
    }
    assert functions - {"cnn", "transformer", "train"} == {*OUTPUT, *MESSAGES, *TRAINING}


@pytest.mark.parametrize("scenario", marked(OUTPUT))
def test_a_scenario_prints_its_expected_output(printed, scenario):
    assert printed[scenario] == OUTPUT[scenario]


@pytest.mark.parametrize("scenario", marked(MESSAGES))
def test_a_scenario_prints_its_message(printed, scenario):
    assert not printed[scenario].startswith("failed"), printed[scenario]
    assert [part for part in MESSAGES[scenario] if part not in printed[scenario]] == [], printed[scenario]


def test_the_heap_reserves_no_more_than_expandable_segments(printed):
    print({name: printed[name].split() for name in TRAINING})
    default, expandable, heap = ([float(used) for used in printed[name].split()] for name in TRAINING[:3])
    for job in range(2):
        assert 0 < heap[job] <= expandable[job]
        assert heap[job] < default[job]
