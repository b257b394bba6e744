"""Runs that lack updates, and what a script read in their place."""

import pytest

pytestmark = pytest.mark.warm


OVERFLOWS = """
    import torch
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        loss = model(torch.ones(64, 1024, device="cuda")).square().mean()
        loss.backward()
        overflow = torch.zeros(1, dtype=torch.int32, device="cuda")
        overflow += (loss > 1e9).int()
        if overflow.item() > 0:
            continue
        optimizer.step()
"""


def test_a_run_that_skips_every_update_is_incomplete_and_names_the_value_that_it_read(dry_run):
    run = dry_run(OVERFLOWS)
    assert (run.code, run.answer["verdict"]) == (3, "unknown")
    assert run.out.startswith("INCOMPLETE ")
    never = "The script ran 4 backward passes, and its optimizers never stepped: "
    assert run.out.splitlines()[1:4] == [
        f"{never}the figures lack what these updates need.",
        "A GPU value that the script read may be why. The ghost computes none, and returned:",
        "  1 for an integer at script.py:10 (to try another: --values script.py:10=0)",
    ]
    assert run.err == ""
    run = dry_run(OVERFLOWS, options=("--values", "script.py:10=0"))
    assert (run.code, run.answer["verdict"], run.answer["steps"]) == (0, "fits", 3)
    assert run.answer["end"]["missing_updates"] == ""
    assert run.answer["end"]["stand_ins"] == []


def test_updates_skipped_after_the_first_make_a_run_incomplete(dry_run):
    script = OVERFLOWS.replace("if overflow.item() > 0:", "if step and overflow.item() > 0:")
    run = dry_run(script.replace("for _ in", "for step in"))
    assert (run.code, run.answer["verdict"], run.answer["steps"]) == (3, "unknown", 1)
    assert run.answer["end"]["missing_updates"] == "3 of 4 updates were skipped"
    assert [read["instead"] for read in run.answer["end"]["stand_ins"]] == ["script.py:10=0"]


def test_each_optimizer_with_gradients_must_step(dry_run):
    script = """
        import torch
        first, second = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8).cuda()
        optimizers = [torch.optim.Adam(each.parameters()) for each in (first, second)]
        for _ in range(3):
            loss = second(first(torch.ones(2, 8, device="cuda"))).square().mean()
            loss.backward()
            optimizers[0].step()
            if not (loss > 1e9).int().item():
                optimizers[1].step()
    """
    run = dry_run(script)
    assert (run.code, run.answer["steps"]) == (3, 0)
    assert run.answer["end"]["missing_updates"].startswith("1 of 2 optimizers never stepped")
    unused = script.replace("int().item()", "int()").replace(
        "for each in (first, second)", "for each in (first, first)"
    )
    run = dry_run(unused.replace("if not (loss > 1e9).int():", "if False:"))
    assert (run.code, run.answer["verdict"], run.answer["steps"]) == (0, "fits", 3)
    assert run.answer["growth"]["steady_from"] == 1


def test_accumulation_whose_last_batches_complete_no_update_is_a_whole_run(dry_run):
    script = """
        import torch
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for n in range(11):
            loss = model(torch.ones(8, 64, device="cuda")).square().mean()
            loss.backward()
            print(loss.item())
            if n % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
        print(loss.item())
    """
    run = dry_run(script)
    assert (run.code, run.answer["verdict"], run.answer["steps"]) == (0, "fits", 2)
    assert "This result covers the whole run: 2 training steps." in run.out


def test_backward_passes_in_eval_mode_after_training_are_no_skipped_updates(dry_run):
    script = """
        import torch
        model = torch.nn.Linear(64, 8).cuda()
        optimizer, loss_of = torch.optim.Adam(model.parameters()), torch.nn.MSELoss()
        target = torch.zeros(16, 8, device="cuda")
        x = torch.ones(16, 64, device="cuda", requires_grad=True)
        loss_of(model(x), target).backward()
        optimizer.step()
        model.eval()
        for _ in range(4):  # an attack on the trained model
            loss = loss_of(model(x), target)
            loss.backward()
            print(loss.item())
    """
    run = dry_run(script)
    assert (run.code, run.answer["verdict"], run.answer["steps"]) == (0, "fits", 1)
    run = dry_run(script.replace("model.eval()", ""))  # reads that are only printed skip no update
    assert (run.code, run.answer["verdict"], run.answer["steps"]) == (0, "fits", 1)
    decides = "if loss.item() > 0: continue"
    run = dry_run(script.replace("model.eval()", "").replace("print(loss.item())", decides))
    assert run.answer["end"]["missing_updates"] == "4 of 5 updates were skipped"


SKIPS = """
    import torch
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for n in range(4):
        loss = model(torch.ones(8, 64, device="cuda")).square().mean()
        if loss.item() < 1.5: continue
        loss.backward()
        optimizer.step()
"""


