"""What a user must be able to tell apart, on the ghost: each script says its own truth, in bytes."""

from collections import Counter

import pytest

from memfit.analysis.breakdown import category_provenance
from memfit.records import Category, Provenance
from support.attribution_scripts import all_told, bytes_of

GROUP = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
torch.cuda.set_device(0)
"""
MLP = "nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)).cuda()"


def test_what_an_optimizer_works_in_says_how_it_steps(told):
    found, truth = told(
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
    for one in found:
        if one.born.phase == "optimizer":
            steps[one.category, one.op] += one.requested
    assert steps == {
        ("optimizer state", "AdamW.step"): 2 * truth["parameters"],
        ("temporaries", "AdamW.step (foreach)"): truth["parameters"],
        ("optimizer state", "Adam.step"): 4 * truth["parameters"]
        + 4 * 4,  # of two; a fused one counts on the GPU
        ("temporaries", "Adam.step (for-loop)"): 2 * truth["parameters"],
        ("temporaries", "SGD.step (foreach)"): truth["parameters"],
    }


def test_clipping_and_scaling_between_backward_and_optimizer_are_named(told):
    found, truth = told(
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
    ops = Counter(one.op for one in found if one.born.phase == "between")
    assert "" not in ops
    assert {"unscale_", "clip_grad_norm_/_get_total_norm", "clip_grad_norm_/_clip_grads_with_norm_"} <= set(
        ops
    )
    norms = bytes_of(found, op="clip_grad_norm_/_get_total_norm", category="temporaries")
    assert norms >= 2 * 4 * truth["parameters"]  # one number of each gradient, in two steps
    names = {one.name for one in found if one.category == "buffers"}
    assert names == {"loss scale", "loss scale's growth", "whether a gradient is infinite"}


def test_averages_that_never_run_and_optimizers_that_run_the_model(told):
    found, truth = told(
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
    assert bytes_of(found, category="parameters") == 3 * truth["parameters"]
    assert {one.module for one in found if one.category == "parameters"} == {
        *("Sequential.0", "Sequential.2", "AveragedModel.module.0", "AveragedModel.module.2")
    }
    assert bytes_of(found, category="inputs") == truth["inputs"]
    assert {one.op for one in found if one.born.phase == "optimizer"} == {"LBFGS.step"}


def test_autocasts_copies_are_named_saved_or_not(told):
    found, truth = told(
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
    assert bytes_of(found, category="inputs") == truth["inputs"]  # what follows the teacher is no input


def test_a_copy_that_the_script_made_itself_is_not_autocasts(told):
    found, truth = told(
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
    assert bytes_of(found, category="gradients", name="grad") == truth["input"]  # nobody else asks for it


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
def test_recomputed_activations_are_apart_from_what_checkpoints_keep(told, reentrant):
    found, truth = told(CHECKPOINT.replace("REENTRANT", str(reentrant)))
    name = "CheckpointFunctionBackward" if reentrant else "input of a checkpoint"
    assert bytes_of(found, category="activations", name=name) == truth["kept"]  # the first has the input
    # A reentrant checkpoint computes its output, too, which the other one knows to leave out.
    again = truth["recomputed"] + (truth["out"] if reentrant else 0)
    assert bytes_of(found, category="recomputed activations") == again
    assert not bytes_of(found, category="activations", phase="recompute")


def test_nested_checkpoints_keep_and_recompute(told):
    nested = """
inner = net.blocks
def outer(x):
    for block in inner:
        x = checkpoint(block, x, use_reentrant=False)
    return x
