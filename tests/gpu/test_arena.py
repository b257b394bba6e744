"""On a real GPU: training in an arena is bit-identical and uses the memory that was planned."""

import json
import subprocess
import sys

import pytest

from memfit.card.detect_card import detect_card
from memfit.errors import MemfitError

pytestmark = [pytest.mark.gpu, pytest.mark.process]
STEPS = 8
JOB = """
    import hashlib, json, os, sys
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    from contextlib import nullcontext
    import torch
    from torch import nn
    import memfit
    arena = memfit.arena(device="cuda") if sys.argv[1] == "arena" else None
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3, 2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(128, 10),
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    images, side = torch.randn(64, 3, 96, 96).pin_memory(), torch.cuda.Stream()
    digest, taken = hashlib.sha256(), []
    for _ in range(int(sys.argv[2])):
        with arena.train(images) if arena else nullcontext():
            with torch.cuda.stream(side):
                batch = images.cuda(non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            batch.record_stream(torch.cuda.current_stream())
            loss = model(batch).square().mean()
            loss.backward()
            digest.update(loss.detach().cpu().numpy())
            for parameter in model.parameters():
                digest.update(parameter.grad.cpu().numpy())
            optimizer.step()
            optimizer.zero_grad()
            del batch, loss
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        taken.append(total - free)
    try:
        torch.empty(total, dtype=torch.uint8, device="cuda")
        message = ""
    except torch.OutOfMemoryError as error:
        message = str(error)
    kinds = arena.report().steps if arena else ()
    placed = [[kind.placed, kind.unplanned, kind.planned, kind.live] for kind in kinds]
    print(json.dumps([digest.hexdigest(), taken, message, placed]))
"""


def trained(tmp_path, allocator):
    path = tmp_path / "job.py"
    path.write_text("\n".join(line[4:] for line in JOB.splitlines()))
    command = [sys.executable, str(path), allocator, str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_training_in_an_arena_is_bit_identical(tmp_path):
    try:
        card = detect_card("test a GPU")
    except MemfitError as error:
        pytest.skip(str(error))
    assert not card.rehearsal
    expected, default_taken, _, _ = trained(tmp_path, "default")
    digest, taken, message, ((placed, unplanned, planned, live),) = trained(tmp_path, "arena")
    assert digest == expected
    assert placed >= STEPS - 4
    assert unplanned == placed  # the batch, which another stream copies
    assert planned == live
    print(default_taken, taken, file=sys.stderr)
    assert len(set(taken[-placed:])) == 1
    assert taken[-1] < default_taken[-1]
    assert message.startswith("CUDA out of memory. Tried to allocate")