@pytest.mark.slow
def test_updates_skipped_before_their_backward_make_a_run_incomplete_and_the_read_is_named(dry_run):
    run = dry_run(SKIPS)
    assert (run.code, run.answer["verdict"], run.answer["steps"]) == (3, "unknown", 0)
    assert "The script made an optimizer and ran no backward pass for its updates: " in run.out
    assert "1.0 for a float at script.py:7 (to try another: --values script.py:7=0)" in run.out
    run = dry_run(SKIPS, options=("--values", "script.py:7=2"))
    assert (run.code, run.answer["verdict"], run.answer["steps"]) == (0, "fits", 3)


@pytest.mark.parametrize("grad", ["with torch.no_grad():", "if not model.eval().training:"])
def test_a_script_that_only_evaluates_fits_although_it_has_an_optimizer(dry_run, grad):
    evaluates = SKIPS.replace("    for n", f"    {grad}\n      for n").replace("    loss.", "      loss.")
    evaluates = evaluates.replace("loss =", "  loss =").replace("if loss", "  if loss")
    run = dry_run(evaluates.replace("optimizer.step", "  optimizer.step"))
    assert (run.code, run.answer["verdict"], run.answer["steps"]) == (0, "fits", 0)


def test_a_run_that_a_stand_in_may_have_ended_is_not_called_whole(dry_run):
    script = SKIPS.replace("loss.item() < 1.5: continue", "n and loss.item() < 1.5: break")
    run = dry_run(script)
    assert (run.code, run.answer["verdict"], run.answer["steps"]) == (0, "fits", 1)
    _, covers, branches, read, *_ = run.out.splitlines()
    assert covers == "This result covers the branches that ran: 1 training step."
    assert branches.startswith("On a GPU, the script may take other branches: it decides by GPU values. ")
    assert read == "  1.0 for a float at script.py:7 (to try another: --values script.py:7=0)"
    assert run.answer["end"]["stand_ins"][0]["instead"] == "script.py:7=0"
    run = dry_run(script.replace("if n and loss.item() < 1.5: break", "print(loss.item())"))
    assert run.answer["steps"] == 3


LABELS = """
    import torch

    class Student(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.expert = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x):
            y = self.layer(x)
            if EXPERT:
                y = y + self.expert(x)
            return y

    model = Student().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    best = 9
    for n in range(4):
        loss = model(torch.ones(8, 64, device="cuda")).square().mean()
        sure = model(torch.rand(4096, 64, device="cuda")).softmax(1) > 0.9
        if LABEL:
            loss = loss + model(torch.rand(4096, 64, device="cuda")).square().mean()
        if not torch.isfinite(loss):
            model, loss = Student().cuda(), model(torch.ones(8, 64, device="cuda")).mean()
        if loss.item() < best:
            best, parameters = loss.item(), len([*model.parameters()])
            print("best", best)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("label", "expert", "lines"),
    [
        pytest.param("sure.any()", "x.size(0) > 0", [21], marks=pytest.mark.slow),
        pytest.param("not sure.any()", "(x > 2).any()", [11], marks=pytest.mark.slow),
        pytest.param(
            "n == 0 or not sure.any()",
            "(x < 9).any().item() or self.training",
            [],
            marks=pytest.mark.slow,
        ),
        ("sure.float().mean().item() > 1.5", "(x > 2).any() and self.training", [11, 21]),
    ],
)
def test_a_branch_with_a_model_that_a_stand_in_leaves_out_is_named(dry_run, label, expert, lines):
    for options in ("--to-end",), ():
        run = dry_run(LABELS.replace("LABEL", label).replace("EXPERT", expert), options=options)
        assert (run.code, run.answer["verdict"]) == (0, "fits")
        assert (
            sorted(int(read["where"].rpartition(":")[2]) for read in run.answer["end"]["stand_ins"]) == lines
        )
        assert ("may take other branches" in run.out) == bool(lines)
        assert ("covers the whole run" in run.out) == (not lines and bool(options))


def test_updates_by_hand_need_no_step_of_an_optimizer(dry_run):
    by_hand = "with torch.no_grad(): model.weight.sub_(model.weight.grad)"
    script = SKIPS.replace("optimizer.step()", by_hand).replace("if loss.item() < 1.5: continue", "")
    stops = "\n        if loss.item() < 0.5: break"
    run = dry_run(script.replace(by_hand, by_hand + stops), without_step="it updates by hand")
    assert (run.code, run.answer["verdict"]) == (0, "fits")
    run = dry_run(script.replace(by_hand, stops))
    assert "The script ran 4 backward passes, and its optimizers never stepped" in run.out


def test_steps_of_an_optimizer_without_gradients_are_no_updates(dry_run):
    stale = "Adam(torch.nn.Linear(64, 64).cuda().parameters())"
    script = SKIPS.replace("if loss.item() < 1.5: continue", "")
    run = dry_run(script.replace("Adam(model.parameters())", stale))
    assert (run.code, run.answer["verdict"]) == (3, "unknown")
    assert "its optimizers never stepped, or without gradients" in run.out


def test_a_script_that_gives_up_names_the_values_that_it_read(dry_run):
    script = OVERFLOWS.replace("continue", "raise SystemExit(17)")
    run = dry_run(script)
    assert run.code == 3
    assert "The script ended with exit code 17" in run.out
    assert "1 for an integer at script.py:10 (to try another: --values script.py:10=0)" in run.out
