"""Known values are correct, and become unknown as soon as they might be stale."""

import pytest

from support.scripts import INSTALL_VALUES, check

pytestmark = pytest.mark.warm


def test_constants_of_the_script_stay_known_through_kernels_and_views(evaluate):
    check(
        evaluate,
        {
            "torch.full((3,), 7.0, device=d).max().item()": 7.0,
            "torch.full((3,), fill_value=0.1, dtype=torch.half, device=d)[1].item()": 0.0999755859375,
            "torch.tensor(3.5, device=d).item()": 3.5,
            "kept.item()": 3.5,
            "(kept > 3).item()": True,
            "x.new_full((2,), 3).sum().item()": 6.0,
            "whole.new_full((2,), 3).sum().item()": 6,
            "(z := torch.zeros_like(whole)).detach().view(5, 1)[2].item()": 0,
            "torch.ones(3, device=d).tolist()": [1.0, 1.0, 1.0],
            "torch.ones(3, device=d).half().max().item()": 1.0,
            "torch.ones(3, device=d).fill_(4)[0].cpu().item()": 4.0,
            "(torch.ones(2, device=d, dtype=torch.long) & ~torch.full((2,), True, device=d)).max().item()": 0,
            "bool((whole & torch.zeros_like(whole)).max() == 0)": True,
            "torch.equal(torch.zeros(2, device=d), torch.ones(2, device=d))": False,
            "torch.full((0,), 0, device=d).all().item()": True,
            "bool((torch.full((3,), True, device=d) & True)[0])": True,
        },
        before="""
        kept = torch.tensor(3.5, device=d)
        torch.randn(9, device=d)  # a launch: the ghost remembers no bytes after it
        """,
    )


def test_masks_written_by_index_select_at_most_the_written_elements(evaluate):
    """The rest of the mask keeps its value; the written elements are unknown."""
    check(
        evaluate,
        {
            "len(picked.nonzero())": 4,
            "len((picked | other).nonzero())": 4,
            "len((picked & unknown).nonzero())": 4,
            "len((picked & other).nonzero())": 3,
            "len((picked > 0).nonzero())": 4,
            "len((~(picked == 1)).nonzero())": 96,
            "len((~(picked == unknown)).nonzero())": 100,
            "len(picked.to(torch.bool).nonzero())": 4,
            "len(picked[:50].nonzero())": 4,
            "len(picked[2:4].nonzero())": 2,
            "len((square | row).nonzero())": 22,
            "len((scattered | row).nonzero())": 2 * 10 + 4,  # an element of a row counts once for each column
            "len(hot.nonzero())": 6,
            "len(twice.nonzero())": 5,
            "len(covered.nonzero())": 100,
            "len(masked.nonzero())": 100,
            "picked.max().item()": 1,
            "scattered.max().item()": 9,
            "torch.equal(picked, zeros(100))": False,
            "bool(picked.any())": True,
        },
        before="""
        x[0].add_(1)
        def zeros(*shape): return torch.zeros(*shape, dtype=torch.uint8, device=d)
        picked, other, unknown = zeros(100), zeros(100), torch.randint(9, (100,), device=d).to(torch.uint8)
        four, three = torch.arange(4, device=d), torch.arange(3, device=d)
        picked[four] = 1
        other[three] = 1
        square, row = zeros(10, 10), zeros(10)
        square[four, four] = 1
        row[four[:2]] = 1
        scattered = zeros(10, 10)
        scattered[torch.randint(9, (4,), device=d), four] = 1
        hot = zeros(3, 5).scatter_(1, torch.arange(6, device=d).view(3, 2), 1)
        twice = zeros(100)
        twice[four] = 1
        twice[7] = 1
        covered = zeros(100)
        covered[torch.arange(300, device=d)] = 1
        masked = zeros(100)
        masked[unknown > 3] = 1
        """,
        options="int=9,bool=true,all=false",
    )


