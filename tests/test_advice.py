"""What memfit advises was tried: who follows it to the letter gets what it says, to the byte."""

import json
import os
import subprocess
import sys

NO_LIMIT = ("--memory", "2TiB")
TRAIN = """
    import sys
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        def forward(self, x):
            return x + self.down(torch.nn.functional.gelu(self.up(x)))

    class Net(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.blocks = nn.ModuleList(Block(width) for _ in range(8))
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    width, batch = int(sys.argv[1]), int(sys.argv[2])
    model = Net(width).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    print("training")
    while True:
        optimizer.zero_grad()
        loss = model(torch.randn(batch, width, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
"""
WIDE = ("1024", "512")
"""The peak is in the optimizer, and without its temporaries in the backward."""
LONG = ("256", "32768")
"""Nearly all is activations."""


def followed(script, advice):
    """Return the script, and the environment, as someone who does what the advice says."""
    environment = dict(os.environ)
    for one in advice:
        how = one["how"]
        if how.startswith("PYTORCH_ALLOC_CONF="):
            environment |= [how.split("=", 1)]
        elif how.startswith("fused=True"):
            script = script.replace("parameters())", "parameters(), fused=True)")
        else:  # it names all strategies there are so far
            script = "\n".join(line for line in script.splitlines() if "memfit.apply" not in line)
            script = script.replace("    print(", f"    import memfit; {how}\n    print(")
    return script, environment


def test_a_peak_in_the_optimizer(dry_run):
    run = dry_run(TRAIN, *WIDE, options=("--advise", "--html", "report.html"))
    (one,) = run.answer["advice"]
    assert one["what"] == "fused optimizer"
    assert run.out.count("training\n") == 1  # what is tried is silent
    assert "<b>fused optimizer</b>" in (run.folder / "report.html").read_text()
    script, environment = followed(TRAIN, [one])
    again = dry_run(script, *WIDE, env=environment).answer
    assert again["peak"]["process"] == one["needs"]["bytes"]
    assert run.answer["peak"]["process"] == one["needs"]["bytes"] + one["saves"]["bytes"]


def test_who_follows_it_until_it_fits_gets_what_it_says(dry_run):
    small = ("--memory", "1300MiB")
    run = dry_run(TRAIN, *LONG, options=("--advise", *small))
    assert run.answer["verdict"] == "out of memory"
    advice = run.answer["advice"]
    assert [(one["what"], one["fits"]) for one in advice] == [
        ("expandable segments", False),
        ("checkpoint the repeated blocks", False),
        ("offload activations", True),
    ]
    needed = dry_run(TRAIN, *LONG, options=NO_LIMIT).answer["peak"]["process"]
    assert f"In all it needs {needed / 2**30:.2f} GiB" in run.out
    for number, one in enumerate(advice, 1):
        script, environment = followed(TRAIN, advice[:number])
        again = dry_run(script, *LONG, options=NO_LIMIT, env=environment).answer
        assert again["peak"]["process"] == one["needs"]["bytes"] == needed - one["saves"]["bytes"]
        needed = one["needs"]["bytes"]
    assert dry_run(script, *LONG, options=small, env=environment).answer["verdict"] == "fits"


def test_what_is_done_already_is_no_advice(dry_run):
    script = TRAIN.replace(
        "    print(", "    import memfit; memfit.apply(model, memfit.Checkpointing())\n    print("
    )
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    run = dry_run(script, *LONG, options=("--advise",), env=environment)
    assert run.answer["advice"] == []
    assert "Nothing was found that saves 1 %" in run.out


def test_explaining_a_trace_runs_nothing_and_tries_settings_alone(dry_run):
    run = dry_run(TRAIN, *LONG, options=("-o", "run.memfit"))
    assert run.answer["advice"] is None
    (run.folder / "script.py").write_text("open('ran', 'w')")
    command = [sys.executable, "-m", "memfit", "explain", "run.memfit", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=run.folder)
    assert [one["what"] for one in json.loads(done.stdout)["advice"]] == ["expandable segments"]
    assert not (run.folder / "ran").exists()
