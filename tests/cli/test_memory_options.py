"""An amount of GPU memory without a unit is refused, unless it can be meant in bytes."""

import pytest

from memfit.cli.options import parse_gpu_memory
from memfit.errors import UsageError


@pytest.mark.parametrize("text", ["12", "1.5", " 8 "])
def test_a_small_number_without_a_unit_is_refused(text):
    with pytest.raises(UsageError, match=f"If you mean GiB, write {text.strip()}GiB"):
        parse_gpu_memory(text)


@pytest.mark.parametrize(("text", "amount"), [("0", 0), ("1.5GiB", 3 << 29), ("12884901888", 12 << 30)])
def test_bytes_and_amounts_with_a_unit_are_read(text, amount):
    assert parse_gpu_memory(text) == amount
