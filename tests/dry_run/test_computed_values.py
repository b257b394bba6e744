"""Small tensors are computed on the CPU, too: what a script reads is what a GPU would have computed."""

import pytest

from memfit.ghost.values.computed_ops import ops_computed_on_cpu

EXPRESSIONS = """
    vals.max().item()
    bool(vals.any())
    (vals > 0).tolist()
    vals[1].item()
    torch.cat([vals, vals]).tolist()
    vals.sum().item()
    (vals == 3).sum().item()
    torch.where(vals > 0, vals, -vals).tolist()
    vals.to(torch.uint8).bool().tolist()
    vals.clamp(max=1).tolist()
    (vals / 2 + 1 - vals * 3).tolist()
    (7 - vals).tolist()
    (vals // 2 % 3).tolist()
    vals.prod().item()
    vals.argmax().item()
    vals.sort()[0].tolist()
    vals.nonzero().flatten().tolist()
    vals[vals > 0].tolist()
    vals.cumsum(0).flip(0).tolist()
    torch.stack([vals, vals + 1]).amax(1).tolist()
    vals.float().mul(0.5).exp().isfinite().all().item()
    torch.tensor([True, False], device=d).logical_not().tolist()
    torch.tensor([1.5, 2.0], device=d).sum().item()
    torch.cat([torch.ones(2, device=d), torch.zeros(2, device=d)]).tolist()
    torch.cat([torch.full((1,), 5, device=d), torch.full((1,), 6, device=d)]).max().item()
    torch.stack([torch.zeros(2, device=d), torch.ones(2, device=d)]).sum(1).tolist()
    written(lambda v: v.__setitem__(1, 5))
    written(lambda v: v[:2].add_(1))
    written(lambda v: v.add_(vals))
    written(lambda v: v.copy_(vals))
    written(lambda v: v.view(3, 1)[1:].mul_(0).sub_(4))
    written(lambda v: v.index_put_((vals[:1],), vals[2]))
    written(lambda v: v.masked_fill_(vals == 3, 8).zero_()[0].fill_(2))
    written(lambda v: v.__iadd__(v))
    torch.arange(0, 10, 3, device=d).tolist() + torch.linspace(0, 1, 3, device=d).tolist()
    torch.eye(3, device=d).sum().item() + torch.scalar_tensor(2.0, device=d).item()
    torch.arange(vals.max(), device=d).tolist()
    torch.nn.functional.one_hot(vals).tolist()
    torch.nn.functional.one_hot(vals, 5).sum(0).tolist()
    torch.nn.functional.pad(vals, (1, 2)).tolist()
    vals.diff().tolist() + (10 - vals.float()).diff().tolist()
    vals.repeat_interleave(vals).tolist() + torch.repeat_interleave(vals).tolist()
    vals.masked_select(vals > 0).tolist() + vals.take(vals[:1]).tolist()
    torch.unique(torch.cat([vals, vals]), return_counts=True)[1].tolist()
    torch.bincount(vals).tolist() + torch.histc(vals.float(), bins=4, min=0, max=3).tolist()
    torch.searchsorted(torch.arange(3, device=d), vals).tolist()
    vals.expand(2, 3).sum(0).tolist() + vals.view(3, 1).expand(3, 2).t().reshape(-1).tolist()
    [torch.equal(vals, vals + 1), torch.allclose(vals.float(), vals.float() + 1)]
    torch.zeros(4, dtype=torch.long, device=d).scatter_(0, vals, 1).tolist()
    torch.zeros(4, dtype=torch.long, device=d).scatter_add_(0, vals, torch.ones_like(vals)).tolist()
    torch.zeros(4, dtype=torch.long, device=d).index_add_(0, vals, vals).tolist()
    vals.data.sum().item() + vals.data[2].item()
    written(lambda v: torch.add(v, 1, out=v))
    written(lambda v: torch.maximum(v[1:], vals[1:] * 4, out=v[1:]))
    written(lambda v: torch.cat([vals[:1], vals[1:]], out=v))
    written(lambda v: torch._foreach_add_([v[:1], v[1:]], [vals[2:], vals[:2]]))
    written(lambda v: torch._foreach_copy_([v], [vals]))
    written(lambda v: v.data.mul_(2)[1:].sub_(1))
    written(lambda v: v.detach()[1:].add_(1))
    written(lambda v: v.cumsum_(0).masked_scatter_(vals > 0, vals))
    written(lambda v: v.divide_(2, rounding_mode="floor").subtract_(1).eq_(2))
"""
LARGE = """
    (large(3) * 2 - 1).max().item()
    (large(7) // 2 % 3)[5].item()
    (large(200, torch.uint8) + 100).max().item()
    (large(-7) // 2).min().item()
    torch.where(large(2) > 1, large(5), large(6))[3].item()
    large(0.1, torch.bfloat16).mul(3).add(1)[7].item()
    large(2.0).sqrt_().mul_(3)[9].item()
    large(2).sum().item() + large(1, torch.bool).view(100, 100).sum(1).max().item()
    [(large(inf) - large(inf)).isnan().all().item(), (large(inf) * 0).isnan().any().item()]
    [(large(inf) - 1).isinf().all().item(), (0.0 / large(0.0)).isnan().all().item()]
    [(large(inf) - large(inf) == 0).any().item(), large(inf).sum().isinf().item()]
"""
LINES = [line.strip() for line in (EXPRESSIONS + LARGE).splitlines() if line]
BOTH = f"""
    import torch
    def evaluate(d):
        vals = torch.tensor([1, 0, 3]).to(d)
        def written(write):
            values = torch.full((3,), 7, device=d)
            write(values)
            return values.tolist()
        def large(value, dtype=None):
            return torch.full((10_000,), value, dtype=dtype, device=d)
        names = dict(torch=torch, vals=vals, written=written, d=d, large=large, inf=float("inf"))
        return [eval(each, names) for each in {LINES!r}]
    on_cpu, on_gpu = evaluate("cpu"), evaluate("cuda")
    print([(n, a, b) for n, (a, b) in enumerate(zip(on_cpu, on_gpu)) if a != b], len(on_gpu))
"""


