"""Pages of the documentation that are generated from the code are up to date, and complete."""

import importlib.util
from pathlib import Path

import pytest

from memfit.strategies.read_configuration import ALIASES, READERS, TABLES

DOCS = Path(__file__).parents[1] / "docs"
OWN_SETTINGS = {"activation_checkpointing", "loss_scale", "gradient_dtype", "master_weights"} | {
    *("parts_per_batch", "batches_per_update", "micro_batch_size", "global_batch_size"),
    *("remainder", "step_in_backward", "optimize_train", "optimize_test"),
}
"""memfit's own names, which are not those of another system."""


def generator(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


VERSIONS = pytest.param("generate_versions", marks=pytest.mark.recorded)


@pytest.mark.parametrize("name", ["generate_cli", "generate_settings", VERSIONS])
def test_generated_pages_are_up_to_date(name):
    module = generator(name)
    assert module.PAGE.read_text() == module.render(), "Run: make docs"


def test_every_setting_that_is_read_is_in_the_table():
    lines = generator("generate_settings").LINES.values()
    shown = {name for system in lines for line in system for name in line}
    assert shown - {*TABLES} == {*READERS, *ALIASES} - OWN_SETTINGS


def test_every_command_and_every_shown_option_is_in_the_reference():
    module = generator("generate_cli")
    page = module.render()
    for name in module.app:
        if name.startswith("-"):
            continue
        assert f"## memfit {name}\n" in page
        for argument in module.shown_arguments(module.app[name]):
            assert all(f"`{option}`" in page for option in argument.names if option.startswith("--"))
