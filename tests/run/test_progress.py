"""Progress that the script's process reports: steps, memory, and that the script compiles code."""

import json
import os

import pytest
import torch

from memfit.cli import command_output
from memfit.run.parent import ScriptProgress
from memfit.run.parent_pipe import ParentPipe, report_compilations


@pytest.fixture
def pipe():
    """Return a pipe to the parent, and a function that returns what was written to it."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield ParentPipe(writer), lambda: [json.loads(line) for line in os.read(reader, 65536).splitlines()]
    os.close(reader)
    os.close(writer)


def test_compiling_is_reported_at_once_and_until_it_ends(pipe):
    parent, written = pipe
    parent.progress(1)
    parent.compiling(True)
    parent.compiling(False)
    assert [(line["step"], line["compiling"]) for line in written()] == [(1, False), (1, True), (1, False)]


def test_a_compilation_is_followed_from_its_start_to_its_end():
    states = []
    report_compilations(states.append)
    try:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    finally:
        torch._dynamo.reset()  # forgets who follows
    assert states == [True, False]


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (ScriptProgress(), "memfit: starting · 7 s"),
        (ScriptProgress(compiling=True), "memfit: compiling · 7 s"),
        (
            ScriptProgress(1, 1 << 30, 2 << 30, compiling=True),
            "memfit: step 2/3 · compiling · allocated 1.00 GiB · peak 2.00 GiB · 7 s",
        ),
        (ScriptProgress(1, 1 << 30, 2 << 30), "memfit: step 2/3 · allocated 1.00 GiB · peak 2.00 GiB · 7 s"),
    ],
)
def test_the_progress_line_says_that_the_script_compiles(progress, text):
    assert command_output._progress_text(progress, 3, 7) == text
