"""Following memfit's advice literally gives the predicted figures, to the byte."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

from support.scripts import FEED_FORWARD

pytestmark = pytest.mark.warm

NO_LIMIT = ("--memory", "2TiB")
TRAIN = f"""{FEED_FORWARD}
    import sys

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


TRAIN_WITH_OPTIONS = """
    import argparse
    from torch.utils.checkpoint import checkpoint

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32768)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    args = parser.parse_args()
""" + TRAIN.replace(
    "x = block(x)", "x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)"
).replace("width, batch = int(sys.argv[1]), int(sys.argv[2])", "width, batch = 256, args.batch_size").replace(
    "model = ", "recompute = args.gradient_checkpointing\n    model = "
)
LOADED = TRAIN.replace(
    "while True:", "for x, in DataLoader(TensorDataset(torch.randn(2**17, width)), batch):"
)
LOADED = LOADED.replace('torch.randn(batch, width, device="cuda")', "x.cuda()").replace(
    "import torch\n", "import torch\n    from torch.utils.data import DataLoader, TensorDataset\n", 1
)


def accumulating(script, condition):
    """Return a script that makes an update, and clears gradients, on a condition."""
    script = script.replace("optimizer.zero_grad()", "step = globals().get('step', -1) + 1")
    update = "optimizer.step(); optimizer.zero_grad()"
    return script.replace("optimizer.step()", f"{condition.partition('  #')[0]} {update}")


def followed(script, piece):
    """Return the script and the variables of a user who follows a piece of advice."""
    environment = {}
    for how in piece["how"]:
        if how.startswith("PYTORCH_ALLOC_CONF="):
            environment |= [how.split("=", 1)]
        elif how.startswith("fused=True"):
            script = script.replace("parameters())", "parameters(), fused=True)")
        elif how.startswith("DataLoader("):
            script = script.replace(", batch):", f", {re.search('[0-9]+', how)[0]}):")
        elif how.startswith("loss = "):
            script = script.replace("loss.backward()", f"{how}\n        loss.backward()")
        elif how.startswith("if (step + 1)"):
            script = accumulating(script, how)
        elif how.startswith("--"):
            continue  # the script's own options
        else:
            script = script.replace("    print(", f"    {how}\n    print(")
    return script, environment


def test_advice_for_a_peak_in_the_optimizer_gives_the_predicted_peak(dry_run):
    run = dry_run(TRAIN, *WIDE, options=("--advise", "--html", "report.html"))
    (piece,) = run.answer["advice"]
    assert piece["changes"] == ["fused optimizer"]
    assert run.out.count("training\n") == 1  # trial runs print nothing
    assert "<b>fused optimizer</b>" in (run.folder / "report.html").read_text()
    script, environment = followed(TRAIN, piece)
    rerun = dry_run(script, *WIDE, environment=environment).answer
    assert rerun["peak"]["process"] == piece["needs"]["bytes"]
    assert run.answer["peak"]["process"] == piece["needs"]["bytes"] + piece["saves"]["bytes"]


@pytest.mark.slow
def test_a_combination_gives_the_predicted_figures(dry_run):
    """Checkpointing moves the peak to the optimizer. memfit does not know the batch size here."""
    both = ("1024", "2048")
    run = dry_run(TRAIN, *both, options=("--advise", "--memory", "1880MiB"))
    assert run.answer["verdict"] == "out of memory"
    piece, *_ = run.answer["advice"]
    assert piece["changes"] == ["checkpoint the repeated blocks", "fused optimizer"]
    assert "memfit did not try a smaller batch" in run.out
    script, environment = followed(TRAIN, piece)
    rerun = dry_run(script, *both, options=NO_LIMIT, environment=environment).answer
    assert rerun["needs"]["bytes"] == piece["needs"]["bytes"]
    assert run.answer["needs"]["bytes"] == piece["needs"]["bytes"] + piece["saves"]["bytes"]
    then = dry_run(script, *both, options=("--memory", "1880MiB"), environment=environment).answer
    assert then["verdict"] == "fits"


@pytest.mark.slow
def test_the_scripts_own_options_are_found_and_tried(dry_run):
    """The option for the batch size makes parts of a batch, together with two lines in the loop."""
    run = dry_run(TRAIN_WITH_OPTIONS, options=("--advise", "--memory", "2GiB"))
    parts, checkpointing, *_ = run.answer["advice"]
    assert parts["changes"] == ["4 micro-batches of 8192"]
    assert parts["how"][:2] == ["--batch-size 8192, now 32768", "loss = loss / 4"]
    assert checkpointing["how"] == ["add --gradient-checkpointing to the script's options"]
    for piece, arguments in (
        (parts, ("--batch-size", "8192")),
        (checkpointing, ("--gradient-checkpointing",)),
    ):
        assert piece["fits"]
        script = followed(TRAIN_WITH_OPTIONS, piece)[0] if piece is parts else TRAIN_WITH_OPTIONS
        rerun = dry_run(script, *arguments, options=NO_LIMIT).answer
        assert rerun["needs"]["bytes"] == piece["needs"]["bytes"]
    assert "One sample of a batch takes" in run.out
    assert "memfit plan, given --gpu or --budget, finds the fastest mix" in run.out


