"""Runs of one script, which go on from the standbys of earlier ones."""

import textwrap
from dataclasses import replace

import msgspec

from memfit.analysis.trial_result import TrialResult
from memfit.devices import NO_LIMIT
from memfit.records import Change
from memfit.run.options import RunOptions
from memfit.run.resolve_ghost_settings import resolve_ghost_settings
from memfit.trials.script_standbys import ScriptRun
from memfit.trials.trial_run import run_trial

OPTIONS = RunOptions(memory=NO_LIMIT)
LATE = replace(OPTIONS, finish_late=True)
TRAIN = """
    import atexit, os, random, sys, threading, torch
    model = torch.nn.Linear(256, 512).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    BEFORE
    for step in range(3):
        model(torch.randn(8, 256, device="cuda")).sum().backward()
        optimizer.step()
        kept = torch.empty(SIZE, device="cuda")
"""


def script_of(folder, before="pass", size="1", after=""):
    """Write a script that trains; return its path."""
    path = folder / "script.py"
    text = textwrap.dedent(TRAIN).replace("BEFORE", before).replace("SIZE", size)
    path.write_text(text + after)
    return str(path)


class Runs:
    """Runs of one script with its standbys."""

    def __init__(self, script, standbys):
        self._script, self._standbys = script, standbys
        self.forked, self.why_whole = False, ""
        """Whether the last run was forked, and why not."""

    def run(self, options=OPTIONS, change=Change()):  # noqa: B008 - frozen
        found = run_trial(self._under(options, change), self._note, self._standbys)
        assert isinstance(found, TrialResult), found
        return found

    def whole(self, options=OPTIONS, change=Change()):  # noqa: B008 - frozen
        """Run the whole script, whatever the standby."""
        return run_trial(self._under(options, change), lambda _: None)

    def _under(self, options, change):
        ghost = msgspec.structs.replace(resolve_ghost_settings(options), shown_memory=24 << 30)
        return ScriptRun((self._script,), options, ghost, change)

    def _note(self, progress):
        self.forked, self.why_whole = progress.forked, progress.unforked