checkpoint(outer, x, use_reentrant=False).sum().backward()
"""
    script = CHECKPOINT.replace("REENTRANT", "False")
    found, truth = told(script.replace("net(x).sum().backward()", nested))
    inside = bytes_of(found, category="recomputed activations")
    assert inside == truth["recomputed"] + truth["kept"]  # inner checkpoints' inputs are recomputed, too


DDP = """
import torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
net = nn.Sequential(nn.Linear(256, 512), nn.BatchNorm1d(512), nn.Linear(512, 64)).cuda()
net = nn.parallel.DistributedDataParallel(net, device_ids=[0], gradient_as_bucket_view=VIEW)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    net(torch.ones(32, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
data = net._get_ddp_logging_data()
floating = [one for one in net.buffers() if one.is_floating_point()]
truth(buckets=sum(map(int, data["bucket_sizes"].split(", "))),
      rebuilt=sum(map(int, data["rebuilt_bucket_sizes"].split(", "))),
      gradients=size(net.parameters()), buffers=size(floating))
"""


@pytest.mark.parametrize(("backend", "view"), [("nccl", False), ("gloo", True)])
def test_buckets_of_ddp_are_communication_or_the_gradients_themselves(told, backend, view):
    found, truth = told(DDP.replace("BACKEND", repr(backend)).replace("VIEW", str(view)))
    assert truth["buckets"] == truth["rebuilt"] == truth["gradients"]
    category = "gradients" if view else "communication"
    made, rebuilt = (
        [one for one in found if one.op == op and one.category == category and one.requested > 1024]
        for op in ("_ddp_init_helper", "forward/_pre_forward")
    )
    assert sum(one.requested for one in made) == truth["buckets"]
    assert sum(one.requested for one in rebuilt) == truth["rebuilt"]
    if view:
        assert {one.name for one in (*made, *rebuilt)} == {"0.weight.grad and 5 more"}
        assert {one.shape for one in made} == {(truth["gradients"] // 4,)}
        assert bytes_of(found, category="gradients") == truth["buckets"] + truth["rebuilt"]
    else:
        assert bytes_of(found, category="gradients") == 3 * truth["gradients"]


def test_what_fsdp_keeps_gathers_and_reduces(told):
    found, truth = told(
        GROUP
        + """
from torch.distributed.fsdp import fully_shard
net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(2)))
net.cuda()
whole = size(net.parameters())
for block in net:
    fully_shard(block)
fully_shard(net)
optimizer = torch.optim.AdamW(net.parameters())
net(torch.ones(64, 256, device="cuda")).sum().backward()
optimizer.step()
own = size(one.to_local() for one in net.parameters())
truth(whole=whole, own=own, gradients=size(one.grad.to_local() for one in net.parameters()))
"""
    )
    assert 2 * truth["own"] == truth["whole"]
    assert bytes_of(found, category="parameters") == truth["own"]
    assert bytes_of(found, category="gradients") == truth["gradients"] == truth["own"]
    moments = [one for one in found if one.name.startswith("weight.exp_avg")]
    assert len(moments) == 8
    assert {one.shape for one in found if one.name == "weight (this rank's)"} == {(512, 256), (128, 1024)}
    by_op = Counter()
    for one in found:
        if one.category == "communication":
            by_op[one.op] += one.requested
    # Gathered for the forward and for the backward, into flat buffers and the parameters themselves.
    assert by_op["foreach_all_gather/allocate"] == 2 * truth["whole"]
    assert by_op["foreach_all_gather_copy_out/init_all_gather_outputs"] == truth["whole"]
    assert by_op["alloc_all_gather_outputs/alloc_storage"] == truth["whole"]
    assert by_op["foreach_reduce/allocate"] == truth["whole"]  # before it is reduced and scattered


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
storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in net.parameters()}
truth(parameters=sum(storages.values()), recurrent=size(net.recurrent.parameters()),
      states=2 * size(net.parameters()), hidden=32 * 8 * 64 * 4)
"""


def test_shared_memory_counts_once_and_goes_by_all_names(dry_run):
    found, trace, truth = all_told(dry_run, SHARED)
    parameters = {one.name: (one.module, one.requested) for one in found if one.category == "parameters"}
    assert sum(size for _, size in parameters.values()) == truth["parameters"]
    assert parameters == {
        "weight = head.weight": ("embedding", 256_000),
        "weight_ih_l0 and 3 more": ("recurrent", truth["recurrent"]),
        "weight = b.weight": ("a", 16_384),
        "swapped": ("Net", 16_384),
    }
    assert bytes_of(found, category="optimizer state") == truth["states"]
    assert bytes_of(found, name="weight.grad = head.weight.grad") == 256_000
    # What cuDNN keeps for its backward: its size is memfit's rule, and so is the sum of which it is a part.
    assert bytes_of(found, category="activations", name="result3 of CudnnRnnBackward0", module="recurrent")
    assert {one.name for one in found if one.category == "workspaces"} <= {"", "cuBLAS workspace"}
    assert category_provenance(trace)[Category.ACTIVATION] is Provenance.ASSUMED
    assert category_provenance(trace)[Category.INPUT] is Provenance.EXACT
    # Written to in place: one allocation each, made by a layer, last computed by what came after it.
    for module, op in (("a", "Relu"), ("b", "Add")):
        assert bytes_of(found, category="activations", module=module) == truth["hidden"]
        assert bytes_of(found, category="activations", module=module, op=op) == truth["hidden"]