@pytest.mark.slow
def test_without_an_option_the_batch_size_of_the_loader_is_tried(dry_run):
    run = dry_run(LOADED, *LONG, options=("--advise", "--memory", "2GiB"))
    piece = run.answer["advice"][0]
    assert piece["how"][0] == "DataLoader(batch_size=8192), now 32768"
    line = next(number for number, text in enumerate(LOADED.splitlines(), 1) if "for x, in" in text)
    assert piece["where"].endswith(f"script.py:{line}")
    script, _ = followed(LOADED, piece)
    rerun = dry_run(script, *LONG, options=NO_LIMIT).answer
    assert rerun["needs"]["bytes"] == piece["needs"]["bytes"]


@pytest.mark.slow
def test_a_script_that_cannot_accumulate_gets_a_smaller_batch(dry_run):
    two = TRAIN_WITH_OPTIONS.replace("optimizer.step()", "optimizer.step(); other.step()").replace(
        "optimizer = ", "other = torch.optim.SGD([nn.Parameter(torch.ones(1).cuda())])\n    optimizer = "
    )
    run = dry_run(two, options=("--advise", "--memory", "2GiB"))
    (piece, *_) = run.answer["advice"]
    assert (piece["changes"], piece["how"]) == (
        ["batch size 16384 instead of 32768"],
        ["--batch-size 16384, now 32768"],
    )
    rerun = dry_run(two, "--batch-size", "16384", options=NO_LIMIT).answer
    assert rerun["needs"]["bytes"] == piece["needs"]["bytes"]


@pytest.mark.slow
def test_advice_works_for_a_compiled_loop_that_does_not_call_its_model(dry_run):
    """The advice is for the model, and applies to the compiled one."""
    begin, net, rest = TRAIN.partition("class Net")
    script = begin + net + rest.replace("forward", "training_step")
    script = script.replace("while", 'step = torch.compile(model.training_step, backend="eager")\n    while')
    script = script.replace("loss = model(", "loss = step(")
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    once = ("--steps", "1")
    (piece, *_) = dry_run(script, *LONG, options=("--advise", *once), environment=environment).answer[
        "advice"
    ]
    (how,) = piece["how"]
    line = next(number for number, text in enumerate(script.splitlines(), 1) if "optim." in text)
    assert how == (
        "import memfit; memfit.apply(model, [memfit.Checkpointing()])  "
        f"# after creating Net (optimizer: script.py:{line})"
    )
    script, _ = followed(script, piece)
    rerun = dry_run(script, *LONG, options=once, environment=environment).answer
    assert rerun["needs"]["bytes"] == piece["needs"]["bytes"]


def asking(dry_run, script):
    """Run a script with advice; it waits for one line of input, which a rerun does not get."""
    reader, writer = os.pipe()
    os.write(writer, b"y\n")
    text = f"answer = input()\n{script}\n{textwrap.dedent(TRAIN)}"
    run = dry_run(text, *LONG, options=("--advise", "--memory", "600MiB"), stdin=reader)
    os.close(writer)
    os.close(reader)
    return run


@pytest.mark.slow
def test_a_fork_of_a_script_has_its_answers(dry_run):
    run = asking(dry_run, "")
    assert run.answer["advice"]
    assert run.answer["needs"]


def test_a_script_that_cannot_be_rerun_unattended_is_reported(dry_run):
    run = asking(
        dry_run, "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    assert run.code == 0
    assert (run.answer["advice"], run.answer["needs"]) == ([], None)
    assert "script.py failed before it used the GPU: EOFError" in run.answer["untried"]["exception"]
    assert "No advice: when memfit ran the script without input, script.py failed" in run.out
    assert "in total is unknown: when memfit ran the script without input, script.py failed" in run.out
    assert run.err.count("memfit: running the script again, without terminal input") == 1


def test_explain_reruns_nothing_and_tries_settings_only(dry_run):
    run = dry_run(TRAIN, *LONG, options=("-o", "run.memfit"))
    assert run.answer["advice"] is None
    (run.folder / "script.py").write_text("open('ran', 'w')")
    command = [sys.executable, "-m", "memfit", "explain", "run.memfit", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=run.folder)
    assert [piece["changes"] for piece in json.loads(done.stdout)["advice"]] == [["expandable segments"]]
    assert not (run.folder / "ran").exists()
