"""Tables of buffers: what is read, what is refused, and that offsets come back."""

import csv
import io

import numpy as np
import pytest

from memfit.errors import FileFormatError
from memfit.packing.table import packed_table, read_buffers


@pytest.fixture
def written(tmp_path):
    def write(text, **how):
        (tmp_path / "problem.csv").write_text(text, **how)
        return tmp_path / "problem.csv"

    return write


def test_what_is_read_comes_back(written):
    path = written("id,lower,upper,size\nb1,0,3,4\n" + '"b, 2",-3,9,4\n')
    found = read_buffers(path)
    assert found.names == ("b1", "b, 2")
    assert [column.tolist() for column in (found.lower, found.upper, found.size)] == [[0, -3], [3, 9], [4, 4]]
    rows = list(csv.DictReader(io.StringIO(packed_table([(found, np.array([0, 4]))]))))
    assert rows[1] == {"id": "b, 2", "lower": "-3", "upper": "9", "size": "4", "offset": "4"}


def test_columns_come_in_any_order_with_others_among_them(written):
    found = read_buffers(written("size,note,upper,lower,id\n4,x,3,0,b1\n", encoding="utf-8-sig"))
    assert (found.size[0], found.upper[0], found.names) == (4, 3, ("b1",))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no column id, lower, upper, size"),
        ("id,lower,upper\nb,0,1\n", "names no column size"),
        ("id,lower,upper,size\n", "it holds no buffer"),
        ("id,lower,upper,size\nb,0,1\n", "line 2: a time or a size is no integer"),
        ("id,lower,upper,size\nb,0,1,4.5\n", "line 2: a time or a size is no integer"),
        ("id,lower,upper,size\na,0,1,1\nb,3,3,4\n", "line 3: a buffer has lower < upper"),
        ("id,lower,upper,size\nb,0,1,0\n", "size > 0"),
        ("id,lower,upper,size\nb,0,1,-4\n", "size > 0"),
        (f"id,lower,upper,size\nb,0,1,{1 << 62}\n", "a buffer has"),
        (f"id,lower,upper,size\nb,0,{1 << 63},4\n", "a buffer has"),
        (f"id,lower,upper,size\na,0,1,{1 << 61}\nb,0,1,{1 << 61}\n", "more than 64 bits"),
        ("id,lower,upper,size\nb," + "0" * 200_000 + ",1,4\n", "field larger than field limit"),
    ],
)
def test_what_is_refused(written, text, said):
    with pytest.raises(FileFormatError, match=r"Cannot read .*problem\.csv") as refusal:
        read_buffers(written(text))
    assert said in str(refusal.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "problem.csv").write_bytes(b"id,lower,upper,size\n\xff,0,1,4\n")
    with pytest.raises(FileFormatError, match="it is not text"):
        read_buffers(tmp_path / "problem.csv")
