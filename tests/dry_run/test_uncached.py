"""Scripts without PyTorch's caching allocator, or that empty its cache at every step."""

import os

import pytest

from memfit.run.script_end import classify_script_end
from support.scripts import figures

pytestmark = pytest.mark.warm

MIB = 1 << 20
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
POOLED = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
FILL = """
    import torch
    held = []
    for _ in range(100):
        held.append(torch.empty(300 * 2**20, dtype=torch.uint8, device="cuda"))
"""


def with_environment(**variables):
    return {"env": {**os.environ, **variables}}


def test_without_a_cache_every_tensor_is_rounded_like_cuda_malloc(dry_run):
    script = """
        import torch
        small = torch.empty(1, device="cuda")
        large = torch.empty(1024 * 1024 + 1, dtype=torch.uint8, device="cuda")
        gone = torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
        del gone
        print(torch.cuda.memory_allocated())
    """
    run = dry_run(script, **with_environment(**UNCACHED))
    assert run.out.splitlines()[0] == "0"  # PyTorch counts nothing in this mode
    assert run.answer["peak"]["allocated"] == 512 + 2 * MIB + 4 * MIB
    assert run.answer["peak"]["reserved"] == run.answer["peak"]["allocated"]


@pytest.mark.slow
@pytest.mark.parametrize("environment", [UNCACHED, POOLED], ids=["uncached", "cudaMallocAsync"])
def test_out_of_memory_is_reported_with_the_free_bytes(environment, dry_run):
    run = dry_run(FILL, options=("--memory", "4GiB"), **with_environment(**environment))
    assert run.answer["verdict"] == "out of memory"
    failure = run.answer["out_of_memory"]
    assert failure["requested"] == 300 * MIB
    context = figures(run.answer)["CUDA context"]
    if environment is UNCACHED:  # eleven tensors fit beside the context
        assert failure["free"] == 4096 * MIB - context - 11 * 300 * MIB
    assert 0 < failure["free"] < failure["requested"]
    assert failure["shortfall"] == failure["requested"] - failure["free"]
    assert failure["line"].endswith("script.py:5")
    # No figure is exact, because CUDA's rounding is assumed.
    assert {term["provenance"] for term in run.answer["terms"]} == {"assumed"}
    assert any(
        "is assumed" in note["text"] for note in run.answer["notes"] if note["provenance"] == "assumed"
    )


def test_an_error_worded_like_cudas_that_the_script_raises_is_an_exception():
    assert classify_script_end(RuntimeError("CUDA error: out of memory")).reason == "exception"


@pytest.mark.slow
def test_emptying_the_cache_lowers_the_memory_between_steps_but_not_the_peak(dry_run):
    script = """
        import os, torch
        from torch.nn import Linear, ReLU, Sequential
        model = Sequential(Linear(1000, 4096), ReLU(), Linear(4096, 10)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(64, 1000, device="cuda")).square().mean().backward()
            optimizer.step()
            if os.environ.get("EMPTY"):
                torch.cuda.empty_cache()
        own = torch.cuda
        print(own.max_memory_allocated(), own.max_memory_reserved(), own.memory_reserved())
    """
    kept = dry_run(script, options=("--steps", "10"))
    emptied = dry_run(script, options=("--steps", "10"), **with_environment(EMPTY="1"))
    for run in (kept, emptied):
        allocated, reserved, _ = map(int, run.out.splitlines()[0].split())
        assert (run.answer["peak"]["allocated"], run.answer["peak"]["reserved"]) == (allocated, reserved)
    assert emptied.answer["peak"] == kept.answer["peak"]
    assert emptied.answer["growth"] == kept.answer["growth"]
    assert int(emptied.out.split()[2]) < int(kept.out.split()[2])
