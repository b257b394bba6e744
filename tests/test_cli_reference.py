"""docs/cli.md equals the output of docs/generate_cli.py."""

import importlib.util
from pathlib import Path

GENERATOR = Path(__file__).parents[1] / "docs" / "generate_cli.py"


def generator():
    spec = importlib.util.spec_from_file_location("generate_cli", GENERATOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_line_reference_is_up_to_date():
    module = generator()
    assert module.PAGE.read_text() == module.render(), "Run: make docs"


def test_every_command_and_every_shown_option_is_in_the_reference():
    module = generator()
    page = module.render()
    for name in module.app:
        if name.startswith("-"):
            continue
        assert f"## memfit {name}\n" in page
        for argument in module.app[name].assemble_argument_collection():
            if argument.parameter.show is not False:
                assert all(f"`{option}`" in page for option in argument.names if option.startswith("--"))
