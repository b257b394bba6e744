"""benchmarks/gpu/ghost_today.py: the ghost of today beside what a card held earlier."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from memfit.errors import TargetError
from support.modules_by_path import module_of

GPU = Path(__file__).parents[2] / "benchmarks/gpu"
MIB = 1 << 20
RESULT = {
    "card": "a card",
    "driver": "1.2",
    "torch": "2.11",
    "day": "2026-11-27",
    "profile": "H100-80GB",
    "context": {"total": 80 << 30},
    "jobs": {
        "done": {
            "status": "done",
            "card": {"allocated": 100 * MIB, "reserved": 200 * MIB},
            "ghost": {"allocated": 90 * MIB, "reserved": 200 * MIB},
        },
        "broken": {"status": "failed", "why": "no time"},
    },
}


@pytest.fixture
def ghost_today(monkeypatch):
    monkeypatch.syspath_prepend(str(GPU))
    return module_of(GPU / "ghost_today.py")


def rows(ghost_today, monkeypatch, dry_run):
    monkeypatch.setattr(ghost_today.memfit, "dry_run", dry_run)
    chosen = [ghost_today.ValidationJob(name, "a.py") for name in ("done", "broken", "newer")]
    return list(ghost_today.table(RESULT, chosen))


def test_a_row_compares_the_card_with_the_ghost_of_then_and_of_today(ghost_today, monkeypatch):
    asked = {}

    def dry_run(script, arguments, **options):
        asked.update(options)
        return SimpleNamespace(peak_allocated=101 * MIB, peak_reserved=190 * MIB)

    *_, row = rows(ghost_today, monkeypatch, dry_run)
    assert row == "| done | 100.0 | -10.0, -10.0 % | +1.0, +1.0 % | 200.0 | 0 | -10.0, -5.0 % |"
    assert (asked["gpu"], asked["memory"]) == ("H100-80GB", 80 << 30)


def test_a_job_that_fails_has_a_row_as_wide_as_the_others(ghost_today, monkeypatch):
    def dry_run(script, arguments, **options):
        raise TargetError("no such module\nmore")

    _, heading, row = rows(ghost_today, monkeypatch, dry_run)
    assert row.startswith("| done | failed: no such module |")
    assert row.count("|") == heading.splitlines()[0].count("|")
