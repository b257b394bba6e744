"""docs/guide: the code and the commands of its pages print what the pages show."""

from pathlib import Path

import pytest

from support import shown_output

ROOT = Path(__file__).parents[1]
FOLDER, EXAMPLES = ROOT / "docs" / "guide", ROOT / "examples"
PAGES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md"))}
WITH_CODE = [name for name, page in PAGES.items() if shown_output.sessions(page)]
WITH_COMMANDS = [name for name, page in PAGES.items() if shown_output.commands(page)]
SLOW = {"articles", "many-gpus", "memory", "saving"}
"""Pages whose commands take longest."""


@pytest.mark.parametrize("name", WITH_CODE)
@pytest.mark.filterwarnings("default")
def test_the_code_of_a_page_prints_what_it_shows(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for code, shown in shown_output.sessions(PAGES[name]):
        assert shown_output.run_block(code, namespace) == shown, code


@pytest.mark.process
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in WITH_COMMANDS]
)
def test_the_commands_of_a_page_print_what_it_shows(name, tmp_path):
    (tmp_path / "examples").symlink_to(EXAMPLES)
    for script in FOLDER.glob("*.py"):
        (tmp_path / script.name).symlink_to(script)
    for file, text in shown_output.files(PAGES[name]).items():
        (tmp_path / file).write_text(text)
    for command in shown_output.commands(PAGES[name]):
        printed = shown_output.printed_by(command, tmp_path)
        assert not shown_output.not_printed(command.shown, printed), "\n".join(printed)


@pytest.mark.parametrize("name", PAGES)
def test_every_number_of_a_page_is_printed_on_it(name):
    assert shown_output.unfounded_numbers(PAGES[name]) == []


@pytest.mark.parametrize("name", PAGES)
def test_no_block_of_a_page_goes_unchecked(name):
    page = PAGES[name]
    assert page.count("```") == 2 * len(shown_output.BLOCK.findall(page)), (
        "Blocks begin at the start of a line."
    )
    assert page.count("```text") == sum(bool(shown) for _, shown in shown_output.sessions(page))
    assert all(command.shown or "-o" in command.words for command in shown_output.commands(page))


def test_what_differs_is_found():
    assert shown_output.not_printed(["a", "...", "c"], ["a", "b", "c"]) == []
    assert shown_output.not_printed(["a", "c"], ["c", "a"]) == ["c"]
    assert shown_output.not_printed(["a 1"], ["a 2"]) == ["a 1"]
    page = "It needs 1.5 GiB, 3 B, or 7 of 2,048. Published: 9.9 MiB.\n```text\n2048 3\n```\n"
    assert shown_output.unfounded_numbers(page) == ["1.5"]
