"""The engine's peaks on the ghost equal those of the best handwritten loop, strategy by strategy."""

from pathlib import Path

import pytest

from memfit.devices import find_device
from memfit.ghost.build.runtime_library import build_ghost
from memfit.ghost.ghost_device import GhostDevice
from support.fork_pool import ForkPool, PoolJob

pytestmark = [pytest.mark.process, pytest.mark.slow]

LOOPS = Path(__file__).parents[1] / "support" / "handwritten_loops.py"
LOSS = 512
"""The allocator's smallest block, which holds one scalar. The engine sums losses in a separate tensor, so
that it does not change the user's; the hand-written loop adds to the first loss. With accumulation the scalar
is the undivided loss, which the caller of backward holds during it; a hand-written loop can delete it."""
STRATEGIES = (
    *("plain", "accumulation of 4", "clipped", "bf16 autocast", "fp16 autocast, loss scale"),
    *("fp16 autocast, accumulation, clipped", "pure bf16", "pure bf16, accumulation of 4"),
    *("bf16, float32 masters", "bf16, float32 masters, accumulation of 4", "stepped in backward"),
    *("checkpointed", "offloaded", "checkpointed, bf16 autocast, accumulation, clipped"),
)


@pytest.fixture(scope="module")
def pool():
    with ForkPool(build_ghost(), GhostDevice.of(find_device("A100-80GB"))) as pool:
        yield pool


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["gpt", "cnn"])
def test_peaks_equal_those_of_the_best_handwritten_loop(pool, model, strategy):
    def peak(entry):
        settings = {"name": model, "strategy": strategy, "entry": entry}
        return pool.run(PoolJob(f"{LOOPS}:train", settings))["allocated"]

    by_hand = peak("by hand")
    assert {peak(entry) - by_hand for entry in ("step", "windows")} <= {0, LOSS}
