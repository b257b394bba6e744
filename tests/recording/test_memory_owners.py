"""Attribution of memory on the ghost, against figures that each script reports itself, in bytes."""

from collections import Counter

import pytest

from memfit.analysis.breakdown import category_provenance
from memfit.records import Category, Provenance
from support.attributed_runs import bytes_of, run_and_attribute

pytestmark = pytest.mark.warm

MLP = "nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)).cuda()"


def test_temporaries_of_an_optimizer_are_labelled_with_its_implementation(attributed):
    found, truth = attributed(
        f"""
net = {MLP}
for optimizer in (
    torch.optim.AdamW(net.parameters()),
    torch.optim.Adam(net.parameters(), foreach=False),
    torch.optim.SGD(net.parameters(), 0.1, weight_decay=0.1),
    torch.optim.Adam(net.parameters(), fused=True),
):
    net(torch.ones(32, 256, device="cuda")).sum().backward()
    optimizer.step()
truth(parameters=size(net.parameters()))
"""
    )
    steps = Counter()
    for row in found:
        if row.born.phase == "optimizer":
            steps[row.category, row.op] += row.requested
    assert steps == {
        ("optimizer state", "AdamW.step"): 2 * truth["parameters"],
        ("temporaries", "AdamW.step (foreach)"): truth["parameters"],
        # Two optimizers; fused Adam keeps its step counts on the GPU.
        ("optimizer state", "Adam.step"): 4 * truth["parameters"] + 4 * 4,
        ("temporaries", "Adam.step (for-loop)"): 2 * truth["parameters"],
        ("temporaries", "SGD.step (foreach)"): truth["parameters"],
    }


def test_gradient_clipping_and_scaling_are_named(attributed):
    found, truth = attributed(
        f"""
net = {MLP}
optimizer, scaler = torch.optim.AdamW(net.parameters(), fused=FUSED), torch.amp.GradScaler()
for _ in range(2):
    scaler.scale(net(torch.ones(32, 256, device="cuda")).sum()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
truth(parameters=len(list(net.parameters())))
""".replace("FUSED", "True")
    )
    ops = Counter(row.op for row in found if row.born.phase == "between")
    assert "" not in ops
    assert {"unscale_", "clip_grad_norm_/_get_total_norm", "clip_grad_norm_/_clip_grads_with_norm_"} <= set(
        ops
    )
    norms = bytes_of(found, op="clip_grad_norm_/_get_total_norm", category="temporaries")
    assert norms >= 2 * 4 * truth["parameters"]  # one norm per gradient, in two steps
    names = {row.name for row in found if row.category == "buffers"}
    assert names == {"loss scale", "loss scale growth tracker", "found_inf flag"}


def test_averaged_models_that_never_run_and_optimizers_that_run_the_model_are_attributed(attributed):
    found, truth = attributed(
        f"""
import copy
net = {MLP}
frozen, average = copy.deepcopy(net), torch.optim.swa_utils.AveragedModel(net)
x, optimizer = torch.ones(32, 256, device="cuda"), torch.optim.LBFGS(net.parameters())
def closure():
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    return loss
for _ in range(2):
    optimizer.step(closure)
    average.update_parameters(net)
truth(parameters=size(net.parameters()), inputs=size([x]))
"""
    )
    assert bytes_of(found, category="parameters") == truth["parameters"]
    assert bytes_of(found, category="EMA and weight copies") == 2 * truth["parameters"]
    assert {row.module for row in found if row.category == "EMA and weight copies"} == {
        *("Sequential.0", "Sequential.2", "AveragedModel.module.0", "AveragedModel.module.2")
    }
    assert bytes_of(found, category="inputs") == truth["inputs"]
    assert {row.op for row in found if row.born.phase == "optimizer"} == {"LBFGS.step"}


