"""Real arithmetic agrees where a plan divides batches, and where it refuses to."""

import json

import pytest

from support.fed_scripts import (
    CARRIED,
    CORPUS,
    DRAWN_ANEW,
    LOADER,
    ON_GPU,
    RECURRENT,
    REMEMBERED,
    SEQUENCE_FIRST,
    write,
)
from support.warm_process import verify_on_cpu

pytestmark = pytest.mark.process

SAME = {
    "loader": LOADER,
    "data on the GPU": ON_GPU,
    "sequences first": SEQUENCE_FIRST.format(batch_first=False, transposed=True),
    "batches first": SEQUENCE_FIRST.format(batch_first=True, transposed=False),
    "LSTM": RECURRENT.format(batch_first=True),
}
"""As ``tests/recording/test_model_input_digests.py`` shows, memfit sees that these divide."""
OTHER = {
    "corpus on the CPU": CORPUS.format(to_gpu=""),
    "corpus on the GPU": CORPUS.format(to_gpu="columns = columns.cuda()"),
    "drawn anew": DRAWN_ANEW,
    "state in the script": CARRIED,
    "state in the model": REMEMBERED.format(begin="self.memory = None"),
    "batches in place of sequences": SEQUENCE_FIRST.format(batch_first=False, transposed=False),
    "LSTM over the batch": RECURRENT.format(batch_first=False),
}
"""And that these must not be divided."""
IN_CI = {"sequences first", "LSTM over the batch"}
DIVIDED = {"count": 2, "size": 4, "how": "", "where": "", "arguments": ["4"]}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each not in IN_CI)) for each in (*SAME, *OTHER)]
)
def test_verify_agrees_with_the_plan(tmp_path, name):
    script, plan = tmp_path / "train.py", tmp_path / "plan.json"
    write(script, (SAME | OTHER)[name])
    plan.write_text(json.dumps({"plan": {}, "micro_batches": DIVIDED}))
    found = json.loads(verify_on_cpu("--plan", plan, "--json", "-", script).stdout)
    assert (found["verdict"] == "verified") is (name in SAME), found