def test_a_known_value_is_never_stale(evaluate):
    """A write of known elements is computed; any other makes a tensor unknown: a read returns 9."""
    writes = {
        "y.add_(1)": 8.0,
        "y[1:].add_(1)": 8.0,
        "y.view(3, 1).mul_(2)": 14.0,
        "y.detach().add_(1)": 8.0,
        "y.detach().random_()": 9.0,
        "y[0].copy_(x[0, 0])": 9.0,
        "y.data.add_(1)": 8.0,
        "y.data.random_()": 9.0,
        "[part := y.data[1:], part.random_()]": 9.0,
        "[other := y.data.detach(), y.max(), other.random_()]": 9.0,
        "[other := y.data, y.data.add_(1), other.add_(1)]": 9.0,
        "[other := y.data, y.data.add_(1), other.random_()]": 9.0,
        "setattr(y, 'data', x[0])": 9.0,
        "setattr(z, 'data', y) or z.add_(1)": 9.0,
        "[alias := y.data, y.fill_(3), alias.add_(1)]": 4.0,
        "[alias := y.data, y.fill_(3), alias.random_()]": 9.0,
        "[y.random_(), alias := y.data, y.fill_(3), alias.add_(1)]": 9.0,
        "y.data_ptr()": 9.0,
        "torch.nn.Parameter(y).data.add_(1)": 8.0,
        "torch.nn.Parameter(y).data.random_()": 9.0,
        "y.set_(x)": 9.0,
        "torch.add(x, 1, out=y)": 9.0,
        "torch.add(x[0, :3], 1, out=y)": 9.0,
        "torch.exp(x[0, :2], out=y[1:])": 9.0,
        "torch.add(z[1:], 1, out=y[1:])": 7.0,
        "torch.exp(z[:1], out=y[:1])": 7.0,
        "y.untyped_storage().resize_(4096)": 9.0,
        "torch._foreach_add_([y], 1)": 8.0,
        "torch._foreach_add_([y], [x[0, :3]])": 9.0,
        "torch._foreach_mul_([y[:1], y[1:]], [z[:1], x[0, :2]])": 9.0,
        "torch._foreach_mul_([y[:1], y[1:]], 2)": 14.0,
        "torch._foreach_zero_([y])": 0.0,
        "torch._foreach_lerp_([y], [z], 0.5)": 3.5,
        "z.set_(y).add_(1)": 9.0,
        "y.untyped_storage().fill_(0)": 9.0,
        "y.storage().fill_(0)": 9.0,
        "[s := y.untyped_storage(), s.resize_(0), s.resize_(12)]": 9.0,
        "torch.from_dlpack(torch.utils.dlpack.to_dlpack(y)).add_(1)": 9.0,
        "torch.from_dlpack(y).add_(1)": 9.0,
        "fused_step(y)": 9.0,
        "replay(y)": 9.0,
        "uncounted(y)": 9.0,
        "torch.utils.swap_tensors(y, torch.full((3,), 5.0, device=d))": 9.0,
        "y.fill_(3)": 3.0,
        "y.zero_()": 0.0,
    }
    before = """
    def fused_step(y):
        parameter = torch.nn.Parameter(y)
        parameter.grad = torch.ones_like(y)
        torch.optim.AdamW([parameter], fused=True).step()
    def replay(y):
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=side):
            y.add_(1)
        y.fill_(7)
        graph.replay()
    def uncounted(y):
        with torch.autograd._unsafe_preserve_version_counter(y):
            y.add_(1)
    def after(write):
        y = torch.full((3,), 7.0, device=d)
        z = torch.zeros(3, device=d)
        assert y.max().item() == 7.0
        eval(write, globals(), {"y": y, "z": z})
        return y.max().item()
    """
    check(
        evaluate,
        {f"after({write!r})": answer for write, answer in writes.items()},
        before=before,
        options="float=9",
    )


def test_a_new_tensor_at_a_reused_address_is_unknown(evaluate):
    before = """
    def reused():
        first = torch.full((3,), 7.0, device=d)
        assert first.max().item() == 7.0
        address = first.untyped_storage().data_ptr()
        del first
        second = torch.empty(3, device=d)
        assert second.untyped_storage().data_ptr() == address
        return second.max().item()
    """
    check(
        evaluate,
        {"reused()": 9.0, "[reused() for _ in range(50)] == [9.0] * 50": True},
        before=before,
        options="float=9",
    )


def test_views_with_another_dtype_or_range_are_unknown(evaluate):
    check(
        evaluate,
        {
            "torch.ones(4, device=d).view(torch.int32)[0].item()": 5,
            "torch.full((4,), 1.0, device=d)[::2].max().item()": 1.0,
            "part.max().item()": 9.0,
            "torch.ones(2, 2, device=d)[:, 0].fill_(3).max().item()": 3.0,
        },
        before="""
        base = torch.empty(8, device=d)
        head = base[:4].fill_(2)
        part = base[2:6]
        """,
        options="float=9,int=5",
    )


def test_values_are_rounded_as_tensors_round_them(on_ghost):
    script = """
from memfit.ghost.values.dtype_rounding import round_to_dtype
torch.manual_seed(0)
numbers = [0.1, -0.1, 1e-45, 1e-8, 65504.0, 65519.9, 65520.0, 3.39e38, 3.4e38, 3.5e38, 1e300, -math.inf, 0.0]
numbers += (torch.randn(500, dtype=torch.float64) * 10 ** torch.randint(-9, 9, (500,))).tolist()
for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
    for number in numbers:
        held = torch.tensor(number, dtype=torch.float64).to(dtype).item()
        assert round_to_dtype(number, dtype) == held, (number, dtype)
assert math.isnan(round_to_dtype(math.nan, torch.bfloat16))
print(round_to_dtype(2.7, torch.int8), round_to_dtype(200, torch.int8), round_to_dtype(math.inf, torch.long))
"""
    assert on_ghost(INSTALL_VALUES + script) == "2 None None\n"
