"""A post-mortem skips live objects that raise when inspected."""

import pytest

from memfit.allocator.timeline import memory_timeline
from memfit.analysis.attribution import attribute_allocations
from memfit.analysis.breakdown import breakdown_at
from memfit.records import GroupBy
from memfit.trace.trace_file import read_trace
from support.scripts import WATCHED

PARAMETERS = 4 * 821_248
ODD = """
    def raises(*_):
        raise RuntimeError("mine")

    def fail():
        try:
            torch.empty(1 << 40, device="cuda")
        except torch.OutOfMemoryError:
            pass

    class Unasked(torch.Tensor):
        __torch_function__ = classmethod(raises)

    class Nameless(nn.Module):
        named_modules = named_parameters = raises

    class Stateless(torch.optim.SGD):
        state = property(raises, lambda *_: None)

    class Unready(nn.Module):
        def __init__(self):
            fail()  # before it is a module
            super().__init__()

    class Bare(torch.optim.Optimizer):
        def __init__(self):
            pass

    model = Net().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    with memfit.watch():
        steps(model, optimizer, 1)
        lazy = nn.LazyLinear(4).cuda()
        fail()
        nested = torch.nested.nested_tensor([torch.ones(64, device="cuda"), torch.ones(9, device="cuda")])
        mine = torch.ones(4, device="cuda", requires_grad=True).as_subclass(Unasked)
        nameless, stateless, bare = Nameless(), Stateless(model.parameters()), Bare()
        Unready()
"""


@pytest.mark.slow
def test_a_post_mortem_skips_objects_that_raise(rehearse, tmp_path):
    done = rehearse(WATCHED + ODD)
    assert done.returncode == 0, done.stderr
    assert "no post-mortem" not in done.stderr
    for number, incomplete in ((1, False), (2, True)):
        trace = read_trace(tmp_path / f"memfit-oom-{number}.memfit")
        assert any("were skipped" in note.text for note in trace.notes) == incomplete
        line = memory_timeline(trace)
        found = breakdown_at(trace, line, attribute_allocations(trace, line), len(trace.events) - 1)
        rows = {row.name: row.bytes for row in found.rows[GroupBy.CATEGORY]}
        assert (rows["parameters"], rows["optimizer state"]) == (PARAMETERS, 2 * PARAMETERS)
