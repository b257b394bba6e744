"""Small tensors are computed on the CPU, too: what a script reads is what a GPU would have computed."""

from memfit.ghost.values.computed_on_cpu import ops_computed_on_cpu

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
"""
BOTH = f"""
    import torch
    def evaluate(d):
        vals = torch.tensor([1, 0, 3]).to(d)
        def written(write):
            values = torch.full((3,), 7, device=d)
            write(values)
            return values.tolist()
        names = dict(torch=torch, vals=vals, written=written, d=d)
        return [eval(each, names) for each in {[line.strip() for line in EXPRESSIONS.split(chr(10))[1:-1]]!r}]
    on_cpu, on_gpu = evaluate("cpu"), evaluate("cuda")
    print([(n, a, b) for n, (a, b) in enumerate(zip(on_cpu, on_gpu)) if a != b], len(on_gpu))
"""


def test_what_follows_from_known_elements_is_read_as_computed(dry_run):
    run = dry_run(BOTH, options=("--to-end",))
    assert run.out.splitlines()[0] == "[] 34", run.err
    assert not [note for note in run.answer["notes"] if "GPU value" in note["text"]]


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