def test_averages_in_lists_and_what_the_script_holds_are_no_inputs_and_a_teacher_has_parameters(attributed):
    found, truth = attributed(
        f"""
import copy
def train():  # what it holds is gone when the script ends
    net = {MLP}
    teacher = copy.deepcopy(net).requires_grad_(False)
    average = [parameter.detach().clone() for parameter in net.parameters()]
    table, x = torch.ones(1000, 64, device="cuda"), torch.ones(32, 256, device="cuda")
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for index in range(3):
        batch = torch.ones(16, 256).cuda()
        loss = (net(x) - teacher(x) + table[index]).square().mean() + net(batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(average, list(net.parameters()), 0.1)
    truth(parameters=size(net.parameters()), table=size([table]), x=size([x]), batch=size([batch]))
train()
"""
    )
    assert bytes_of(found, category="parameters") == 2 * truth["parameters"]
    assert bytes_of(found, category="EMA and weight copies") == truth["parameters"]
    assert bytes_of(found, category="held by the script") == truth["table"]
    assert bytes_of(found, category="inputs") == truth["x"] + 3 * truth["batch"]


def test_a_copy_is_found_beside_a_module_whose_attribute_has_the_name_of_a_method(attributed):
    """As that of Megatron's DistributedDataParallel, ``buffers``."""
    found, truth = attributed(
        f"""
class Wrapper(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.buffers = net, []
    def forward(self, x):
        return self.net(x)
net = Wrapper({MLP})
average = [parameter.detach().clone() for parameter in net.parameters()]
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(2):
    net(torch.ones(32, 256, device="cuda")).mean().backward()
    optimizer.step()
truth(average=size(average))
"""
    )
    assert bytes_of(found, category="EMA and weight copies") == truth["average"]


def test_autocast_copies_are_named_whether_saved_or_not(attributed):
    found, truth = attributed(
        """
net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)).cuda()
teacher = nn.Linear(256, 64).cuda()
with torch.autocast("cuda", torch.bfloat16):
    x = torch.ones(32, 256, device="cuda")
    student = net(x)
    with torch.no_grad():
        target = teacher(x)
    (student - target).float().square().sum().backward()
saved, others = [net[2].weight], [net[0].weight, net[0].bias, net[2].bias, *teacher.parameters()]
truth(saved=size(saved) // 2, others=size(others) // 2, inputs=size([x]))
"""
    )
    saved = bytes_of(found, category="activations", name="autocast's copy of weight", module="2")
    assert saved == truth["saved"]
    assert bytes_of(found, category="temporaries", op="autocast's copy of a parameter") == truth["others"]
    assert bytes_of(found, category="inputs") == truth["inputs"]  # the target of the teacher is not an input


def test_a_cast_by_the_script_is_not_attributed_to_autocast(attributed):
    found, truth = attributed(
        """
class Half(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.half())
net = Half(256, 64, bias=False).cuda()
x = torch.ones(32, 256, device="cuda", dtype=torch.half, requires_grad=True)
net(x).sum().backward()
truth(copy=size([net.weight]) // 2, input=size([x]))
"""
    )
    assert bytes_of(found, category="activations", name="copy of weight") == truth["copy"]
    assert bytes_of(found, category="gradients", name="grad") == truth["input"]  # of the input


CHECKPOINT = """
from torch.utils.checkpoint import checkpoint
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(256, 1024), nn.Sigmoid())
        self.out = nn.Linear(1024, 256)
    def forward(self, x):
        return self.out(self.inner(x))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=REENTRANT)
        return x
net = Net().cuda()
x = torch.ones(64, 256, device="cuda", requires_grad=True)
net(x).sum().backward()
kept = 64 * 256 * 4
truth(kept=2 * kept, recomputed=3 * 64 * 1024 * 4, out=3 * kept)
"""


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_are_distinguished_from_checkpoint_inputs(attributed, reentrant):
    found, truth = attributed(CHECKPOINT.replace("REENTRANT", str(reentrant)))
    name = "CheckpointFunctionBackward" if reentrant else "input of a checkpoint"
    assert bytes_of(found, category="activations", name=name) == truth["kept"]  # the first keeps the input
    # A reentrant checkpoint recomputes its output, too; a non-reentrant one stops before it.
    recomputed = truth["recomputed"] + (truth["out"] if reentrant else 0)
    assert bytes_of(found, category="recomputed activations") == recomputed
    assert not bytes_of(found, category="activations", phase="recompute")


@pytest.mark.slow
def test_nested_checkpoints_recompute_activations_and_inner_inputs(attributed):
    nested = """
inner = net.blocks
def outer(x):
    for block in inner:
        x = checkpoint(block, x, use_reentrant=False)
    return x
checkpoint(outer, x, use_reentrant=False).sum().backward()
"""
    script = CHECKPOINT.replace("REENTRANT", "False")
    found, truth = attributed(script.replace("net(x).sum().backward()", nested))
    inside = bytes_of(found, category="recomputed activations")
    assert inside == truth["recomputed"] + truth["kept"]


