"""The option ``--values``: what it accepts, and which of its pairs applies to a read."""

import pytest

from memfit.errors import UsageError
from memfit.ghost.values.value_options import GpuValueOptions, chosen_element_count


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("float=x", "'x' is not a number"),
        ("int=1.5", "'1.5' is not an integer"),
        ("bool=1", "'1' is not true or false"),
        ("copy=x", "'x' is not a number"),
        ("count=0.0", "share"),
        ("count=1.5", "share"),
        ("count=0%", "share"),
        ("count=101%", "share"),
        ("count=-1", "share"),
        ("nonzero=many", "share"),
        ("train.py:3=blue", "'blue' is not a number, a share such as 25%, true or false"),
        ("train.py=3", "unknown key 'train.py'"),
        ("masked_select=3", "'nonzero' also covers boolean masks, 'where' and 'masked_select'"),
        ("size=3", "unknown key 'size'"),
        ("float=1,float=2", "given twice"),
        ("float", "'' is not a number"),
    ],
)
def test_invalid_values_options_are_rejected(text, complaint):
    with pytest.raises(UsageError, match=complaint):
        GpuValueOptions.parse(text)


def test_values_options_are_parsed_with_defaults_spaces_and_any_case():
    options = GpuValueOptions.parse(" float=-2e3, all=FALSE ,count=1.0")
    kinds = ("float", "int", "bool", "all", "copy", "count")
    assert [options.choose(kind).value for kind in kinds] == [-2000.0, 1, False, False, 0, 1.0]
    assert [GpuValueOptions.parse("").choose(kind).value for kind in kinds] == [
        1.0,
        1,
        False,
        True,
        0,
        "upper",
    ]
    counts = [
        GpuValueOptions.parse(f"count={text}").choose("count").value
        for text in ("upper", "0.25", "25%", "1.0", "4", "40", "0")
    ]
    assert [chosen_element_count(count, 10) for count in counts] == [10, 3, 3, 10, 4, 10, 0]


@pytest.mark.parametrize(
    ("place", "applies"),
    [
        ("heads.py:120", True),
        ("detection/heads.py:120", True),
        ("./heads.py:120", True),
        ("/lib/detection/heads.py:120", True),
        ("ads.py:120", False),
        ("heads.py:12", False),
        ("other/heads.py:120", False),
    ],
)
def test_a_line_is_named_by_the_end_of_its_path(place, applies):
    lines = [("/lib/torch/ops.py", 4), ("/lib/detection/heads.py", 120)]
    assert (GpuValueOptions.parse(f"{place}=7").at_line("int", lines) is not None) == applies


def test_of_several_lines_the_innermost_with_a_suitable_value_applies():
    options = GpuValueOptions.parse("train.py:3=5,heads.py:120=true")
    lines = [("/lib/heads.py", 120), ("/home/ada/train.py", 3)]
    assert options.at_line("bool", lines).given == "heads.py:120=true"
    assert options.at_line("int", lines).given == "train.py:3=5"
