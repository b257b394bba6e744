"""What a loop for one process reads, changes and adds itself is as in one process, on ranks with shards."""

import textwrap

import pytest

from support.new_processes import run_python

pytestmark = pytest.mark.process


@pytest.fixture
def expect_as_alone(train_on, plan_file, tmp_path):
    """Return a function that trains a script alone and on two ranks, and compares what they print."""

    def expect(script, mode, lines):
        (tmp_path / "alone.py").write_text(textwrap.dedent(script).replace('"cuda"', '"cpu"'))
        alone = run_python("alone.py", cwd=tmp_path)
        assert len(alone.stdout.splitlines()) == lines, alone.stderr
        trained = train_on(2, script, plan_file({"sharding": {"mode": mode}}))
        assert [each.code for each in trained] == [0, 0], trained[0].err
        assert trained[0].out == alone.stdout

    return expect


CLIPPED_BY_HAND = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to("cuda")
    kept, named = [*model.parameters()], [*model.named_parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(8, 4)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        by_hand = sum(each.grad.norm().item() ** 2 for each in model.parameters()) ** 0.5
        for each in kept:
            each.grad.mul_(0.5 / by_hand)
        norm = nn.utils.clip_grad_norm_([each for _, each in named], 10.0)
        optimizer.step()
        largest = max(float(each.detach().abs().max()) for each in model.parameters())
        rows = [len(each.detach().numpy()) for each in model.parameters()]
        print(f"{by_hand:.5f} {norm:.5f} {largest:.5f} {rows} {model[2].bias.tolist()[2]:.5f}")
"""


@pytest.mark.parametrize("mode", ["fsdp2", "zero1"])
def test_a_loop_reads_whole_parameters_and_gradients(expect_as_alone, mode):
    """Norms that the loop computes itself are those of one process, not of the rank's shards."""
    expect_as_alone(CLIPPED_BY_HAND, mode, 3)


CHANGED = """
    import copy, torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to("cuda")
    average, start = copy.deepcopy(model), [each.detach().clone() for each in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    weight, x = model[0].weight, torch.randn(8, 4)
    first, second = weight.detach()[0], weight.detach()[1]
    for _ in range(3):
        with torch.no_grad():
            model(x)
            weight[0].mul_(0.9)
            model[2].bias.clamp_(-0.2, 0.2)
        far = sum((each - old).square().sum() for each, old in zip(model.parameters(), start))
        decay = sum(each.abs().sum() for each in model.parameters())
        loss = model(x).square().sum() + far + 0.01 * decay
        model.zero_grad()
        loss.backward()
        weight.grad = weight.grad * 0.5
        optimizer.step()
        with torch.no_grad():
            weight[3].mul_(0.5)
            first.add_(1.0)
            second -= first.to("cuda")
            weight[2, 1:3] = 0.25
            weight[weight.abs() < 0.1] = 0.0
            weight[1:4, 1:].clamp_(-0.3, 0.3)
            weight.t()[1].neg_()
            for row in model[2].weight:
                row.div_(row.norm().clamp(min=1.0))
            model[2].bias.unbind()[1].neg_()
            nn.init.constant_(model[2].bias, 0.3)
            model[0].bias.data = torch.linspace(-1, 1, 5).to("cuda")
            model[2].weight.data = model[2].weight.data.clamp(-0.4, 0.4)
            optimizer.state[weight]["exp_avg"][4].zero_()
            torch._foreach_lerp_([*average.parameters()][:2], [*model.parameters()][:2], 0.1)
            for old, new in list(zip(average.parameters(), model.parameters()))[2:]:
                old.mul_(0.9).add_(new, alpha=0.1)
            seen = average(x).square().sum()
        print([f"{each.detach().double().square().sum():.4f}" for each in model.parameters()], f"{seen:.4f}")
"""


def test_what_a_loop_changes_of_a_row_and_averages_is_as_in_one_process(expect_as_alone):
    expect_as_alone(CHANGED, "fsdp2", 3)


UNFROZEN = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to("cuda")
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], 0.1)
    for step in range(8):
        if step == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
        if step == 3:
            model[2].requires_grad_(False)
        if step == 4:
            model[2] = nn.Linear(5, 2).to("cuda")
            optimizer = torch.optim.Adam(model.parameters(), 0.1)
        if step == 6:
            model.append(nn.Linear(2, 2).to("cuda"))
            optimizer.add_param_group({"params": model[3].parameters()})
        loss = model(torch.randn(8, 4)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f}", [f"{each.detach().sum():.4f}" for each in model.parameters()])
"""


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_what_a_loop_unfreezes_replaces_and_adds_is_reduced(expect_as_alone, mode):
    expect_as_alone(UNFROZEN, mode, 8)


PENALTY = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(3):
        squares = sum(each.pow(2).sum() + (each * each).mean() for each in model.parameters())
        loss = model(torch.randn(8, 4)).square().sum() + 0.1 * squares + 0.1 * model[2].bias.abs().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f}", [f"{each.detach().sum():.4f}" for each in model.parameters()])
"""


def test_penalties_of_parameters_with_fewer_rows_than_ranks_are_those_of_one_process(expect_as_alone):
    expect_as_alone(PENALTY, "fsdp2", 3)
