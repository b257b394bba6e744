"""The values a script reads on the ghost: assumed values, sizes, checks; and that nothing else changes."""

import pytest

from support.scripts import INSTALL_VALUES, check

pytestmark = pytest.mark.warm


def test_unknown_values_are_assumed_by_dtype_or_as_chosen(evaluate):
    check(evaluate, {"x.sum().item()": 1.0, "int(whole.max())": 1, "bool(x.sum() > 3)": False})
    check(
        evaluate,
        {
            "x.sum().item()": 0.5,
            "int(whole.max())": 7,
            "bool(x.sum() > 3)": True,
            "(x > 0).any().item()": True,
        },
        options="float=0.5,int=7,bool=true",
    )


def test_data_dependent_sizes_are_upper_bounds_or_as_chosen(evaluate):
    upper = {
        "x[x > 0].numel()": 40,
        "list(x.nonzero().shape)": [40, 2],
        "torch.where(x > 0)[0].numel()": 40,
        "x.masked_select(x > 0).numel()": 40,
        "torch.unique(x).numel()": 40,
        "[t.numel() for t in torch.unique(x, return_inverse=True, return_counts=True)]": [40, 40, 40],
        "list(torch.unique(x, dim=1).shape)": [4, 10],
        "torch.unique_consecutive(x).numel()": 40,
        "list(torch.unique_consecutive(x, dim=0).shape)": [4, 10],
        "torch.repeat_interleave(whole).numel()": 5,
        "list(x.repeat_interleave(whole[:4], dim=0).shape)": [4, 10],
        "F.one_hot(whole).size(-1)": 1000,
        "F.one_hot(whole, 7).size(-1)": 7,
        "torch.bincount(whole).numel()": 1000,
        "torch.bincount(whole, minlength=9).numel()": 9,
        "sparse().coalesce()._nnz()": 6,
        "torch.empty(0, device=d).nonzero().numel()": 0,
        "x[torch.ones_like(x) > 0].numel()": 40,
        "x[torch.zeros_like(x) > 0].numel()": 0,
        "x[torch.isnan(x)].numel()": 0,
        "x[(x > 0).all(1)].numel()": 40,
        "list(x.repeat_interleave(torch.full((4,), 3, device=d), dim=0).shape)": [12, 10],
    }
    sparse = """
    def sparse():
        where = torch.zeros(2, 6, dtype=torch.long, device=d)
        return torch.sparse_coo_tensor(where, torch.ones(6, device=d), (4, 4), check_invariants=False)
    """
    check(evaluate, upper, before=sparse)
    check(evaluate, {"x[x > 0].numel()": 10, "torch.unique(x).numel()": 10}, options="count=0.25")
    check(evaluate, {"x[x > 0].numel()": 3, "F.one_hot(whole).size(-1)": 3}, options="count=3")
    check(
        evaluate,
        {
            "x[x > 0].numel()": 10,
            "x.masked_select(x > 0).numel()": 10,
            "torch.unique(x).numel()": 7,
            "list(torch.unique(x, dim=1).shape)": [4, 7],
            "torch.unique_consecutive(x).numel()": 40,
            "torch.repeat_interleave(whole).numel()": 12,
            "F.one_hot(whole).size(-1)": 5,
            "torch.bincount(whole).numel()": 1000,
        },
        options="nonzero=25%,unique=7,repeat_interleave=12,one_hot=5",
    )


def test_a_count_that_cannot_be_set_is_noted(on_ghost):
    script = """
install()
found = len(torch.empty(2**31 + 5, dtype=torch.bool, device="cuda").nonzero())
print(found, "2,147,483,653 elements" in notes[-1][1])
"""
    assert on_ghost(INSTALL_VALUES + script) == "0 True\n"


