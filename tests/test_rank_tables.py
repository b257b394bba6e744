"""The tables of benchmarks/ranks.py; the tests of each claim run a sample of them."""

import pytest
import ranks
from rank_tables.row import Row


@pytest.mark.parametrize("name", ranks.SECTIONS)
def test_a_section_says_what_it_shows(name):
    section = ranks.section(name)
    assert section.__doc__
    assert len(section.COLUMNS) > 1
    assert callable(section.rows)


def test_a_row_that_fails_is_printed_and_named(monkeypatch, capsys):
    class Section:
        __doc__ = "What is claimed."
        COLUMNS = ("job", "bytes")

        @staticmethod
        def rows():
            yield Row(("small", "1"))
            yield Row(("large", "2"), "should be 3")

    monkeypatch.setattr(ranks, "section", lambda name: Section)
    assert ranks.report("sample") == ["sample, large: should be 3"]
    printed = capsys.readouterr().out
    assert "What is claimed." in printed
    assert "| large | 2 | should be 3 |" in printed
