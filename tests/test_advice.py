"""Following memfit's advice literally gives the predicted figures, to the byte."""

import json
import os
import subprocess
import sys
import textwrap

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
"""Nearly all memory is activations."""


def followed(script, advice):
    """Return the script and the environment of a user who follows the advice."""
    environment = dict(os.environ)
    for piece in advice:
        how = piece["how"]
        if how.startswith("PYTORCH_ALLOC_CONF="):
            environment |= [how.split("=", 1)]
        elif how.startswith("fused=True"):
            script = script.replace("parameters())", "parameters(), fused=True)")
        else:  # it names all strategies advised so far
            script = "\n".join(line for line in script.splitlines() if "memfit.apply" not in line)
            script = script.replace("    print(", f"    import memfit; {how}\n    print(")
    return script, environment


def test_advice_for_a_peak_in_the_optimizer_gives_the_predicted_peak(dry_run):
    run = dry_run(TRAIN, *WIDE, options=("--advise", "--html", "report.html"))
    (piece,) = run.answer["advice"]
    assert piece["what"] == "fused optimizer"
    assert run.out.count("training\n") == 1  # trial runs print nothing
    assert "<b>fused optimizer</b>" in (run.folder / "report.html").read_text()
    script, environment = followed(TRAIN, [piece])
    rerun = dry_run(script, *WIDE, env=environment).answer
    assert rerun["peak"]["process"] == piece["needs"]["bytes"]
    assert run.answer["peak"]["process"] == piece["needs"]["bytes"] + piece["saves"]["bytes"]


def test_following_the_advice_gives_the_predicted_figures(dry_run):
    small = ("--memory", "1300MiB")
    run = dry_run(TRAIN, *LONG, options=("--advise", *small))
    assert run.answer["verdict"] == "out of memory"
    advice = run.answer["advice"]
    assert [(piece["what"], piece["fits"]) for piece in advice] == [
        ("expandable segments", False),
        ("checkpoint the repeated blocks", False),
        ("offload activations", True),
    ]
    needed = dry_run(TRAIN, *LONG, options=NO_LIMIT).answer["peak"]["process"]
    assert f"Needs {needed / 2**30:.2f} GiB; this GPU has" in run.out
    for number, piece in enumerate(advice, 1):
        script, environment = followed(TRAIN, advice[:number])
        rerun = dry_run(script, *LONG, options=NO_LIMIT, env=environment).answer
        assert rerun["peak"]["process"] == piece["needs"]["bytes"] == needed - piece["saves"]["bytes"]
        needed = piece["needs"]["bytes"]
    then = dry_run(script, *LONG, options=small, env=environment).answer
    assert then["verdict"] == "tight"  # it fits, but for the error of the assumed context
    assert then["out_of_memory"] is None


def test_advice_works_for_a_compiled_loop_that_does_not_call_its_model(dry_run):
    """The advice is for the model, and applies to the compiled one."""
    begin, net, rest = TRAIN.partition("class Net")
    script = begin + net + rest.replace("forward", "training_step")
    script = script.replace("while", 'step = torch.compile(model.training_step, backend="eager")\n    while')
    script = script.replace("loss = model(", "loss = step(")
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    once = ("--steps", "1")
    (piece,) = dry_run(script, *LONG, options=("--advise", *once), env=environment).answer["advice"]
    assert piece["how"] == "memfit.apply(model, [memfit.Checkpointing()])  # after creating Net"
    script, _ = followed(script, [piece])
    rerun = dry_run(script, *LONG, options=once, env=environment).answer
    assert rerun["peak"]["process"] == piece["needs"]["bytes"]


def test_a_script_that_cannot_be_rerun_unattended_is_reported(dry_run):
    """The script waits for input, which a rerun does not get."""
    reader, writer = os.pipe()
    os.write(writer, b"y\n")
    script = "answer = input()\n" + textwrap.dedent(TRAIN)
    run = dry_run(script, *LONG, options=("--advise", "--memory", "600MiB"), stdin=reader)
    os.close(writer)
    os.close(reader)
    assert run.code == 0
    assert (run.answer["advice"], run.answer["in_all"]) == ([], None)
    assert "script.py failed before it used the GPU: EOFError" in run.answer["untried"]["exception"]
    assert "No advice: when the script was run again without input, script.py failed" in run.out
    assert "How much memory the script needs in total is unknown: a second run," in run.out
    assert run.err.count("memfit runs the script again, without terminal input") == 1


def test_explain_reruns_nothing_and_tries_settings_only(dry_run):
    run = dry_run(TRAIN, *LONG, options=("-o", "run.memfit"))
    assert run.answer["advice"] is None
    (run.folder / "script.py").write_text("open('ran', 'w')")
    command = [sys.executable, "-m", "memfit", "explain", "run.memfit", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=run.folder)
    assert [piece["what"] for piece in json.loads(done.stdout)["advice"]] == ["expandable segments"]
    assert not (run.folder / "ran").exists()
