"""`memfit record` in rehearsal: the recorder for a real card, with the ghost in place of the card."""

import os

import pytest

from memfit.card.detect_card import detect_card
from memfit.errors import UnsuitableEnvironmentError
from support.scripts import TRAIN

STEPS = TRAIN + "    for _ in range(5): step()\n"
CARD_IS_HERE = os.path.exists("/dev/nvidia0")  # noqa: PTH110 - a device, not a file


@pytest.mark.slow
def test_a_recording_equals_the_dry_run_and_is_marked_as_a_rehearsal(record, dry_run):
    run, predicted = record(STEPS + "    print('the end')\n"), dry_run(STEPS).answer
    assert run.code == 0, run.err
    for part in ("verdict", "steps", "peak", "out_of_memory", "growth", "end"):
        assert run.answer[part] == predicted[part], part
    terms = [[(t["name"], t["bytes"]) for t in answer["terms"]] for answer in (run.answer, predicted)]
    assert terms[0] == terms[1]
    assert run.answer["device"]["total"] == predicted["device"]["total"]
    assert run.answer["device"]["in_use"] == 0
    assert "the end" not in run.out
    # Figures of the ghost in place of a card never count as measured.
    assert run.answer["device"]["machine"] == "rehearsal"
    assert "measured" not in {term["provenance"] for term in run.answer["terms"]}
    assert "REHEARSAL" in run.out
    assert "recorded on this GPU" not in run.out
    assert run.answer["versions"]["driver"] == "memfit ghost"
    assert run.answer["versions"]["cudnn"].isdecimal()


@pytest.mark.slow
def test_a_recording_patches_neither_gpu_reads_nor_host_memory(record):
    # On the bare ghost a loss reads 0.0; dry-run would return 1.0 and leave large CPU tensors unfilled.
    script = STEPS + "    print('loss', torch.ones(1, device='cuda').exp().item())\n"
    script = script.replace("range(5)", "range(2)") + "    print('cpu', torch.randn(1 << 21).any().item())\n"
    run = record(script)
    assert "loss 0.0" in run.out
    assert "cpu True" in run.out
    assert run.answer["notes"] == []


@pytest.mark.slow
def test_to_end_lets_the_script_finish(record):
    run = record(STEPS + "    print('the end')\n", "--to-end")
    assert run.answer["steps"] == 5
    assert run.answer["end"]["reason"] == "end"
    assert "the end" in run.out


@pytest.mark.slow
def test_the_default_trace_is_kept_and_never_overwritten(record, tmp_path):
    first = record(STEPS)
    trace = tmp_path / "run.memfit"
    before = trace.read_bytes()
    assert "memfit explain run.memfit" in first.err
    second = record(STEPS)
    assert second.code == 2
    assert "run.memfit already exists" in second.err
    assert trace.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
        pytest.param(
            "PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync", "backend:cudaMallocAsync", marks=pytest.mark.slow
        ),
    ],
)
def test_allocators_without_a_history_are_refused_by_name(record, name, value, named):
    run = record(STEPS, **{name: value})
    assert run.code == 3
    assert f"Cannot record with the allocator setting {named}: " in run.err
    assert "memfit dry-run" in run.err


def test_running_out_of_memory_is_recorded_where_it_happened(record):
    run = record("import torch; torch.empty(100 << 30, device='cuda', dtype=torch.uint8)\n")
    assert run.answer["verdict"] == "out of memory"
    assert run.answer["out_of_memory"]["requested"] == 100 << 30
    assert "To find changes that make the script fit, use memfit dry-run with --advise" in run.out


@pytest.mark.skipif(CARD_IS_HERE, reason="there is a GPU here")
def test_without_a_gpu_the_error_suggests_dry_run(memfit, tmp_path):
    (tmp_path / "script.py").write_text("")
    run = memfit("record", "script.py", card=None)
    assert run.code == 3
    assert "Cannot record script.py without a GPU: " in run.err
    assert "memfit dry-run" in run.err
    with pytest.raises(UnsuitableEnvironmentError, match="Cannot look without a GPU"):
        detect_card("look")


@pytest.mark.parametrize("options", [("--steps", "0"), ("no_such.py",)])
def test_a_wrong_command_is_refused_before_anything_runs(memfit, options):
    run = memfit("record", *options, "script.py")
    assert run.code == 2
    assert not run.out
