"""The examples in docstrings run, and give what they say."""

import doctest
import importlib
import pkgutil

import pytest

import memfit.strategies
import memfit.train
import memfit.watching

PACKAGES = [memfit.watching, memfit.strategies, memfit.train]
MODULES = [
    "memfit.units",
    *(
        found.name
        for package in PACKAGES
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_right(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    found = {
        name for name in MODULES if any(one.examples for one in finder.find(importlib.import_module(name)))
    }
    assert {"memfit.train.engine", "memfit.strategies.apply", "memfit.strategies.configuration"} <= found
