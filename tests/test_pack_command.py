"""`memfit pack`: its output for a run and for a table, and the offsets that it writes."""

import csv
import json
from pathlib import Path

import msgspec
import pytest

from memfit import pack
from memfit.report.public_json import public_json_type
from memfit.report.terminal.packing_sizes import PackingSizes
from support.warm_process import memfit

pytestmark = pytest.mark.process

EXAMPLE = Path(__file__).parents[1] / "examples" / "gan.py"
PROBLEM = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


def table(path):
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "run.memfit"
    done = memfit("dry-run", "-o", path, "--", EXAMPLE, "--steps", "3")
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def problem(tmp_path):
    (tmp_path / "problem.csv").write_text(PROBLEM)
    return tmp_path / "problem.csv"


def test_a_run_is_packed_close_to_its_live_peak(trace, tmp_path):
    done = memfit("pack", trace, "--json", "-", "--csv", tmp_path / "packed.csv")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["step"] == 3
    # A tensor kept until its successor exists needs two buffers, which raises the bound above the peak.
    live, bound, planned, unshared = (
        answer[name]["amount"] for name in ("live", "bound", "planned", "unshared")
    )
    assert live <= bound == planned < 1.03 * live
    assert [row["setting"] for row in answer["reserved"]] == ["", "expandable_segments:True"]
    assert planned < min(row["amount"] for row in answer["reserved"])
    assert planned < unshared
    # The sizes of cuDNN's workspaces are assumed, and so is every sum that includes them.
    assert {answer[name]["provenance"] for name in ("live", "bound", "planned", "unshared")} == {"assumed"}
    rows = table(tmp_path / "packed.csv")
    assert len(rows) == sum(arena["buffers"] for arena in answer["arenas"])
    ends = [int(row["offset"]) + int(row["size"]) for row in rows]
    assert max(ends) == planned
    assert all(int(row[name]) % 512 == 0 for row in rows for name in ("offset", "size"))


def test_the_report_of_a_run_equals_that_of_the_python_api(trace):
    done = memfit("pack", trace)
    assert done.stdout.startswith("PACKED   ")
    assert str(pack(trace)).split() == done.stdout.split()
    for text in ("proven minimal", "live at once", "planned", "reserved, default settings"):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("capacity", "code", "first_line"),
    [
        ("12", 0, "FITS   12 of 12, proven minimal"),
        ("13", 0, "FITS   12 of 13, proven minimal"),
        ("11", 1, "DOES NOT FIT   11: no packing fits; the smallest found is 12, proven minimal"),
    ],
)
def test_the_exit_code_reports_whether_a_table_fits_a_capacity(problem, capacity, code, first_line):
    done = memfit("pack", problem, "--capacity", capacity, "--fail")
    assert (done.returncode, done.stdout.splitlines()[0]) == (code, first_line)


def test_a_table_is_written_with_offsets(problem, tmp_path):
    done = memfit("pack", problem, "--csv", tmp_path / "packed.csv", "--json", "-")
    twelve = {"amount": 12, "provenance": "exact"}
    assert json.loads(done.stdout) == {
        "schema": 1,
        "capacity": None,
        "fits": None,
        "step": None,
        "planned": {"amount": 12, "provenance": "simulated"},
        "bound": twelve,
        "live": twelve,
        "unshared": {"amount": 20, "provenance": "exact"},
        "reserved": [],
        "arenas": [
            {
                "stream": 0,
                "pool": [0, 0],
                "buffers": 5,
                "planned": 12,
                "bound": 12,
                "how": "by size, lowest gap",
            }
        ],
    }
    rows = table(tmp_path / "packed.csv")
    assert [row.pop("id") for row in rows] == ["b1", "b2", "b3", "b4", "b5"]
    for moment in range(21):
        offsets = [int(row["offset"]) for row in rows if int(row["lower"]) <= moment < int(row["upper"])]
        assert len(offsets) == len(set(offsets))
        assert set(offsets) <= {0, 4, 8}


def test_json_reports_whether_the_capacity_suffices(problem):
    for capacity, fits in ((12, True), (11, False)):
        text = memfit("pack", problem, "--capacity", capacity, "--json", "-").stdout
        answer = msgspec.json.decode(text, type=public_json_type(PackingSizes))
        assert (answer.capacity, answer.fits) == (capacity, fits)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.csv"], "Cannot read x.csv, line 1: the header 'a,b' has no column id, lower, upper, size"),
        (["missing.csv"], "Cannot read missing.csv: No such file or directory"),
        (["problem.csv", "--fail"], "--fail needs a capacity"),
        (["problem.csv", "--seconds", "nan"], "must be 0 seconds or more, not nan"),
        (["problem.csv", "--seconds", "-1"], "must be 0 seconds or more, not -1.0"),
        (["problem.csv", "--json", "no/x.json"], "Cannot write no/x.json: its folder does not exist"),
        (["problem.csv", "--csv", "."], "Cannot write .: it is a folder"),
    ],
)
def test_invalid_arguments_and_files_are_rejected(problem, arguments, message):
    (problem.parent / "x.csv").write_text("a,b\n1,2\n")
    done = memfit("pack", *arguments, cwd=problem.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
