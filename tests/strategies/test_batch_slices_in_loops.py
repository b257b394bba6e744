"""Batch slices in training loops: copies, clipping, loss scales, float16."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit import BatchSlices
from memfit.errors import UsageError
from support.slice_cases import WIDTH, Case, Of, expect_equal, trained


def of_transformers(kind: str) -> Any:
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    if kind == "gpt2":
        sizes = {"vocab_size": 40, "n_positions": 12, "n_embd": 8, "n_layer": 2, "n_head": 2}
        return GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))
    sizes = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(**sizes, intermediate_size=16, max_position_embeddings=12))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize("given", ["labels", "labels, count", "labels, count as a number", "no labels"])
def test_models_of_transformers(kind, given):
    torch.manual_seed(0)
    plain = of_transformers(kind).double().eval()
    sliced = copy.deepcopy(plain)
    memfit.apply(sliced, BatchSlices(3))
    tokens = torch.randint(1, 40, (7, 12))
    mask = (torch.arange(12) < torch.tensor([12, 5, 7, 12, 3, 9, 12])[:, None]).long()
    batch: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask}
    wanted = tokens.masked_fill(mask == 0, -100)
    if "labels" in given.split(", ")[0] and given != "no labels":
        batch["labels"] = wanted
    if "count" in given:
        count = (wanted[:, 1:] != -100).sum()
        batch["num_items_in_batch"] = count if given.endswith("count") else int(count)
    results = []
    for model in (sliced, plain):
        out = model(**batch)
        assert type(out) is type(plain(**batch))
        loss = out.logits.log_softmax(-1).square().mean() if out.loss is None else out.loss
        loss.backward()
        results.append((loss.item(), [each.grad for each in model.parameters()]))
        logits = out.logits
    expect_equal(*results, 1e-6 if kind == "gpt2" else 1e-12)  # GPT-2's loss is in float32
    assert torch.allclose(logits, plain(**batch).logits, atol=1e-12)


def test_few_samples_and_none_run_in_fewer_slices():
    for samples in (0, 1, 2):
        for forward in (Of.logits, lambda s, x: s.logits(x).square().sum()):
            case = Case(forward, loss=lambda out: out.sum(), samples=samples)
            expect_equal(
                trained(case, BatchSlices(5), torch.float64), trained(case, None, torch.float64), 1e-12
            )


def test_without_gradients_the_batch_is_not_divided():
    sizes = []
    model = Of(lambda s, x: sizes.append(len(x)) or s.logits(x))
    BatchSlices(4).apply(model)
    with torch.no_grad():
        model(torch.randn(8, 4, WIDTH))
    with torch.inference_mode():
        model(torch.randn(8, 4, WIDTH))
    assert sizes == [8, 8]


@pytest.mark.parametrize("own", [False, True], ids=["", "own generator"])
@pytest.mark.parametrize("kind", ["outputs", "loss", "loss in float16"])
def test_dropout_draws_slice_by_slice_and_the_same_again_in_the_backward(kind, own):
    """As a handwritten loop draws; also after a first batch, whose samples memfit runs alone before."""

    def forward(s, x):
        out = s.logits(x)
        out = out * torch.rand(out.shape, generator=s.random[0]).round() if own else F.dropout(out, 0.5)
        return out if kind == "outputs" else out.float().square().sum() if low else out.square().sum()

    def train(model, x):
        with torch.autocast("cpu", torch.float16, enabled=low):
            out = model(x)
        (out.square().sum() if kind == "outputs" else out).backward()

    low = "float16" in kind
    dtype, limit = (torch.float32, 1e-2) if low else (torch.float64, 1e-12)
    plain = Of(forward).to(dtype)
    sliced = copy.deepcopy(plain)
    sliced.random, plain.random = ([torch.Generator().manual_seed(3)] for _ in range(2))
    BatchSlices(3).apply(sliced)
    for step in range(2):
        x = torch.randn(7, 4, WIDTH, dtype=dtype)
        torch.manual_seed(step)
        train(sliced, x)
        after = torch.rand(3)
        torch.manual_seed(step)
        for part in x.split([3, 2, 2]):
            train(plain, part)
        assert torch.equal(after, torch.rand(3))
        assert torch.equal(sliced.random[0].get_state(), plain.random[0].get_state())
    for one, other in zip(sliced.parameters(), plain.parameters(), strict=True):
        assert one.grad is other.grad is None or (one.grad - other.grad).norm() <= limit * other.grad.norm()


@pytest.mark.parametrize("kind", ["outputs", "loss", "loss in float16"])
def test_a_slice_runs_again_with_the_attributes_of_its_forward(kind):
    """A task, a mask, a mode and frozen layers that the loop sets between two forwards, and a count."""

    def forward(s, x):
        out = F.dropout(s.logits(x), 0.5, s.training)[..., s.task] * s.mask
        return out if kind == "outputs" else out.float().square().sum()

    low = "float16" in kind
    results = []
    for slices in (BatchSlices(3), None):
        torch.manual_seed(1)
        model = Of(forward)
        if slices:
            slices.apply(model)
        model.count, losses = 0, []
        for task in range(2):
            model.task, model.mask, model.count = task, torch.full((4,), task + 1.0), model.count + 1
            model.up.requires_grad_(task == 1)
            model.head.requires_grad_(task == 0)
            with torch.autocast("cpu", torch.float16, enabled=low):
                losses.append(model.eval()(torch.randn(7, 4, WIDTH)).square().sum())
        model.train()
        sum(losses).backward()
        assert (model.task, model.mask[0], model.count, model.training) == (1, 2, 2, True)
        results.append((sum(losses).item(), [each.grad for each in model.parameters()]))
    expect_equal(*results, 1e-2 if low else 1e-5)


@pytest.mark.parametrize("is_loss", [False, True])
def test_clipping_accumulation_and_two_backward_passes_of_a_graph(is_loss):
    results = []
    for slices in (BatchSlices(3), None):
        torch.manual_seed(1)
        model = Of(lambda s, x: s.logits(x).square().mean() if is_loss else s.logits(x)).double()
        if slices:
            slices.apply(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            for _ in range(2):
                loss = model(torch.randn(7, 4, WIDTH, dtype=torch.float64)).square().mean() / 2
                loss.backward(retain_graph=True)
                loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        results.append((norm.item(), [each.detach() for each in model.parameters()]))
    (ours, values), (plain, others) = results
    assert abs(ours - plain) < 1e-10
    for one, other in zip(values, others, strict=True):
        assert torch.allclose(one, other, atol=1e-9)


@pytest.mark.parametrize("is_loss", [False, True])
def test_a_loss_scale_skips_the_updates_that_overflow(is_loss):
    """float16 on the CPU, with an infinity in one sample of the second batch."""
    histories = []
    for slices in (BatchSlices(3), None):
        torch.manual_seed(1)
        model = Of(lambda s, x: s.logits(x).float().square().mean() if is_loss else s.logits(x))
        if slices:
            slices.apply(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        history = []
        for step in range(4):
            x = torch.randn(7, 4, WIDTH)
            if step == 1:
                x[5] = 1e30
            with torch.autocast("cpu", torch.float16):
                out = model(x)
                loss = out if is_loss else out.float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            history.append((scaler.get_scale(), [each.detach().clone() for each in model.parameters()]))
        histories.append(history)
    for (scale, ours), (wanted, plain) in zip(*histories, strict=True):
        assert scale == wanted
        for one, other in zip(ours, plain, strict=True):
            assert torch.allclose(one, other, atol=2e-3)
    assert histories[0][1][0] == 512.0


@pytest.mark.parametrize("is_loss", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_the_whole_batch(dtype, is_loss):
    gradients = []
    for slices, lower in ((BatchSlices(4), dtype), (None, dtype), (None, None)):
        torch.manual_seed(1)
        model = Of(lambda s, x: s.logits(x).square().mean() if is_loss else s.logits(x))
        if slices:
            slices.apply(model)
        with torch.autocast("cpu", lower, enabled=lower is not None):
            out = model(torch.randn(8, 4, WIDTH))
        out.float().square().mean().backward()
        gradients.append(
            torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        )
    ours, plain, exact = gradients
    assert (ours - exact).norm() <= 2 * (plain - exact).norm() + 1e-6


def test_hooks_of_the_model_see_the_whole_batch():
    seen = []
    model = Of(Of.logits)
    BatchSlices(3).apply(model)
    model.register_forward_hook(lambda _, args, out: seen.append((len(args[0]), len(out))))
    model.register_full_backward_hook(lambda _, given, wanted: seen.append(len(wanted[0])))
    model(torch.randn(7, 4, WIDTH, requires_grad=True)).sum().backward()
    assert seen == [(7, 7), 7]


def test_copies_pickles_and_reverting():
    model = Of(Of.logits, rnn=nn.LSTM(WIDTH, WIDTH))
    names, weights = list(model.state_dict()), model.rnn._flat_weights
    memfit.apply(model, BatchSlices(3))
    model(torch.randn(7, 4, WIDTH)).sum().backward()
    assert list(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.rnn._flat_weights, weights, strict=True))
    copied = copy.deepcopy(model)
    copied(torch.randn(7, 4, WIDTH)).sum().backward()
    assert copied.head.weight.grad.data_ptr() != model.head.weight.grad.data_ptr()
    memfit.revert(model)
    assert "forward" not in model.__dict__
    layers = nn.Sequential(nn.Linear(2, 2))
    memfit.apply(layers, BatchSlices(3))
    layers(torch.randn(7, 2)).sum().backward()
    loaded = pickle.loads(pickle.dumps(layers))  # noqa: S301 - its own
    assert loaded(torch.randn(7, 2)).shape == (7, 2)
    torch.save(layers, io.BytesIO())
    with pytest.raises(UsageError, match="divided already"):
        BatchSlices(2).apply(layers)


class _Scaled(nn.Module):
    """Returns its loss, times or over Python numbers."""

    def __init__(self, count):
        super().__init__()
        self.up, self._count = nn.Linear(4, 4), count

    def forward(self, x):
        return 0.5 * self.up(x).square().sum() / self._count(x)


class _Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_loss_times_a_python_number_is_divided_under_a_dispatch_mode():
    """A mode is passed the number that autograd saved as a number, not as a tensor."""
    x, found = torch.randn(8, 4), []
    for slices in (1, 4):
        torch.manual_seed(0)
        model = _Scaled(len)
        BatchSlices(slices).apply(model)
        with _Passing():
            loss = model(x)
        loss.backward()
        found.append((loss.detach(), model.up.weight.grad))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("sums", [[0, 1, 1, 1, 1, 1], [0, 0, 2, 1, 1, 0]], ids=["other", "equal"])
def test_a_python_number_that_the_model_computes_from_samples_is_refused(sums):
    """In the calls that are looked at more closely, all samples have equal ones by chance."""
    model = _Scaled(lambda rows: max(1, int(rows[:, 0].sum())) ** 2)
    BatchSlices(2).apply(model)
    for _ in range(4):
        model(torch.zeros(6, 4))
    with pytest.raises(UsageError, match="cannot see what the number is for the batch"):
        model(torch.tensor(sums)[:, None].expand(6, 4).float().contiguous())


def test_a_model_that_differentiates_in_its_forward(monkeypatch):
    """Memory that nothing was written to holds NaN here, as it may anywhere."""

    def forward(s, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(s.logits(x).square().sum(), x, create_graph=True)[0]

    monkeypatch.setattr("torch.utils.deterministic.fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        case = Case(forward, samples=8)
        expect_equal(trained(case, BatchSlices(2), torch.float64), trained(case, None, torch.float64), 1e-12)
    finally:
        torch.use_deterministic_algorithms(False)
