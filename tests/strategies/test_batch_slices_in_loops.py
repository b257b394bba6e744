"""What batch slices refuse, and batch slices in training loops: copies, clipping, loss scales, float16."""

import copy
import io
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memfit
from memfit import BatchSlices
from memfit.errors import UsageError
from support.slice_cases import WIDTH, Case, Of, entropy, expect_equal, images, same, trained, with_labels


def keeping(model):
    model.kept = [None]


REFUSED = {
    "batch norm": (
        Case(lambda s, x: s.conv(x), images, layers=lambda: {"conv": nn.BatchNorm2d(3)}),
        "conv is a BatchNorm2d in training mode",
    ),
    "similarities": (
        Case(lambda s, x: s.logits(x).flatten(1) @ s.logits(x).flatten(1).T),
        "no row for each of them",
    ),
    "a mean over the batch": (Case(lambda s, x: s.logits(x).mean(0)), "no row for each of them"),
    "less its mean": (Case(lambda s, x: s.logits(x) - s.logits(x).mean(0)), "combines samples"),
    "sequences first": (
        Case(lambda s, x: s.rnn(x)[0], layers=lambda: {"rnn": nn.LSTM(WIDTH, WIDTH)}),
        "pass dim=",
    ),
    "contrastive loss": (
        Case(
            lambda s, x: F.cross_entropy(
                s.logits(x).flatten(1) @ x.flatten(1)[:, :20].T, torch.arange(len(x))
            ),
            loss=same,
        ),
        "it reduces 4 elements for two samples, and 1 and 1 for each alone",
    ),
    "loss of means": (
        Case(lambda s, x: s.logits(x).mean(0).square().sum(), loss=same),
        "it reduces 20 elements for two samples, and 20 and 20 for each alone",
    ),
    "a variance": (Case(lambda s, x: s.logits(x).var(), loss=same), "its graph ends in VarBackward0"),
    "a sum and a mean": (
        Case(lambda s, x: s.logits(x).mean() + s.up(x).square().sum(), loss=same),
        "adds a mean over samples to a sum",
    ),
    "means over other tokens": (
        Case(lambda s, x, y: entropy()(s, x, y) + s.logits(x).square().mean(), with_labels, same),
        "weigh the slices of a batch differently",
    ),
    "two losses": (
        Case(lambda s, x: (s.logits(x).mean(), s.up(x).mean()), loss=sum),
        "returns 2 single numbers",
    ),
    "logits differentiated beside the loss": (
        Case(
            lambda s, x, y: (entropy()(s, x, y), s.logits(x)), with_labels, lambda out: out[0] + out[1].mean()
        ),
        "differentiates an output",
    ),
    "a tensor of its own": (
        Case(
            lambda s, x: (s.logits(x) * s.own[0]).mean(),
            loss=same,
            prepare=lambda model: setattr(model, "own", [torch.ones(1, requires_grad=True)]),
        ),
        "neither a parameter nor an argument",
    ),
    "a counter": (
        Case(
            lambda s, x: s.logits(x * s.position.new_ones(1)) + s.seen.add_(1),
            prepare=lambda model: model.register_buffer("seen", torch.zeros(1)),
        ),
        "changes its tensor 'seen'",
    ),
    "a statistic, in the place of the one before": (
        Case(lambda s, x: setattr(s, "seen", None) or setattr(s, "seen", x.mean()) or s.logits(x)),
        "changes its tensor 'seen'",
    ),
    "a list of features": (
        Case(lambda s, x: s.logits(s.kept.__setitem__(0, x * s.position) or s.kept[0]), prepare=keeping),
        "keeps a result of MulBackward0 (1 x 4 x 6 for one sample)",
    ),
    "a list of features beside the loss": (
        Case(
            lambda s, x: s.logits(s.kept.__setitem__(0, x * s.position) or s.kept[0]).square().mean(),
            loss=same,
            prepare=keeping,
        ),
        "keeps a result of MulBackward0",
    ),
    "a hook on a layer": (
        Case(
            Of.logits,
            prepare=lambda model: model.norm.register_forward_hook(
                lambda _, __, out, kept=[]: kept.append(out)
            ),
        ),
        "a hook on a layer, keeps a result of NativeLayerNormBackward0 (1 x 4 x 9 for one sample)",
    ),
    "spectral norm": (
        Case(Of.logits, prepare=lambda model: nn.utils.parametrizations.spectral_norm(model.up)),
        "changes its tensor",
    ),
    "a fixed batch": (Case(lambda s, x: s.logits(x).view(7, 20)), "fails for one or two samples"),
    "an object": (
        Case(lambda s, x: SimpleNamespace(logits=s.logits(x)), loss=lambda out: out.logits.mean()),
        "returns an object of type SimpleNamespace",
    ),
    "no tensor": (Case(lambda s, n: s.logits(torch.randn(n, 4, WIDTH)), lambda n: (n,)), "no tensor"),
    "a packed sequence": (
        Case(
            lambda s, x: s.rnn(x)[1],
            lambda n: (nn.utils.rnn.pack_sequence([torch.randn(3, WIDTH).double()] * n),),
            layers=lambda: {"rnn": nn.GRU(WIDTH, WIDTH)},
        ),
        "is passed a PackedSequence",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_slices_would_change_is_refused_before_a_gradient(name):
    case, message = REFUSED[name]
    with pytest.raises(UsageError, match=r"^batch_slices: ") as refused:
        trained(case, BatchSlices(3), torch.float64)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "loss", [Of.logits, lambda s, x: s.logits(x).square().mean()], ids=["outputs", "loss"]
)
def test_a_second_derivative_is_refused(loss):
    model = Of(loss)
    BatchSlices(2).apply(model)
    total = model(torch.randn(4, 4, WIDTH)).mean()
    with pytest.raises(UsageError, match="create_graph"):
        torch.autograd.grad(total, list(model.parameters()), create_graph=True, allow_unused=True)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_of_a_later_step_is_refused_too_and_one_that_detaches_is_not(register):
    kept = []
    model = Of(Of.logits)
    BatchSlices(2).apply(model)
    x = torch.randn(4, 4, WIDTH)
    model(x).sum().backward()
    detaching = getattr(model.head, register)(lambda _, *of: kept.append(tree_leaves(of)[0].detach()))
    model(x).sum().backward()
    assert kept
    detaching.remove()
    getattr(model.head, register)(lambda _, *of: kept.append(tree_leaves(of)[-1]))
    getattr(model.norm, register)(lambda *_: None)
    with pytest.raises(UsageError, match="or a hook on a layer, keeps a result of"):
        model(x)


def test_a_view_elsewhere_whose_history_is_lost_does_not_end_the_training():
    base = torch.zeros(2, 2)
    with torch.no_grad():
        view = base[0]
    base.mul_(torch.ones(1, requires_grad=True))
    with pytest.raises(RuntimeError, match="created in no_grad mode"):
        _ = view.grad_fn
    model = Of(Of.logits)
    BatchSlices(2).apply(model)
    model(torch.randn(4, 4, WIDTH)).sum().backward()


def test_what_a_function_keeps_for_its_backward_is_not_refused():
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * ctx.x * gradient

    case = Case(lambda s, x: s.logits(Kept.apply(x * s.position)))
    expect_equal(trained(case, BatchSlices(3), torch.float64), trained(case, None, torch.float64), 1e-12)


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


@pytest.mark.parametrize("kind", ["outputs", "loss", "loss in float16"])
def test_dropout_draws_slice_by_slice_and_the_same_again_in_the_backward(kind):
    """As a handwritten loop draws; also after a first batch, whose samples memfit runs alone before."""

    def forward(s, x):
        out = F.dropout(s.logits(x), 0.5)
        return out if kind == "outputs" else out.float().square().sum() if low else out.square().sum()

    def train(model, x):
        with torch.autocast("cpu", torch.float16, enabled=low):
            out = model(x)
        (out.square().sum() if kind == "outputs" else out).backward()

    low = "float16" in kind
    dtype, limit = (torch.float32, 1e-2) if low else (torch.float64, 1e-12)
    plain = Of(forward).to(dtype)
    sliced = copy.deepcopy(plain)
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
    for one, other in zip(sliced.parameters(), plain.parameters(), strict=True):
        assert one.grad is other.grad is None or (one.grad - other.grad).norm() <= limit * other.grad.norm()


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


def test_a_python_number_that_the_model_computes_from_samples_is_refused():
    """Two samples have equal ones by chance."""
    x = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])[:, None].expand(6, 4)
    model = _Scaled(lambda rows: max(1, int(rows[:, 0].sum())))
    BatchSlices(3).apply(model)
    with pytest.raises(UsageError, match="a Python number that it computes from the samples"):
        model(x.contiguous())
