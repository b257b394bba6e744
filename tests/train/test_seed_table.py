"""The table of bugs in docs/training.md has all 33 rows, and names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def rows():
    text = (ROOT / "docs" / "training.md").read_text()
    table = text.split("## Bugs that other frameworks shipped")[1]
    return re.findall(r"^\| ([\d, ]+) \| (.+?) \| (.+?) \|$", table, re.MULTILINE)


def test_every_row_exists_once():
    numbers = [int(number) for row in rows() for number in row[0].split(",")]
    assert numbers == list(range(1, 34))


def test_every_row_has_a_test_that_exists_or_waits_for_ranks():
    for number, _, tests in rows():
        names = re.findall(r"`([^`]+::test_\w+)`", tests)
        assert names or tests == "several ranks", f"row {number} has neither"
        file = ""
        for name in names:
            path, test = name.split("::")
            file = path if path != "…" else file
            source = (ROOT / "tests" / file).read_text()
            assert f"def {test}(" in source, f"row {number}: no {test} in {file}"
