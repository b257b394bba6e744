"""docs/settings.md equals the output of docs/generate_settings.py, and has every name that memfit reads."""

import importlib.util
from pathlib import Path

from memfit.strategies.configuration import ALIASES, READERS, STRATEGIES

GENERATOR = Path(__file__).parents[1] / "docs" / "generate_settings.py"
OWN = {"activation_checkpointing", "loss_scale", "gradient_dtype"} | {
    *("master_weights", "parts_per_batch", "batches_per_update", "micro_batch_size", "global_batch_size"),
    *("remainder", "step_in_backward"),
}
"""memfit's own names."""


def load():
    spec = importlib.util.spec_from_file_location("generate_settings", GENERATOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_settings_is_up_to_date():
    generator = load()
    assert generator.PAGE.read_text() == generator.render(), "run python docs/generate_settings.py"


def test_every_name_that_is_read_is_in_the_table():
    shown = {name for lines in load().LINES.values() for line in lines for name in line}
    assert shown - {*STRATEGIES} == {*READERS, *ALIASES} - OWN
