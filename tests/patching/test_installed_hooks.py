"""Installed hooks: suspending them around compiled code, and removing them."""

import pytest
import torch
from torch.nn.modules import module as tables
from torch.nn.modules.module import register_module_forward_hook

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch


@pytest.fixture
def hooks_and_calls():
    """Yield hooks with one that is installed before a hook of the script, and the names of called hooks."""
    names = []
    own = register_module_forward_hook(lambda *_: names.append("own"), always_call=True)
    scripts = register_module_forward_hook(lambda *_: names.append("script"))
    hooks = InstalledHooks()
    hooks.add(own)
    yield hooks, names
    own.remove()
    scripts.remove()


def test_suspended_hooks_are_not_called_and_come_first_again_on_resuming(hooks_and_calls):
    hooks, names = hooks_and_calls
    layer, x = torch.nn.Identity(), torch.ones(1)
    layer(x)
    with hooks.suspended():
        assert hooks.are_suspended
        assert len(tables._global_forward_hooks) == 1
        assert not tables._global_forward_hooks_always_called
        layer(x)
    layer(x)
    assert names == ["own", "script", "script", "own", "script"]
    assert tables._global_forward_hooks_always_called


def test_suspensions_nest(hooks_and_calls):
    hooks, names = hooks_and_calls
    layer, x = torch.nn.Identity(), torch.ones(1)
    with hooks.suspended():
        with hooks.suspended():
            layer(x)
        layer(x)
    assert not hooks.are_suspended
    assert names == ["script", "script"]


class Owner:
    """A class with a method to wrap."""

    def method(self):
        """Return the names of the functions that were called."""
        return ["original"]


OWNER = Patch(f"{__name__}:Owner", "method", why="test removal")


def test_removal_restores_originals_but_keeps_replacements_by_other_code():
    hooks, original = InstalledHooks(), Owner.method
    hooks.wrap(OWNER, "method", lambda original, owner: ["ours", *original(owner)])
    ours = Owner.method
    assert Owner().method() == ["ours", "original"]
    try:
        Owner.method = lambda owner: ["theirs", *ours(owner)]
        hooks.remove()
        assert Owner().method() == ["theirs", "original"]  # our wrapper now does nothing
    finally:
        Owner.method = original
    hooks = InstalledHooks()
    hooks.wrap(OWNER, "method", lambda original, owner: ["ours", *original(owner)])
    hooks.remove()
    assert Owner.method is original