def test_common_checks_on_values_pass(evaluate):
    check(
        evaluate,
        {
            "torch.isfinite(x).all().item()": True,
            "bool(torch.isnan(x.sum()))": False,
            "bool(torch.isinf(x).any())": False,
            "bool(torch.isfinite(x.sum()))": True,
            "math.log(x.mean().item())": 0.0,
            "1 / x.mean().cpu().item()": 1.0,
            "torch.equal(x, x + 1)": True,
            "torch.equal(x, x[:2])": False,
            "torch.allclose(x, x + 1)": True,
            "torch.testing.assert_close(x, x + 1)": None,
            "list(torch.distributions.Normal(x, x.exp()).log_prob(x).shape)": [4, 10],
            "list(torch.distributions.Categorical(x.softmax(1)).sample().shape)": [4],
            "list(torch.distributions.Bernoulli(x.sigmoid()).sample().shape)": [4, 10],
            "list(torch.distributions.Beta(x.exp(), x.exp()).rsample().shape)": [4, 10],
            "list(torch.multinomial(x.softmax(1), 3).shape)": [4, 3],
            "list(F.gumbel_softmax(x).shape)": [4, 10],
            "list(x[:, x.sum(0).argsort()].shape)": [4, 10],
            "list(x.gather(1, x.topk(2).indices).shape)": [4, 2],
            "F.embedding_bag(whole.view(1, 5), x.T.contiguous()).numel()": 4,
            "torch.nn.utils.clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True).numel()": 1,
        },
        before="""
        parameters = [torch.nn.Parameter(torch.ones(3, device=d))]
        parameters[0].grad = torch.randn(3, device=d)
        """,
    )


def test_the_loss_scale_is_exact(on_ghost):
    out = on_ghost(
        INSTALL_VALUES
        + """
install()
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)
scales = []
for _ in range(5):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.ones(2, 4, device="cuda")).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    before = model.weight._version
    scaler.step(optimizer)
    assert model.weight._version > before  # the step was taken
    scaler.update()
    optimizer.zero_grad()
    scales.append(scaler.get_scale())
print(scales, scaler.state_dict()["_growth_tracker"])
"""
    )
    assert out == "[1024.0, 2048.0, 2048.0, 4096.0, 4096.0] 1\n"


GENERATE = """
install()
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
tokens = dict(vocab_size=100, bos_token_id=0, eos_token_id=1, pad_token_id=1)
gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, **tokens))
llama = LlamaForCausalLM(LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, **tokens))
prompt = torch.randint(2, 100, (3, 10), device="cuda")
for model in (gpt2.cuda().eval(), llama.cuda().eval()):
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 5, "top_p": 0.9}):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                print(tuple(model.generate(prompt, max_new_tokens=7, **options).shape))
"""


@pytest.mark.slow
def test_generation_ends_after_the_requested_tokens(on_ghost):
    pytest.importorskip("transformers")
    assert on_ghost(INSTALL_VALUES + GENERATE).splitlines() == ["(3, 17)"] * 8


TRAIN_GPT = """
class Passes(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        own = torch.zeros_like(gradient)
        return own.add_(gradient)

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.query_key_value = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x):
        heads = self.query_key_value(self.norms[0](x)).unflatten(-1, (12, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(*heads.chunk(3, 1), is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        x = x + self.dropout(self.mlp(self.norms[1](x)))
        doubled = x * 2
        return doubled - Passes.apply(x)  # the gradient of Passes arrives first, and the other is added to it

model = torch.nn.Sequential(
    torch.nn.Embedding(100, 64), Block(64), Block(64), torch.nn.Linear(64, 100)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for _ in range(3):
    text = torch.randint(100, (4, 33)).cuda()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    if torch.isnan(loss):
        raise ValueError("nan")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    loss.item()
stats = torch.cuda.memory_stats()
exact = ("allocation.", "allocated_bytes.", "requested_bytes.", "reserved_bytes.", "segment.")
print({key: stats[key] for key in stats if key.startswith(exact)})  # splits depend on who frees first
"""


@pytest.mark.slow
def test_answering_reads_changes_no_allocation(on_ghost):
    plain = on_ghost(INSTALL_VALUES + TRAIN_GPT)
    answered = on_ghost(INSTALL_VALUES + "values = install()\n" + TRAIN_GPT)
    assert "allocated_bytes.all.peak" in plain
    assert answered == plain


INFER = """
net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)]).cuda().eval()
x = torch.zeros(64, 512, device="cuda")
earlier = torch.autocast("cuda", torch.bfloat16)

def inside():
    with torch.inference_mode(), torch.autocast("cuda", torch.float16):
        net(x), net(x)

def around():
    with earlier:
        net(x)
        with torch.inference_mode():
            net(x), net(x)
        with torch.no_grad():
            net(x)

@torch.inference_mode()
def made_before():
    with earlier:
        net(x), net(x)
    return net(x).view(-1)[2:].zero_()

for run in (inside, around, made_before):
    torch.cuda.reset_peak_memory_stats()
    run()
    stats = torch.cuda.memory_stats()
    peaks = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    print(*peaks, stats["allocation.all.allocated"])
"""


