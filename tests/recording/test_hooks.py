"""Hooks that compiled code must not see are gone while it runs, and stand where they stood afterwards."""

import pytest
import torch
from torch.nn.modules import module as tables
from torch.nn.modules.module import register_module_forward_hook

from memfit.recording.hooks import LiftedHooks


@pytest.fixture
def called():
    """Put a hook that can be lifted before one of the script's; return who was called."""
    names = []
    own = register_module_forward_hook(lambda *_: names.append("own"), always_call=True)
    scripts = register_module_forward_hook(lambda *_: names.append("script"))
    hooks = LiftedHooks()
    hooks.add(own)
    yield hooks, names
    own.remove()
    scripts.remove()


def test_lifted_hooks_are_not_called_and_come_back_first(called):
    hooks, names = called
    layer, x = torch.nn.Identity(), torch.ones(1)
    layer(x)
    with hooks.out_of_sight():
        assert hooks.lifted
        assert len(tables._global_forward_hooks) == 1
        assert not tables._global_forward_hooks_always_called
        layer(x)
    layer(x)
    assert names == ["own", "script", "script", "own", "script"]
    assert tables._global_forward_hooks_always_called


def test_regions_nest(called):
    hooks, names = called
    layer, x = torch.nn.Identity(), torch.ones(1)
    with hooks.out_of_sight():
        with hooks.out_of_sight():
            layer(x)
        layer(x)
    assert not hooks.lifted
    assert names == ["script", "script"]


class Owner:
    """What is wrapped."""

    def say(self):
        """Say who was called."""
        return ["original"]


def test_what_was_wrapped_is_as_it_was_and_what_others_put_there_stays():
    hooks, original = LiftedHooks(), Owner.say
    hooks.wrap(Owner, "say", lambda original, owner: ["ours", *original(owner)])
    ours = Owner.say
    assert Owner().say() == ["ours", "original"]
    try:
        Owner.say = lambda owner: ["theirs", *ours(owner)]
        hooks.remove()
        assert Owner().say() == ["theirs", "original"]  # they have kept ours, which does nothing any more
    finally:
        Owner.say = original
    hooks = LiftedHooks()
    hooks.wrap(Owner, "say", lambda original, owner: ["ours", *original(owner)])
    hooks.replace(Owner, "new", 1)
    hooks.remove()
    assert Owner.say is original
    assert not hasattr(Owner, "new")
