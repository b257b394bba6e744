"""The smallest GPU that a replay finds for a job: the job fits on it, and with 2 MiB less it does not.

The job runs under PyTorch's default settings, and its trace is replayed under others. Dry runs under these,
with enough memory, with the capacity found, and with less, must say the same.
"""

import json
from pathlib import Path

import pytest

import memfit
from support import warm_process

pytestmark = [pytest.mark.process, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
MIB = 1 << 20
CONFS = ("", "expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:8")
JOBS = (
    *("gan.py --steps 3", "gpt.py --steps 3", "resnet50.py --images 96", "accumulation.py --steps 3"),
    *(
        "checkpointed.py --steps 3",
        "amp_gradscaler.py --steps 3",
        "mlp.py --epochs 1",
        "vit_l16.py --steps 3",
    ),
    *("hf_trainer.py --steps 3", "unet.py --steps 3"),
)


def run(folder, job, conf, *options):
    """Return the JSON of a dry run."""
    script, *arguments = job.split()
    command = ("dry-run", "--steps", "1000", "--json", "answer.json", *options, "--", EXAMPLES / script)
    warm_process.memfit(*map(str, command), *arguments, cwd=folder, PYTORCH_ALLOC_CONF=conf)
    return json.loads((folder / "answer.json").read_text())


def fits(answer):
    """Return whether no allocation failed.

    A workspace of cuDNN that fails, and that PyTorch does without, counts: the replay repeats the requests.
    """
    without = any("workspaces that cuDNN suggested did not fit" in note["text"] for note in answer["notes"])
    return answer["out_of_memory"] is None and not without


@pytest.mark.parametrize(("job", "conf"), [*zip(JOBS, CONFS * 3, strict=False)])
def test_a_job_fits_on_the_smallest_gpu_and_not_with_2_mib_less(job, conf, tmp_path):
    run(tmp_path, job, "", "-o", "run.memfit")
    compared = memfit.replay(tmp_path / "run.memfit", [conf], smallest=True)
    row = next(row for row in compared.outcomes if row.setting.conf == conf)
    assert run(tmp_path, job, conf)["peak"]["reserved"] == row.replay.peak_reserved
    assert fits(run(tmp_path, job, conf, "--memory", f"{row.smallest}"))
    assert not fits(run(tmp_path, job, conf, "--memory", f"{row.smallest - 2 * MIB}"))
