"""memfit.estimate: the bytes of the equivalent script, without changing the user's objects."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import TargetError, UsageError
from memfit.records import Provenance

LOOP = """
model.to("cuda")
{optimizer}
def train():
    for _ in range(3):
        inputs = [t.to("cuda") for t in batch]
        optimizer.zero_grad()
        {forward}
        loss.backward()
        optimizer.step()
train()
"""
GROUPS = """
    import torch
    from torch import nn
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64))
    batch = (torch.randn(128, 256), torch.randint(64, (128,)))
    loss = nn.CrossEntropyLoss()
"""
TWO_GROUPS = """
optimizer = torch.optim.AdamW(
    [{"params": model[0].parameters()}, {"params": model[2].parameters(), "amsgrad": True}]
)
"""
TIED = """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=256, n_head=4, loss_type="ForCausalLM"))
    ids = torch.randint(50000, (2, 128))
    batch = (ids, ids)
    loss = None
"""
AUTOCAST = """
    import torch, torchvision
    import torch.nn.functional as F
    model = torchvision.models.resnet50()
    batch = (torch.randn(4, 3, 96, 96), torch.randint(1000, (4,)))
    def loss(model, inputs):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return F.cross_entropy(model(inputs[0]), inputs[1])
"""


@pytest.mark.slow
@pytest.mark.usefixtures("warm_scripts")
@pytest.mark.parametrize(
    ("setup", "forward", "optimizer"),
    [
        (
            GROUPS,
            "output = model(inputs[0]); loss = nn.CrossEntropyLoss()(output, inputs[1])",
            TWO_GROUPS,
        ),
        (
            TIED,
            "output = model(input_ids=inputs[0], labels=inputs[1]); loss = output.loss",
            "optimizer = torch.optim.Adafactor(model.parameters())",
        ),
        (
            AUTOCAST,
            "loss = globals()['loss'](model, inputs)",
            "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
        ),
    ],
    ids=["AdamW groups, criterion", "tied GPT-2, Adafactor", "ResNet-50, autocast, SGD"],
)
def test_peaks_equal_those_of_the_script_to_the_byte(setup, forward, optimizer, tmp_path):
    setup = textwrap.dedent(setup)
    script = tmp_path / "script.py"
    script.write_text(setup + LOOP.format(optimizer=optimizer, forward=forward))
    expected = memfit.dry_run(script)
    live = {"__name__": "__main__"}
    exec(setup + optimizer, live)  # noqa: S102 - the same lines as the script's
    batch = live["batch"]
    inputs = batch if live["loss"] else {"input_ids": batch[0], "labels": batch[1]}
    run = memfit.estimate(live["model"], inputs, loss=live["loss"], optimizer=live["optimizer"]).run
    assert run.verdict == "fits"
    assert run.steps == expected.steps == 3
    assert (run.peak_allocated, run.peak_reserved) == (expected.peak_allocated, expected.peak_reserved)
    assert run.terms == expected.terms


@pytest.mark.usefixtures("warm_scripts")
def test_precision_applied_on_the_cpu_takes_effect_on_the_gpu():
    def model():
        return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.GELU())))

    class ByHand(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model()

        def forward(self, x):
            with torch.autocast("cuda", torch.bfloat16):
                return self.inner(x)

    inputs = torch.ones(4096, 1024)
    applied = memfit.apply(model(), memfit.Precision("bf16"))
    found, by_hand, plain = (
        memfit.estimate(each, inputs).run.peak_allocated for each in (applied, ByHand(), model())
    )
    assert found == by_hand < plain


@pytest.mark.process
def test_the_users_objects_are_unchanged_and_the_breakdown_adds_up():
    model = nn.Sequential(nn.Linear(512, 1024), nn.Dropout(), nn.BatchNorm1d(1024)).train()
    model[1].eval()
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.ones(32, 512)
    tensors = [inputs, *model.state_dict(keep_vars=True).values()]

    def state():
        return (
            [(id(t), t._version, t.data_ptr(), t.grad, t.device, t.requires_grad) for t in tensors],
            [(m.training, *sorted(map(str, vars(m)))) for m in model.modules()],
            [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
            torch.get_rng_state().tolist(),
            dict(optimizer.state),
            sorted(vars(optimizer)),
            torch.is_grad_enabled(),
            torch.cuda.is_initialized(),
            sys.path.copy(),
        )

    before = state()
    values = [tensor.detach().clone() for tensor in tensors]
    answer = memfit.estimate(model, inputs, optimizer=optimizer, gpu="RTX-3060")
    assert state() == before
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, values, strict=True))

    assert answer.fits()
    assert answer.total.provenance is Provenance.ASSUMED  # the CUDA context is
    assert sum(figure.bytes for figure in answer.breakdown.values()) == answer.total.bytes
    # fp32: a weight in 2 MiB, a bias and BatchNorm's two of 4 KiB each
    assert answer.breakdown["parameters"].bytes == 4 * (512 * 1024 + 3 * 1024)
    assert answer.breakdown["optimizer state"].bytes == 2 * answer.breakdown["parameters"].bytes
    assert answer.breakdown["gradients"].bytes == answer.breakdown["parameters"].bytes
    assert "memfit.estimate(Sequential) · RTX 3060" in str(answer)
    assert str(answer) == repr(answer)
    assert "No loss was given" in str(answer)


@pytest.mark.usefixtures("warm_scripts")
def test_a_model_that_does_not_fit_reports_its_total_and_fits_another_gpu():
    model = nn.Sequential(*(nn.Linear(16384, 16384, bias=False, device="meta") for _ in range(16)))
    answer = memfit.estimate(model, torch.ones(8, 16384), gpu="RTX-3060")
    assert answer.run.verdict == "out of memory"
    assert not answer.fits()
    assert answer.fits("A100-40GB")
    assert answer.breakdown["parameters"].bytes == 16 * 4 * 16384**2
    assert answer.breakdown["gradients"].bytes == 0  # neither loss nor optimizer: inference
    assert answer.total.bytes > 16 * 4 * 16384**2
    assert answer.run.device.total.bytes < answer.unlimited.needs.bytes <= answer.total.bytes
    assert f"needs {answer.unlimited.needs.bytes / 2**30:,.2f} GiB; this GPU has" in str(answer)


@pytest.mark.usefixtures("warm_scripts")
def test_a_failing_model_is_reported_with_its_error(tmp_path):
    with pytest.raises(TargetError, match=r"model failed on the ghost.*RuntimeError: mat1 and mat2"):
        memfit.estimate(nn.Linear(3, 4), torch.ones(2, 5))


@pytest.mark.usefixtures("warm_scripts")
def test_a_model_that_exits_has_failed_and_a_loss_function_error_shows_its_signature():
    class Exiting(nn.Linear):
        def forward(self, *_):
            sys.exit(3)

    with pytest.raises(TargetError, match=r"test_estimate\.py:\d+\): RuntimeError: it called sys\.exit\(3\)"):
        memfit.estimate(Exiting(3, 4), torch.ones(2, 3))
    with pytest.raises(TargetError, match=r"failed on the ghost.* called the loss as loss\(model, inputs\)"):
        memfit.estimate(nn.Linear(3, 4), (torch.ones(2, 3), torch.ones(2, 4)), loss=nn.functional.mse_loss)


@pytest.mark.parametrize("option", ["memory", "in_use"])
def test_amounts_are_ints_in_bytes(option):
    with pytest.raises(UsageError, match=f"{option} must be an int, in bytes"):
        memfit.estimate(nn.Linear(3, 4), torch.ones(2, 3), **{option: "8GiB"})


NOTEBOOK = """
import torch
from torch import nn
import memfit

WIDTH = 256

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return shift(self.inner(x))

def shift(x):
    return x + WIDTH

def loss(model, x):
    assert torch.backends.cudnn.benchmark
    output = model(x)
    assert output.dtype is torch.bfloat16, output.dtype
    return output.mean()

torch.backends.cudnn.benchmark = True
torch.set_autocast_dtype("cuda", torch.bfloat16)
torch.set_autocast_enabled("cuda", True)  # torch.autocast("cuda") does nothing without a GPU
answer = memfit.estimate(Block(), torch.ones(4, WIDTH), loss=loss, optimizer=torch.optim.SGD)
print(answer.run.peak_place.phase, answer.breakdown["parameters"].bytes, answer.run.steps)
"""


@pytest.mark.slow
@pytest.mark.process
def test_classes_and_switches_of_an_interactive_session_are_sent(tmp_path):
    done = subprocess.run(
        [sys.executable, "-"], input=NOTEBOOK, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == [str(4 * 256 * 257), "3"]
