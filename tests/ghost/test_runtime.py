"""The C runtime: its own checks under sanitizers, and PyTorch running on it."""

import re
import subprocess
from pathlib import Path

import pytest

from memfit.ghost.build.runtime_library import INCLUDES, RUNTIME
from support.sanitized_build import build

pytestmark = pytest.mark.process

CHECKS = Path(__file__).with_name("checks")
NAMES = re.findall(r"each\((\w+)\)", (CHECKS / "checks.h").read_text())


@pytest.fixture(scope="session")
def checks(tmp_path_factory):
    sources = [*CHECKS.glob("*.c"), *RUNTIME.rglob("*.c")]
    program = tmp_path_factory.mktemp("checks") / "checks"
    return build(program, sources, *INCLUDES, "-lpthread", "-ldl")


def test_every_check_is_listed(checks):
    listed = subprocess.run([checks], capture_output=True, text=True, check=True).stdout.split()
    assert listed == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_check(checks, name):
    done = subprocess.run([checks, name], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


# ---- Under PyTorch --------------------------------------------------------------------------------

SMALL_NET = """
    from torch import nn
    def step(net, x, optimizer):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
    def small_net():
        return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
"""


@pytest.mark.warm
def test_one_tensor_takes_one_segment(on_ghost):
    out = on_ghost("""
        x = torch.empty(1, device="cuda")
        print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), ghost.counter("used"))
        print(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.cuda.mem_get_info())
    """)
    left, total = (80 << 30) - (2 << 20), 80 << 30
    assert out == f"512 2097152 2097152\nNVIDIA A100-SXM4-80GB (8, 0) ({left}, {total})\n"


@pytest.mark.warm
def test_out_of_memory_raises_pytorchs_own_error(on_ghost):
    out = on_ghost("""
        ghost.configure(DEVICE, in_use=79 << 30)
        kept = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)
        try:
            torch.empty(2 << 30, device="cuda", dtype=torch.uint8)
        except torch.OutOfMemoryError as error:
            print(str(error)[:47], torch.cuda.memory_reserved() == 1 << 28)
        print(torch.empty(1 << 29, device="cuda", dtype=torch.uint8).shape)
    """)
    assert out == "CUDA out of memory. Tried to allocate 2.00 GiB. True\ntorch.Size([536870912])\n"


@pytest.mark.warm
def test_mixed_precision_and_channels_last_run(on_ghost):
    out = on_ghost("""
        from torch import nn
        net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU()).cuda()
        net = net.to(memory_format=torch.channels_last)
        optimizer, scaler = torch.optim.AdamW(net.parameters()), torch.amp.GradScaler("cuda")
        x = torch.randn(8, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
        for _ in range(2):
            with torch.autocast("cuda", torch.float16):
                loss = net(x).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        print(ghost.gaps_reached(), ghost.counter("cudnn_calls") > 0)
    """)
    assert out == "() True\n"


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION"])
@pytest.mark.warm
def test_each_attention_backend_runs(on_ghost, backend):
    out = on_ghost(f"""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        q, k, v = (torch.randn(2, 8, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                   for _ in range(3))
        with sdpa_kernel(SDPBackend.{backend}):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        print(q.grad.shape)
    """)
    assert out == "torch.Size([2, 8, 256, 64])\n"


@pytest.mark.warm
def test_cuda_graphs_use_a_private_pool(on_ghost):
    out = on_ghost(
        SMALL_NET
        + """
    net, x = small_net(), torch.randn(32, 256, device="cuda")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step(net, x, optimizer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(net, x, optimizer)
    graph.replay()
    print(sorted({segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()}))
    del graph
    torch.cuda.empty_cache()
    """
    )
    assert out == "[(0, 0), (1, 0)]\n"


def test_pinned_memory_and_data_loader_workers_run(on_ghost):
    out = on_ghost("""
        from torch.utils.data import DataLoader, TensorDataset
        torch.zeros(1, device="cuda")  # the workers are forked after CUDA is initialised
        data = TensorDataset(torch.arange(256.0))
        total = 0
        for (x,) in DataLoader(data, batch_size=32, num_workers=2, pin_memory=True):
            assert x.is_pinned() and x[3:].is_pinned() and not torch.empty(8).is_pinned()
            total += x.cuda(non_blocking=True).cpu().sum().item()  # no kernel in between: known values
        print(total)
    """)
    assert out == f"{sum(range(256)):.1f}\n"


@pytest.mark.warm
def test_offloaded_tensors_take_no_host_memory(on_ghost):
    out = on_ghost("""
        import resource
        kept = [torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True) for _ in range(8)]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for each in kept:
            each.copy_(torch.empty(1 << 28, dtype=torch.uint8, device="cuda"))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10 << 10, kept[5].sum().item())
    """)
    assert out == "True 0\n"


@pytest.mark.warm
def test_the_profiler_runs(on_ghost):
    out = on_ghost(
        SMALL_NET
        + """
    from torch.profiler import ProfilerActivity, profile
    net = small_net()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as seen:
        net(torch.randn(8, 256, device="cuda")).sum().backward()
    print(any(event.key == "aten::addmm" for event in seen.key_averages()))
    """
    )
    assert out.endswith("True\n")


THREE_STEPS = (
    SMALL_NET
    + """
    ghost.log_allocations(True)
    ghost.set_label(7)
    net = small_net()
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    x = torch.randn(32, 256, device="cuda")
    for _ in range(3):
        step(net, x, optimizer)
    allocated = torch.cuda.max_memory_allocated()
    log = ghost.allocation_log()
    live, peak, now = {}, 0, 0
    for event in log:
        if event.action in (0, 2):
            live[event.address] = event.size
        else:
            now -= live.pop(event.address)
        now += live.get(event.address, 0)
        peak = max(peak, now)
"""
)


@pytest.mark.slow
@pytest.mark.warm
def test_the_stream_ordered_allocator_reports_the_pools_figures(on_ghost):
    out = on_ghost(
        THREE_STEPS
        + """
    from memfit.ghost.runtime_bindings import AllocationLogAction as Action
    actions = {Action(event.action).name for event in log}
    print(actions == {"MALLOC_ASYNC", "FREE_ASYNC"}, {e.label for e in log[:5]})
    print(peak == allocated, torch.cuda.max_memory_reserved() == ghost.counter("used_peak") == 32 << 20)
    """,
        PYTORCH_ALLOC_CONF="backend:cudaMallocAsync",
        PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync",
    )
    assert out == "True {7}\nTrue True\n"


@pytest.mark.slow
@pytest.mark.warm
def test_without_caching_the_log_has_every_allocation(on_ghost):
    out = on_ghost(
        THREE_STEPS
        + """
    from memfit.ghost.runtime_bindings import AllocationLogAction as Action
    print(allocated, {Action(event.action).name for event in log} == {"MALLOC", "FREE"}, peak > 0)
    del net, optimizer, x
    torch._C._cuda_clearCublasWorkspaces()
    print(ghost.counter("used"))
    """,
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )
    assert out == "0 True True\n0\n"


@pytest.mark.slow
@pytest.mark.warm
def test_expandable_segments_are_mapped_and_released(on_ghost):
    out = on_ghost(
        SMALL_NET
        + """
    net = small_net()
    print(ghost.counter("maps") > 0, ghost.counter("mallocs"))
    print(ghost.counter("used") == torch.cuda.memory_reserved())
    del net
    torch.cuda.empty_cache()
    print(ghost.counter("used"))
    """,
        PYTORCH_ALLOC_CONF="expandable_segments:True",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )
    assert out == "True 0\nTrue\n0\n"


@pytest.mark.warm
def test_held_events_defer_frees(on_ghost):
    out = on_ghost("""
        side = torch.cuda.Stream()
        x = torch.empty(1 << 20, device="cuda")
        x.record_stream(side)
        ghost.hold_events(True)
        del x
        active = lambda: torch.cuda.memory_stats()["active_bytes.all.current"]
        print(torch.cuda.memory_allocated(), active())
        torch.empty(1, device="cuda")
        print(active() > 1 << 20)
        ghost.hold_events(False)
        torch.empty(1, device="cuda")
        print(active())
    """)
    assert out == f"0 {4 << 20}\nTrue\n0\n"


@pytest.mark.warm
def test_a_gap_raises_and_is_reported(on_ghost):
    out = on_ghost("""
        try:
            event = torch.cuda.Event(interprocess=True)
            event.record()
            event.ipc_handle()
        except RuntimeError as error:
            print("memfit" in str(error))
        try:
            torch._cslt_compress(torch.ones(64, 64, device="cuda", dtype=torch.half))
        except RuntimeError as error:
            print("memfit" in str(error))
        try:
            torch.ones(1, device="cuda").untyped_storage()._share_cuda_()
        except RuntimeError as error:
            print("memfit" in str(error))
        try:
            import os
            torch.cuda.gds.GdsFile(__file__, os.O_RDWR)
        except RuntimeError as error:
            print("cuFile" in str(error))
        print(ghost.gaps_reached())
    """)
    *named, gaps = out.splitlines()
    assert named == ["True"] * 4
    assert gaps == str(
        (
            "cudaIpcGetEventHandle",
            "cusparseLtSpMMACompressedSize2",
            "cudaIpcGetMemHandle",
            "cuFileHandleRegister",
        )
    )


@pytest.mark.warm
def test_counts_are_answered_on_this_thread_only(on_ghost):
    out = on_ghost("""
        import threading
        x = torch.ones(5, device="cuda")
        with ghost.answering_counts(3):
            print(x.nonzero().shape)
            other = threading.Thread(target=lambda: print(x.nonzero().shape))
            other.start(), other.join()
        print(x.nonzero().shape)
    """)
    assert out == "torch.Size([3, 1])\ntorch.Size([0, 1])\ntorch.Size([0, 1])\n"


@pytest.mark.slow
def test_forked_children_may_set_another_capacity(on_ghost):
    out = on_ghost("""
        import dataclasses, os, sys
        def child(total):
            ghost.configure(dataclasses.replace(DEVICE, total_bytes=total))
            try:
                x = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
                x.float().requires_grad_().sum().backward()
                print("fits", flush=True)
            except torch.OutOfMemoryError:
                print("out of memory", flush=True)
            os._exit(0)
        for total in (2 << 30, 80 << 30):
            if os.fork() == 0:
                child(total)
            os.wait()
    """)
    assert out == "out of memory\nfits\n"


def test_loading_after_torch_is_refused(on_ghost):
    out = on_ghost("""
        from memfit.errors import GhostError
        try:
            load(build_ghost())
        except GhostError as error:
            print(error)
    """)
    assert out.startswith("Cannot load the ghost: PyTorch is already loaded.")


@pytest.mark.warm
def test_configuring_after_an_allocation_is_refused(on_ghost):
    out = on_ghost("""
        from memfit.errors import GhostError
        x = torch.empty(1, device="cuda")
        try:
            ghost.configure(DEVICE)
        except GhostError as error:
            print(error)
    """)
    assert "device memory is already allocated" in out
