"""Patches: one mechanism for every attribute of another library that memfit replaces."""

import ast
import sys
import types
from functools import partial
from pathlib import Path

import pytest

import memfit
from memfit.errors import UnsuitableEnvironmentError
from memfit.patching.patches import Patch, call_before

PACKAGE = Path(memfit.__file__).parent
LIBRARIES = {"accelerate", "lightning", "torch", "transformers", "triton"}
ELSEWHERE = {
    "card/context_probe.py": {"torch.backends.cudnn.enabled"},  # settings, as a user would make them
    "run/kernel_probe.py": {"torch.backends.cuda.matmul.allow_tf32"},  # the same, in a process of its own
    "ghost/compile/isolate_torch_compile.py": {
        "config.autotune_local_cache",
        "config.autotune_in_subproc",
        "config.compile_threads",
        "config.bundle_triton_into_fx_graph_cache",
        "knobs.cache.dir",
    },
    "strategies/compilation.py": {"config.activation_memory_budget"},
    "recording/allocator_history.py": {"torch._inductor"},  # it stands for a module that is not imported
}
"""Assignments to attributes of other libraries that are no patches."""
SETS_ATTRIBUTES = {
    "patching/patches.py",
    "estimating/serialise_training_step.py",  # a user's settings
    "ghost/compile/compiled_kernel_work.py",  # its own attribute of a graph
    "recording/short_trainers.py",  # options of the script's own objects
}


@pytest.fixture
def module(monkeypatch):
    """Return a module with a function ``f`` and a class ``Owner``."""
    made = types.ModuleType("patched_here")
    made.f = lambda: "f"
    made.Owner = type("Owner", (), {"method": lambda self: "method"})
    monkeypatch.setitem(sys.modules, "patched_here", made)
    monkeypatch.setattr(Patch, "declared", [])
    return made


def test_a_patch_is_removed_unless_other_code_has_replaced_it_since(module):
    patch, original = Patch("patched_here", "f", why="test"), module.f
    remove = patch.install("f", lambda original: lambda: f"not {original()}")
    assert module.f() == "not f"
    remove()
    assert module.f is original
    remove = patch.install("f", lambda _: None)
    module.f = theirs = lambda: "theirs"
    remove()
    assert module.f is theirs


def test_a_patch_of_an_instance_leaves_its_class_as_it_is(module):
    patch, one, other = Patch("patched_here:Owner", "method", why="test"), module.Owner(), module.Owner()
    remove = patch.install("method", lambda _: lambda: "patched", on=one)
    assert (one.method(), other.method()) == ("patched", "method")
    remove()
    assert one.method() == "method"


def test_a_missing_name_is_an_error_that_names_it_unless_some_versions_lack_it(module, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", {"patched_here": "1.2"}.get)
    with pytest.raises(UnsuitableEnvironmentError, match=r"1\.2 has no patched_here\.g, .* to test\."):
        Patch("patched_here", "g", why="test").install("g", lambda _: None)
    with pytest.raises(UnsuitableEnvironmentError, match=r"patched_here\.Gone\.__init__"):
        Patch("patched_here:Gone", "__init__", why="test").install("__init__", lambda _: None)
    Patch("patched_here", "g", why="test", optional="1.2").install("g", lambda _: None)()
    assert not hasattr(module, "g")
    remove = Patch("patched_here", "g", why="test", adds=True).install("g", lambda _: "new")
    assert module.g == "new"
    remove()
    assert not hasattr(module, "g")


def test_a_name_that_is_not_declared_cannot_be_patched(module):
    with pytest.raises(LookupError, match="is not declared"):
        Patch("patched_here", "g", why="test").install("f", partial(call_before, print))


def test_a_pattern_declares_what_matches(module):
    module.f_one = module.f_two = module.other = module.f
    assert Patch("patched_here", "f_*", "other", "gone", why="test").present() == ("f_one", "f_two", "other")


def assigned_attributes(tree):
    """Yield the attributes of other libraries' objects that a module assigns to, as they are written."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
            names |= {name.asname or name.name for name in node.names}
        elif isinstance(node, ast.Import):
            ours = [name for name in node.names if name.name.partition(".")[0] in LIBRARIES]
            names |= {name.asname or name.name.partition(".")[0] for name in ours}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and root(node.value) in names:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and root(node) in names:
            yield ast.unparse(node)


def root(node):
    """Return the name with which a chain of attributes begins; None for anything else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def test_nothing_assigns_to_other_libraries_but_patches():
    assigned, setting = {}, set()
    for file in PACKAGE.rglob("*.py"):
        name, tree = file.relative_to(PACKAGE).as_posix(), ast.parse(file.read_text())
        if found := set(assigned_attributes(tree)):
            assigned[name] = found
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        setting |= {name for call in calls if isinstance(call, ast.Name) and call.id == "setattr"}
    assert assigned == ELSEWHERE
    assert setting == SETS_ATTRIBUTES


def test_assignments_to_other_libraries_are_found():
    found = assigned_attributes(
        ast.parse(
            "import torch\nfrom torch import nn as layers\nimport os\n"
            "kind: Any = torch.optim.SGD\nkind.step = layers.Module.forward = torch.f = os.g = 1\n"
        )
    )
    assert sorted(found) == ["kind.step", "layers.Module.forward", "torch.f"]


def test_torch_compile_traces_no_function_that_stands_in_for_a_patched_one():
    """Otherwise it would be part of the script's graphs, which would have its name."""
    from memfit.recording.compiled_graphs import NEVER_COMPILED

    carried_out_as_on_a_card = {"injection", "strategies", "verification"}
    rooms = {
        file.relative_to(PACKAGE).parts[0] for file in PACKAGE.rglob("*.py") if "Patch(" in file.read_text()
    }
    assert rooms - carried_out_as_on_a_card == {name.removeprefix("memfit.") for name in NEVER_COMPILED}