def test_what_follows_from_known_elements_is_read_as_computed(dry_run):
    run = dry_run(BOTH, options=("--to-end",))
    assert run.out.splitlines()[0] == "[] 72", run.err
    assert not [note for note in run.answer["notes"] if "GPU value" in note["text"]]


MASKED = """
    import torch
    model = torch.nn.Linear(8, 8).cuda()
    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor.detach()
    labels = torch.arange(40).view(4, 10)
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        mask = labels.cuda()[:, 1:] > 12
        chosen = model(torch.ones(4, 9, 8, device="cuda"))[mask].sum(1)
        whole = chosen.new_zeros(mask.shape).masked_scatter(mask, chosen)
        del mask
        whole.sum().backward()
    mask = torch.arange(40).cuda() > 12
    total = model(torch.ones(40, 8, device="cuda"))[mask].view(27, 8).sum()
    mask.untyped_storage()  # may be written through it, which would not be seen
    total.backward()
    size = (torch.tensor([3, 4]).cuda() * 2).detach()
    print(len(chosen), size.tolist())
    alias = size.detach()
    del size
    alias.add_(torch.ones(2, dtype=torch.int64, device="cuda"))
    print(alias.tolist())
"""


@pytest.mark.slow
def test_known_elements_outlive_a_tensor_in_what_detach_made_of_it(dry_run):
    """Here, the backward counts a mask's elements again: one that the script dropped, one that it exposed."""
    run = dry_run(MASKED, options=("--to-end",))
    assert run.out.splitlines()[:2] == ["25 [6, 8]", "[7, 9]"], run.err


SAVED = """
    import copy, torch
    from torch import nn
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.arange(8) % 2 == 0)
            self.linear = nn.Linear(4, 4)
        def forward(self, x):
            return self.linear(x[self.mask])
    model, x = Masked().cuda(), torch.ones(8, 4, device="cuda")
    for _ in range(2):
        torch.save(model.state_dict(), "saved.pt")
    average = copy.deepcopy(model)
    print([len(each(x)) for each in (model, average)])
    model.mask.storage()
    print(len(model(x)))
"""


@pytest.mark.slow
def test_a_tensor_that_is_saved_or_copied_stays_known(dry_run):
    run = dry_run(SAVED, options=("--to-end",), without_step="it only runs forward")
    assert run.out.splitlines()[:2] == ["[4, 4]", "8"], run.err


SCALER = """
    import torch
    scaler, model = torch.amp.GradScaler("cuda"), torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for bad in (False, True):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4, device="cuda")).sum()).backward()
        if bad:
            model.bias.grad.fill_(float("inf"))
        version = model.weight._version
        scaler.step(optimizer)
        scaler.update()
        print(model.weight._version > version, scaler.get_scale())
"""


def test_a_gradient_that_the_script_fills_with_infinity_skips_the_update(dry_run):
    run = dry_run(SCALER, options=("--to-end",))
    assert run.out.splitlines()[:2] == ["True 65536.0", "False 32768.0"]


@pytest.mark.slow
def test_floats_that_no_integer_holds_stay_unknown(dry_run):
    """A GPU converts them in another way than a CPU does."""
    code = "import torch\nx = torch.tensor([1.0, 3e9]).cuda()\nprint(x.int().tolist(), x[:1].int().tolist())"
    assert dry_run(code).out.splitlines()[0] == "[0, 0] [1]"


@pytest.mark.slow
def test_a_sum_of_squares_that_nobody_computed_stays_unknown(dry_run):
    run = dry_run("import torch\nprint(torch.rand(3, device='cuda').square().sum().item())")
    assert run.out.splitlines()[0] == "1.0"


FINITE = """
    import torch
    inf = float("inf")
    gradient = torch.randn(1 << 16, device="cuda", dtype=torch.bfloat16)
    norm = torch.linalg.vector_norm(gradient.float())
    overflow = torch.zeros(1, dtype=torch.uint8, device="cuda")
    overflow.add_(gradient.isnan().logical_or(gradient.float().isinf()).float().max().to(torch.uint8))
    flag = torch.zeros(1, device="cuda")
    flag += (norm == inf).float()
    print(overflow.item(), flag.item(), (norm != norm).item(), (norm < inf).item(), (gradient == inf).any())
"""


def test_floats_that_were_never_computed_are_finite_wherever_a_script_asks(dry_run):
    run = dry_run(FINITE)
    assert run.out.splitlines()[0] == "0 0.0 False True tensor(False, device='cuda:0')"
    assert any("assumed to be finite" in note["text"] for note in run.answer["notes"])


def test_ops_are_found_by_pytorch_s_own_tags():
    ops = ops_computed_on_cpu()
    assert {"eq.Scalar", "logical_or", "exp_", "where.self", "maximum"} <= {*ops}
    assert not {"add.Tensor", "bernoulli_.float", "_foreach_add.List"} & {*ops}
