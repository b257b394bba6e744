"""What a training step of compiled code runs: recorded on the ghost, without a change to what is compiled."""

import textwrap

import pytest

from memfit.analysis.trial_result import TrialResult
from memfit.records import Change, Operand
from memfit.run.options import RunOptions
from memfit.run.parent import checked_script_argv
from memfit.timing.step_time import samples_and_tokens
from memfit.trials.trial_run import trial_runner

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("warm_scripts")]

SCRIPT = """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    model = nn.Sequential(Block(), Block()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model)
    for _ in range(4):
        optimizer.zero_grad()
        inputs = torch.randn(32, 64, device="cuda")
        nn.functional.mse_loss(compiled(inputs), inputs).backward()  # the loss is not compiled
        optimizer.step()
"""
PRODUCT = 2 * 32 * 64 * 256
"""Floating-point operations of one product."""
PLAIN = 4 + 4 + 3
"""Products: of the forward, for the weights, and for all inputs but the first."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    script = tmp_path_factory.mktemp("compiled") / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    options = RunOptions(unlimited=True)
    return trial_runner(checked_script_argv(script, [], options, None), options, lambda _: None)


def products(step):
    assert all(operation.flops % PRODUCT == 0 for operation in step.forward)
    return sum(operation.flops for operation in step.forward) // PRODUCT


def names(step):
    return [operation.name for operation in step.forward]


@pytest.mark.slow
def test_kernels_of_graphs_and_operations_beside_them_are_recorded(run):
    result = run(Change(operations=True), "as written")
    assert isinstance(result, TrialResult)
    step = result.operations
    assert (step.compiled, step.optimizer, step.calls, step.backward) == (True, 0, (), ())
    assert products(step) == PLAIN
    assert {operation.dtype for operation in step.forward if operation.flops} == {"float32"}
    assert names(step).count("aten.mse_loss.default") == 1
    assert names(step).count("aten.mse_loss_backward.default") == 1
    first, *others = [each for each in step.forward if each.name.startswith(("aten.addmm", "aten.mm"))]
    assert len(others) + 1 == PLAIN
    assert [each.shape for each in first.operands] == [(32, 64), (64, 256)]  # the bias is added with the ReLU
    assert [each.layout for each in first.operands] == ["", "transposed"]
    assert first.results == (Operand((32, 256), "float32"),)
    plain = run(Change(), "as written, without recording")
    for peak in ("allocated_bytes.all.peak", "reserved_bytes.all.peak"):
        assert plain.trace.statistics[peak] == result.trace.statistics[peak]


@pytest.mark.slow
def test_checkpointed_blocks_are_compiled_into_the_graph(run):
    result = run(Change({"checkpointing": {}}, operations=True), "every block")
    assert isinstance(result, TrialResult)
    assert products(result.operations) == PLAIN + 2  # the first product of each block again
    assert any("torch.compile made 1 graph." in note.text for note in result.trace.notes)


def test_a_script_can_run_as_if_it_compiled_nothing(run):
    result = run(Change(operations=True, eager=True), "without torch.compile")
    assert isinstance(result, TrialResult)
    assert not result.operations.compiled
    assert [call.kind for call in result.operations.calls][:2] == ["Sequential", "Block"]
    assert products(result.operations) == 4  # of the forward


@pytest.mark.slow
def test_graphs_that_inductor_replays_are_issued_at_once_and_their_tokens_are_known(tmp_path):
    script = tmp_path / "train.py"
    captured = SCRIPT.replace("torch.compile(model)", 'torch.compile(model, mode="reduce-overhead")')
    tokens = captured.replace("nn.Sequential(", "nn.Sequential(nn.Embedding(100, 64), ").replace(
        "compiled(inputs), inputs", "compiled(torch.randint(100, (4, 8), device='cuda')).view(32, 64), inputs"
    )
    script.write_text(textwrap.dedent(tokens))
    options = RunOptions(unlimited=True)
    runner = trial_runner(checked_script_argv(script, [], options, None), options, lambda _: None)
    result = runner(Change(), "as written")
    assert isinstance(result, TrialResult)
    step, labels = result.trace.step, result.trace.labels
    assert len(step.replays) == 2  # of the forward, and of the backward
    assert step.host.operations < len(step.order)
    assert samples_and_tokens(step, labels) == (4, 32)
