"""Models that a script saves whole have no plan in their file, and keep it in the script."""

import textwrap

import pytest

from support import warm_process

pytestmark = pytest.mark.process

SCRIPT = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        def forward(self, x):
            return self.last(self.first(x))

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(8, 8)).sum().backward()
        optimizer.step()
        torch.save({"models": [model]}, "saved.pt")
    with torch.serialization.safe_globals([Net, nn.Linear]):
        (loaded,) = torch.load("saved.pt")["models"]
    assert all("forward" not in vars(part) for part in loaded.modules())
    assert torch.allclose(loaded(torch.ones(8, 8)), model(torch.ones(8, 8)))  # a CPU rounds slices otherwise
    print("planned", [name for name, part in model.named_modules() if "forward" in vars(part)])
"""


@pytest.mark.parametrize(
    ("settings", "planned"),
    [
        ({"batch_slices": {"count": 2}}, "['']"),
        ({"checkpointing": {"modules": "first"}, "batch_slices": {"count": 2}}, "['', 'first']"),
    ],
)
def test_a_saved_model_loads_where_only_its_own_classes_are_allowed(
    python, plan_file, tmp_path, settings, planned
):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    trained = python("--plan", plan_file(settings), script, start=warm_process.train)
    assert trained.code == 0, trained.err
    assert f"planned {planned}" in trained.out
