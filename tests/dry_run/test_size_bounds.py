"""Figures that rest on the largest possible size are upper bounds, and the verdict says so."""

import pytest

pytestmark = [pytest.mark.process, pytest.mark.warm]
SCRIPT = """
    import torch
    x = torch.randn(1 << 26, device="cuda")
    kept = x[x > 0]
    print("peak", torch.cuda.max_memory_reserved())
"""


def test_an_upper_bound_is_named_with_its_operator_and_line(dry_run):
    run = dry_run(SCRIPT)
    assert "needs at most" in run.out.splitlines()[1]
    assert "At most: the size of nonzero depends on GPU values" in run.out
    assert "--values script.py:4=… sets it" in run.out
    assert run.answer["upper_bound"] == {
        "operator": "nonzero",
        "where": f"{run.folder / 'script.py'}:4",
        "bytes": 805306368,
    }


def test_an_upper_bound_that_does_not_fit_may_fit(dry_run):
    run = dry_run(SCRIPT, options=("--memory", "1536MiB", "--fail"))
    assert (run.answer["verdict"], run.code) == ("may not fit", 1), run.err
    assert "MAY NOT FIT   needs at most 1.56 GiB; this GPU has 1.50 GiB" in run.out


def test_a_size_that_the_user_gives_is_no_upper_bound(dry_run):
    run = dry_run(SCRIPT, options=("--values", "script.py:4=25%,unique=3"))
    assert run.answer["upper_bound"] is None
    assert "FITS   needs 1." in run.out
    texts = [note["text"] for note in run.answer["notes"]]
    assert (
        "A size depends on GPU values: the user assumes that nonzero finds 16,777,216 of at most 67,108,864 "
        "elements (--values script.py:4=25%)." in texts
    )
    assert "--values unique=3 had no effect: the script read no GPU value that it applies to." in texts


def test_a_size_given_for_a_line_holds_in_its_backward(dry_run):
    """The backward of a mask finds its elements again, on a thread without Python frames."""
    script = """
        import torch
        y = torch.rand(1 << 26, device="cuda", requires_grad=True).exp()
        for _ in range(2):
            loss = y[y > 0].sum()
            loss.backward(retain_graph=True)
    """
    for options, bound in (("--values", "script.py:5=25%"), False), ((), True):
        run = dry_run(script, options=options)
        assert run.answer["verdict"] == "fits", run.err
        assert bool(run.answer["upper_bound"]) == bound
        (note,) = [note for note in run.answer["notes"] if note["text"].startswith("A size depends")]
        assert note["where"] == f"{run.folder / 'script.py'}:5"


def test_what_training_needs_anyway_does_not_follow_from_a_size(dry_run):
    """Gradients, workspaces and what an optimizer allocates come after it in the same lines, too."""
    script = """
        import torch
        model = torch.nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        losses = model(torch.ones(8, 1024, device="cuda")).square().mean(1)
        hard = (losses > losses.median()).nonzero()[:, 0]
        losses[hard].mean().backward()
        optimizer.step()
    """
    run = dry_run(script)
    assert run.answer["peak"]["phase"] == "optimizer"
    assert run.answer["upper_bound"]["operator"] == "nonzero"
    assert 8 * 8 <= run.answer["upper_bound"]["bytes"] < 1024  # the indices


def test_what_pytorch_selects_to_print_a_tensor_is_no_upper_bound(dry_run):
    script = """
        import torch
        print(torch.randn(8, device="cuda"))
        x = torch.empty(1 << 20, device="cuda")
    """
    run = dry_run(script)
    assert run.answer["verdict"] == "fits", run.err
    assert run.answer["upper_bound"] is None