def test_inference_mode_allocates_like_pytorchs_own(on_ghost):
    assert on_ghost(INFER) == on_ghost(INSTALL_VALUES + "values = install()\n" + INFER)


def test_assumptions_are_noted_once_with_their_line(on_ghost):
    script = """
values = install()
x = torch.randn(8, device="cuda", requires_grad=True)
for _ in range(3):
    x.sum().item()                                      # MARK item
kept = x[x > 0]                                         # MARK mask
assert torch.isfinite(x).all()                          # MARK finite
print(x.tolist() == [0.0] * 8)                          # MARK copy
torch.full((2,), 1.0, device="cuda").max().item()       # known: no note
x.square().repeat_interleave(torch.tensor([1] * 8, device="cuda"), output_size=8).sum().backward()

class Reads(torch.autograd.Function):
    forward = staticmethod(lambda context, x: x * 1)
    backward = staticmethod(lambda context, g: g * g.sum().item())

for provenance, text, where in notes:
    line = open(where.rpartition(":")[0]).readlines()[int(where.rpartition(":")[2]) - 1]
    print(provenance, line.partition("# MARK ")[2].strip())
print([read.key for read in values.last_reads()])
"""
    lines = on_ghost(INSTALL_VALUES + script).splitlines()
    assert lines[1:5] == ["assumed item", "assumed mask", "assumed finite", "assumed copy"]
    assert lines[5:] == ["['float', 'nonzero', 'bool', 'copy']"]


def test_a_read_on_the_autograd_thread_falls_back_to_the_module(on_ghost):
    script = """
values = install()
x = torch.randn(8, device="cuda", requires_grad=True)
x[x > 0].sum().backward()
x.prod().backward()  # its formula looks for zeros with nonzero
print(sorted({note[2].rpartition("/")[2].partition(":")[0] for note in notes}))
"""
    assert on_ghost(INSTALL_VALUES + script) == "['layers.0', 'script.py']\n"


@pytest.mark.slow
def test_an_endless_loop_over_gpu_values_raises_with_its_line(on_ghost):
    script = """
from memfit.errors import TargetError
values = install()
error = torch.rand(1, device="cuda").exp()
rounds = 0
try:
    while error.item() > 0.1:  # the loop
        rounds += 1
        if rounds == 60_000:
            values.stepped()
except TargetError as raised:
    print(rounds, str(raised).partition(": ")[0].split()[0].endswith(":30"), "--values float=" in str(raised))
"""
    line = (INSTALL_VALUES + script).splitlines().index("    while error.item() > 0.1:  # the loop")
    out = on_ghost(INSTALL_VALUES + script.replace(":30", f":{line + 15}"))
    assert out == "159999 True True\n"


def test_tracing_and_compiling_see_pytorch_unchanged(on_ghost):
    script = """
import warnings; warnings.simplefilter("ignore")
values = install()
def f(x, w):
    y = torch.relu(x @ w)
    flag = torch.full((4,), True, device=x.device)
    one_hot = F.one_hot(torch.zeros(3, dtype=torch.long, device=x.device), 5)
    y = torch.where(torch.isnan(y), 0.0, y) * flag[:, None]
    return y.sum() + torch.isfinite(y).all() + one_hot.max()
x = torch.randn(4, 8, device="cuda")
w = torch.randn(8, 8, device="cuda", requires_grad=True)
compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
compiled(x, w).backward()
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    f(torch.randn(4, 8, device="cuda"), torch.randn(8, 8, device="cuda", requires_grad=True)).backward()
from torch.fx.experimental.proxy_tensor import make_fx
traced = make_fx(torch.isfinite)(x).code
print("ne.Scalar" in traced, torch.vmap(lambda t: torch.isfinite(t).all())(x).numel())
torch.set_default_device("cuda")
print(values.known.get(torch.full((3,), 2.0)).value, torch.zeros(2).device.type, notes)
"""
    assert on_ghost(INSTALL_VALUES + script) == "True 4\n2.0 cuda []\n"