SHARED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embedding.weight
        self.recurrent = nn.LSTM(64, 64)
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.swapped = nn.Parameter(torch.zeros(10))
        self.act = nn.ReLU(inplace=True)
    def forward(self, index):
        x = self.recurrent(self.embedding(index))[0]
        x = self.b(self.act(self.a(x)))
        x += self.swapped[:64]
        left, right = x.chunk(2, -1)
        return self.head(torch.cat([left.exp(), right.sin()], -1))
net = Net()
optimizer = torch.optim.AdamW(net.parameters())
net.cuda()
net.b.weight.data = net.a.weight.data
net.swapped.data = torch.ones(4096, device="cuda")
index = torch.zeros(32, 8, dtype=torch.long, device="cuda")
net(index).square().mean().backward()
optimizer.step()
storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in net.parameters()}
truth(parameters=sum(storages.values()), recurrent=size(net.recurrent.parameters()),
      states=2 * size(net.parameters()), hidden=32 * 8 * 64 * 4)
"""


def test_shared_memory_counts_once_and_has_all_names(dry_run):
    found, trace, truth = run_and_attribute(dry_run, SHARED)
    parameters = {row.name: (row.module, row.requested) for row in found if row.category == "parameters"}
    assert sum(size for _, size in parameters.values()) == truth["parameters"]
    assert parameters == {
        "weight = head.weight": ("embedding", 256_000),
        "weight_ih_l0 and 3 more": ("recurrent", truth["recurrent"]),
        "weight = b.weight": ("a", 16_384),
        "swapped": ("Net", 16_384),
    }
    assert bytes_of(found, category="optimizer state") == truth["states"]
    assert bytes_of(found, name="weight.grad = head.weight.grad") == 256_000
    # cuDNN's reserve space: its size follows a rule of memfit's, so the sum that includes it is assumed, too.
    assert bytes_of(found, category="activations", name="result3 of CudnnRnnBackward0", module="recurrent")
    assert {row.name for row in found if row.category == "workspaces"} <= {"", "cuBLAS workspace"}
    assert category_provenance(trace)[Category.ACTIVATION] is Provenance.ASSUMED
    assert category_provenance(trace)[Category.INPUT] is Provenance.EXACT
    # Modified in place: one allocation each, made by a layer and last written by the op that follows.
    for module, op in (("a", "Relu"), ("b", "Add")):
        assert bytes_of(found, category="activations", module=module) == truth["hidden"]
        assert bytes_of(found, category="activations", module=module, op=op) == truth["hidden"]


def test_workspaces_that_cudnn_benchmark_tries_are_workspaces(dry_run):
    found, trace, truth = run_and_attribute(
        dry_run,
        """
torch.backends.cudnn.benchmark = True
layer, x = nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda(), torch.ones(8, 64, 64, 64, device="cuda")
before = torch.cuda.memory_allocated()
y = layer(x)
truth(rise=torch.cuda.max_memory_allocated() - before, result=size([y]))
""",
    )
    made = [row for row in found if row.born.phase == "forward"]
    assert sum(row.requested for row in made if row.category == "outputs") == truth["result"]
    tried = [row.block for row in made if row.category == "workspaces"]
    assert max(tried, default=0) == truth["rise"] - truth["result"]
    assert {row.category for row in made} <= {"outputs", "workspaces"}
    assert category_provenance(trace)[Category.TEMPORARY] is Provenance.EXACT


CLEARED = """
def used():
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated() or total - free  # PyTorch counts nothing without its cache
net = nn.Linear(512, 512).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(2):
    net(torch.ones(64, 512, device="cuda")).sum().backward()
    optimizer.step()
before = used()
torch._C._cuda_clearCublasWorkspaces()
truth(workspaces=before - used())
"""


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "uncached"])
def test_cublas_workspaces_that_the_script_releases_are_workspaces(cached, attributed, monkeypatch):
    if not cached:
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    found, truth = attributed(CLEARED)
    assert truth["workspaces"] > 8 << 20
    assert bytes_of(found, category="workspaces") == truth["workspaces"]
