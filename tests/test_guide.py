"""docs/guide: the code and the commands of its pages print what the pages show."""

import re
from pathlib import Path

import pytest

from support import shown_output

FOLDER = Path(__file__).parents[1] / "docs" / "guide"
PAGES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md"))}
WITH_CODE = [name for name, page in PAGES.items() if shown_output.sessions(page)]
WITH_COMMANDS = [name for name, page in PAGES.items() if shown_output.commands(page)]


@pytest.mark.parametrize("name", WITH_CODE)
@pytest.mark.filterwarnings("default")
def test_the_code_of_a_page_prints_what_it_shows(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for code, shown in shown_output.sessions(PAGES[name]):
        assert shown_output.run_block(code, namespace) == shown, code


@pytest.mark.process
@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_the_commands_of_a_page_print_what_it_shows(name, tmp_path):
    for file, text in shown_output.files(PAGES[name]).items():
        (tmp_path / file).write_text(text)
    for command in shown_output.commands(PAGES[name]):
        printed = shown_output.printed_by(command, tmp_path)
        assert not shown_output.not_printed(command.shown, printed), "\n".join(printed)


@pytest.mark.parametrize("name", PAGES)
def test_every_number_of_a_page_is_printed_on_it(name):
    assert shown_output.unfounded_numbers(PAGES[name]) == []
