"""CSV tables of buffers: reading, rejected tables, and writing offsets."""

import csv
import io

import numpy as np
import pytest

from memfit.errors import FileFormatError
from memfit.packing.best_packing import pack_buffers
from memfit.packing.csv_table import packing_to_csv, read_buffers_csv


@pytest.fixture
def write_table(tmp_path):
    def write(text, **how):
        (tmp_path / "problem.csv").write_text(text, newline="", **how)
        return tmp_path / "problem.csv"

    return write


def test_a_table_that_was_read_is_written_with_offsets(write_table):
    path = write_table("id,lower,upper,size\nb1,0,3,4\n" + '"b, 2",-3,9,4\n')
    found = read_buffers_csv(path)
    assert found.names == ("b1", "b, 2")
    assert [column.tolist() for column in (found.lower, found.upper, found.size)] == [[0, -3], [3, 9], [4, 4]]
    rows = list(csv.DictReader(io.StringIO(packing_to_csv([(found, np.array([0, 4]))]))))
    assert rows[1] == {"id": "b, 2", "lower": "-3", "upper": "9", "size": "4", "offset": "4"}


def test_columns_may_be_in_any_order_and_other_columns_are_ignored(write_table):
    found = read_buffers_csv(write_table("size,note,upper,lower,id\n4,x,3,0,b1\n", encoding="utf-8-sig"))
    assert (found.size[0], found.upper[0], found.names) == (4, 3, ("b1",))


HEADER = "id,lower,upper,size\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty. The first line must be id,lower,upper,size"),
        ("\n\n", "it is empty"),
        (
            "a;b\n",
            "line 1: the header 'a;b' has no column id, lower, upper, size. The header must contain each of",
        ),
        ("id,lower,upper\nb,0,1\n", "line 1: the header 'id,lower,upper' has no column size"),
        ("id,lower,upper,size,size\nb,0,1,4,5\n", "repeats column size"),
        (HEADER, "it contains no buffers"),
        (HEADER + "b,0,1\n", "line 2: the header has 4 columns, but the row has 3"),
        (HEADER + "b,0,1,4,096\n", "line 2: the header has 4 columns, but the row has 5"),
        (HEADER + '"b,0,1,4\n', "line 2: the header has 4 columns, but the row has 1"),
        (HEADER + "b,0,1,4.5\n", "line 2: column size is '4.5', which is not an integer"),
        (HEADER + "b,0,1,NaN\n", "line 2: column size is 'NaN', which is not an integer"),
        (HEADER + "b,0,1,4KiB\n", "line 2: column size is '4KiB', which is not an integer"),
        (HEADER + "b,0,1," + "9" * 5000, "line 2: column size is '9999"),
        (HEADER.replace("\n", "\r\n") + "\r\na,0,1,4\r\nb,x,3,4\r\n", "line 4: column lower is 'x'"),
        (HEADER + '"a\nb",0,3,4\nc,0,x,4\n', "line 4: column upper is 'x'"),
        (HEADER + ",0,1,4\n", "line 2: column id is empty"),
        (HEADER + "a,0,1,4\nb,0,1,4\na,2,3,4\n", "line 4: column id is 'a', which line 2 already uses"),
        (HEADER + "a,0,1,1\nb,3,3,4\n", "line 3: column upper is 3, but must be greater than lower (3)"),
        (HEADER + "b,5,3,4\n", "line 2: column upper is 3, but must be greater than lower (5)"),
        (HEADER + "b,0,1,0\n", "line 2: column size is 0, but must be at least 1"),
        (HEADER + "b,0,1,-4\n", "line 2: column size is -4, but must be at least 1"),
        (HEADER + f"b,0,1,{1 << 62}\n", f"line 2: column size is {1 << 62}, but its magnitude must be below"),
        (HEADER + f"b,0,{1 << 63},4\n", "column upper is 9223372036854775808, but its magnitude must be"),
        (HEADER + f"b,{-1 << 62},0,4\n", "column lower is -4611686018427387904, but its magnitude must be"),
        (HEADER + f"a,0,1,{1 << 61}\nb,0,1,{1 << 61}\n", "its column size adds up to 2^62 or more"),
        (HEADER + "b," + "0" * 200_000 + ",1,4\n", "line 2: field larger than field limit"),
    ],
)
def test_an_invalid_table_is_rejected_with_its_line_and_column(write_table, text, message):
    with pytest.raises(FileFormatError, match=r"Cannot read .*problem\.csv") as error:
        read_buffers_csv(write_table(text))
    assert message in str(error.value)


def test_a_file_that_is_not_utf_8_is_rejected(tmp_path):
    (tmp_path / "problem.csv").write_bytes(b"id,lower,upper,size\n\xff,0,1,4\n")
    with pytest.raises(FileFormatError, match="it is not UTF-8 text"):
        read_buffers_csv(tmp_path / "problem.csv")


def test_the_largest_accepted_numbers_are_read_and_packed(write_table):
    edge = (1 << 62) - 1
    found = read_buffers_csv(write_table(f"{HEADER}b,{-edge},{edge},{edge}\n"))
    assert (found.lower[0], found.upper[0], found.size[0]) == (-edge, edge, edge)
    assert pack_buffers(found).height == edge


@pytest.mark.parametrize(
    "text",
    [
        HEADER.replace("\n", "\r\n") + "b1,0,3,4\r\n\r\n",
        "\n" + HEADER + "b1,0,3,4",
        "id, lower ,upper, size\nb1, 0,3 ,4\n",
        HEADER + "b1,0,3,4\n\n",
    ],
)
def test_line_ends_blank_lines_and_spaces_of_spreadsheets_and_editors_are_accepted(write_table, text):
    found = read_buffers_csv(write_table(text))
    assert (found.names, found.lower[0], found.upper[0], found.size[0]) == (("b1",), 0, 3, 4)


def test_a_missing_file_and_a_directory_are_rejected(tmp_path):
    with pytest.raises(FileFormatError, match=r"x\.csv: No such file or directory"):
        read_buffers_csv(tmp_path / "x.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(FileFormatError, match="Is a directory"):
        read_buffers_csv(tmp_path / "folder.csv")
