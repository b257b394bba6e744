"""Attribution of what DDP and FSDP hold on one rank, against figures that each script reports itself."""

from collections import Counter

import pytest

from support.attributed_runs import bytes_of

pytestmark = pytest.mark.warm

GROUP = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
torch.cuda.set_device(0)
"""
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
floating = [buffer for buffer in net.buffers() if buffer.is_floating_point()]
truth(buckets=sum(map(int, data["bucket_sizes"].split(", "))),
      rebuilt=sum(map(int, data["rebuilt_bucket_sizes"].split(", "))),
      gradients=size(net.parameters()), buffers=size(floating))
"""


@pytest.mark.parametrize(
    ("backend", "view"), [("nccl", False), pytest.param("gloo", True, marks=pytest.mark.slow)]
)
def test_ddp_buckets_are_communication_or_gradients(attributed, backend, view):
    found, truth = attributed(DDP.replace("BACKEND", repr(backend)).replace("VIEW", str(view)))
    assert truth["buckets"] == truth["rebuilt"] == truth["gradients"]
    category = "gradients" if view else "communication"
    made, rebuilt = (
        [row for row in found if row.op == op and row.category == category and row.requested > 1024]
        for op in ("_ddp_init_helper", "forward/_pre_forward")
    )
    assert sum(row.requested for row in made) == truth["buckets"]
    assert sum(row.requested for row in rebuilt) == truth["rebuilt"]
    if view:
        assert {row.name for row in (*made, *rebuilt)} == {"0.weight.grad and 5 more"}
        assert {row.shape for row in made} == {(truth["gradients"] // 4,)}
        assert bytes_of(found, category="gradients") == truth["buckets"] + truth["rebuilt"]
    else:
        assert bytes_of(found, category="gradients") == 3 * truth["gradients"]


def test_fsdp_shards_and_communication_buffers_are_attributed(attributed):
    found, truth = attributed(
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
own = size(parameter.to_local() for parameter in net.parameters())
truth(whole=whole, own=own, gradients=size(parameter.grad.to_local() for parameter in net.parameters()))
"""
    )
    assert 2 * truth["own"] == truth["whole"]
    assert bytes_of(found, category="parameters") == truth["own"]
    assert bytes_of(found, category="gradients") == truth["gradients"] == truth["own"]
    moments = [row for row in found if row.name.startswith("weight.exp_avg")]
    assert len(moments) == 8
    assert {row.shape for row in found if row.name == "weight (this rank's)"} == {(512, 256), (128, 1024)}
    by_op = Counter()
    for row in found:
        if row.category == "communication":
            by_op[row.op] += row.requested
    # All-gathers for the forward and the backward, into flat buffers and the parameters themselves.
    assert by_op["foreach_all_gather/allocate"] == 2 * truth["whole"]
    assert by_op["foreach_all_gather_copy_out/init_all_gather_outputs"] == truth["whole"]
    assert by_op["alloc_all_gather_outputs/alloc_storage"] == truth["whole"]
    assert by_op["foreach_reduce/allocate"] == truth["whole"]  # input of the reduce-scatter


@pytest.mark.parametrize("original", [True, False])
def test_flat_parameters_of_fsdp1_are_shares_and_what_it_gathers_is_communication(attributed, original):
    """The outer linear layer stays gathered from forward to backward, and autograd saves its weight."""
    found, truth = attributed(
        GROUP
        + f"""
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
flat = dict(device_id=torch.cuda.current_device(), use_orig_params={original})
inner = FSDP(nn.Linear(256, 1024, bias=False), **flat)
net = FSDP(nn.Sequential(inner, nn.Linear(1024, 256, bias=False)), **flat)
optimizer = torch.optim.AdamW(net.parameters())
net(torch.ones(64, 256, device="cuda")).sum().backward()
optimizer.step()
shares = [parameter for parameter in net.parameters() if parameter.numel()]
truth(own=size(shares), gradients=size(parameter.grad for parameter in shares))
"""
    )
    whole = 2 * 256 * 1024 * 4
    assert truth == {"own": whole // 2, "gradients": whole // 2}
    assert bytes_of(found, category="parameters") == bytes_of(found, category="gradients") == whole // 2
    assert bytes_of(found, category="optimizer state") == whole
    gathered = [row for row in found if row.op == "_alloc_padded_unsharded_flat_param/_alloc_storage"]
    assert {row.category for row in gathered} == {"communication"}
    assert sum(row.requested for row in gathered) == whole + whole // 2  # the inner layer's, twice
