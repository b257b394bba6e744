"""Values that the user chooses with ``--values`` for copies and for lines, and what a failure hints at."""

import pytest

from support.scripts import INSTALL_VALUES, check

pytestmark = pytest.mark.warm


def test_bulk_copies_return_the_chosen_value_and_those_of_booleans_the_chosen_boolean(evaluate):
    reads = {
        "x.cpu().unique().tolist()": [0.0],
        "whole.tolist()": [0] * 5,
        "(x > 0).cpu().any().item()": False,
        "(x > 0).to('cpu', torch.long).sum().item()": 0,
        "torch.zeros(3, device=d).tolist()": [0.0] * 3,
        "torch.zeros(1 << 17, device=d).cpu().any().item()": False,
        "x.to('cpu', torch.complex64)[0, 0].real.item()": 0.0,
        "whole.to('cpu', torch.uint8).tolist()": [0] * 5,
        "x.numpy(force=True).max().item()": 0.0,
        "(rows := torch.zeros(2, 10), rows.__setitem__(1, x[0]))[0].tolist()": [[0.0] * 10] * 2,
        "(rows := torch.zeros(2, 10), rows.__setitem__(..., x[0]))[0].sum().item()": 0.0,
        "(ones := torch.zeros(3), ones.__setitem__(1, x.sum()))[0].tolist()": [0.0, 1.0, 0.0],
    }
    check(evaluate, reads)
    chosen = [
        [-1.5],
        [-1] * 5,
        True,
        40,
        [0.0] * 3,
        False,
        -1.5,
        [0] * 5,
        -1.5,
        [[0.0] * 10, [-1.5] * 10],
        -30.0,
        [0.0, 1.0, 0.0],  # one element is read as item() reads it
    ]  # uint8 holds no -1; zeros are known
    check(evaluate, dict(zip(reads, chosen, strict=True)), options="copy=-1.5,bool=true")


def test_a_value_for_a_line_holds_for_what_the_line_reads_and_calls(on_ghost):
    script = """
values = install("float=2,{file}:{line}=7,{file}:{check}=true,nowhere.py:3=1,unique=9")
x = torch.randn(8, device="cuda")
def reads(x):
    return x.sum().item(), int(x.max()), x.tolist()[0], len(x[x > 0]), bool((x > 0).any())
print(reads(x))
print(reads(x))                      # line
print((x > 0).any().item())
print((x > 0).any().item(), (x > 0).tolist()[0], x.sum().item())  # check
print(values.unused())
print(sorted(note[1].partition("The user ")[2] for note in notes if "copied" in note[1])[1])
"""
    lines = (INSTALL_VALUES + script).splitlines()
    at = {
        name: 15 + next(i for i, text in enumerate(lines) if text.endswith(f"# {name}"))
        for name in ("line", "check")
    }
    out = on_ghost(INSTALL_VALUES + script.format(file="script.py", **at)).splitlines()
    assert out[:5] == [
        "(2.0, 2, 0.0, 8, False)",
        "(7.0, 7, 7.0, 7, False)",
        "False",
        "True True 2.0",
        "['nowhere.py:3=1', 'unique=9']",
    ]
    assert out[5] == f"assumes that each of them is 7.0 (--values script.py:{at['line']}=7)."


def test_the_last_reads_name_each_line_once_with_the_value_to_type(on_ghost):
    script = """
values = install()
print(values.last_stand_ins())
x = torch.randn(8, device="cuda")
x.sum().item()
x[x > 0]
x.tolist(); (x > 0).tolist()
x.sum().item()
for read in values.last_stand_ins():
    print(read.where, read.value, read.what, read.instead, sep="|")
"""
    lines = (INSTALL_VALUES + script).splitlines()
    last = 15 + len(lines) - 3
    out = on_ghost(INSTALL_VALUES + script).splitlines()
    assert out[0] == "()"
    assert [line.rpartition("/")[2] for line in out[1:]] == [
        f"script.py:{last}|1.0|a float|script.py:{last}=0",
        f"script.py:{last - 1}|False|a copy of booleans|script.py:{last - 1}=true",
        f"script.py:{last - 2}|8|the size of nonzero|script.py:{last - 2}=1",
    ]
