"""The examples in docstrings run, and print what they show."""

import doctest
import importlib
import pkgutil

import pytest

import memfit

MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(memfit.__path__, "memfit.")
    if not found.name.endswith("__main__")
)


def examples(name):
    """Return the examples in a module's docstrings."""
    tests = doctest.DocTestFinder().find(importlib.import_module(name))
    return [example for test in tests for example in test.examples]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_print_what_they_show(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_few_examples_are_skipped():
    """Only examples that need a script, a trace file, a process on the ghost or a GPU are skipped."""
    found = [example for name in MODULES for example in examples(name)]
    skipped = [example for example in found if example.options.get(doctest.SKIP)]
    assert len(found) - len(skipped) >= 130
    assert len(skipped) <= 24
