"""Labels of allocations: phases, modules and lines, in forward, backward and recomputation."""

from collections import Counter

import pytest

from memfit.allocator.timeline import memory_timeline, timeline_disagreement_with_pytorch
from memfit.records import Action, Category, MarkKind, Phase
from memfit.trace.trace_file import read_trace

pytestmark = pytest.mark.warm

NET = """
    import copy, sys, torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(512, 512)
        def forward(self, x):
            return torch.sigmoid(self.fc(x)) * x.sin()
    class Net(nn.Module):
        def __init__(self, how="plain"):
            super().__init__()
            self.how, self.first = how, nn.Linear(512, 512)
            self.blocks = nn.ModuleList(Inner() for _ in range(2))
            self.last = nn.Sequential(nn.Linear(512, 512), nn.GELU())
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                if self.how == "plain":
                    x = block(x)
                else:
                    x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
            return self.last(x)
    def train(model, steps=2, size=1024):
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            x = torch.ones(size, 512, device="cuda")
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.fixture
def trace_of(dry_run):
    """Return a function that records a script and returns its trace, after checking its statistics."""

    def record(script, *options, **more):
        run = dry_run(script, options=("-o", "run.memfit", *options), **more)
        assert run.code == 0, run.err
        trace = read_trace(run.folder / "run.memfit")
        assert timeline_disagreement_with_pytorch(trace, memory_timeline(trace)) == ""
        return trace

    return record


def allocations(trace):
    """Yield the label of every allocation (None if unknown) and its lines, innermost first."""
    events = trace.events
    for position in range(len(events)):
        if events.action[position] == Action.ALLOC:
            label = trace.labels[events.label[position]] if events.label[position] >= 0 else None
            stack = events.stack[position]
            if stack < 0 and label is not None:
                stack = label.stack
            lines = [trace.frames[index] for index in trace.stacks[stack]] if stack >= 0 else []
            yield label, lines


def modules(trace, phase):
    return Counter(
        label.module for label, _ in allocations(trace) if label is not None and label.phase is phase
    )


def test_every_allocation_is_labelled_with_its_module_in_forward_and_backward(trace_of):
    trace = trace_of(NET + "    train(Net().cuda())\n")
    assert all(label is not None for label, _ in allocations(trace))
    forward, backward = modules(trace, Phase.FORWARD), modules(trace, Phase.BACKWARD)
    for module in ("first", "blocks.0", "blocks.0.fc", "blocks.1", "blocks.1.fc", "last.0", "last.1"):
        assert forward[module], module
        assert backward[module], module
    assert backward.keys() <= forward.keys() | {""}  # the loss is computed outside modules
    assert backward[""] >= 2


def test_backward_allocations_have_the_line_of_their_forward(trace_of):
    trace = trace_of(NET + "    train(Net().cuda())\n")
    for label, lines in allocations(trace):
        if label.phase is Phase.BACKWARD and label.module.endswith("fc"):
            assert lines[0].function == "forward"
            assert lines[0].user
            assert label.op


def test_steps_are_marked_and_owners_have_categories(trace_of):
    trace = trace_of(NET + "    train(Net().cuda())\n")
    kinds = Counter(mark.kind for mark in trace.marks)
    assert kinds[MarkKind.TRAINING_STEP] == kinds[MarkKind.OPTIMIZER_STEP] == kinds[MarkKind.BACKWARD] == 2
    assert [mark.position for mark in trace.marks] == sorted(mark.position for mark in trace.marks)
    categories = Counter(trace.events.category[trace.events.action == Action.ALLOC].tolist())
    tensors = 8  # four linear layers
    assert categories[Category.PARAMETER] == tensors
    assert categories[Category.GRADIENT] == 2 * tensors
    assert categories[Category.OPTIMIZER_STATE] == 2 * tensors


def test_workspaces_are_distinguished_from_allocations_with_their_size_and_address(trace_of):
    script = """
    import torch
    from torch import nn
    size = 58_720_256  # by the rule for convolutions
    x = torch.zeros(1, 64, 224, 224, device="cuda", requires_grad=True)
    layer = nn.Conv2d(64, 64, 3, padding=1).cuda()
    for _ in range(2):
        layer(x).sum().backward()
        alike = torch.empty(size, dtype=torch.uint8, device="cuda")
        del alike
    """
    trace = trace_of(script, "--workspaces", "rules")
    found = [
        (int(trace.events.category[at]), trace.labels[trace.events.label[at]].phase)
        for at in range(len(trace.events))
        if trace.events.action[at] == Action.ALLOC and trace.events.size[at] == 58_720_256
    ]
    assert [category for category, _ in found] == [Category.WORKSPACE, Category.UNKNOWN] * 2
    assert found[0][1] is Phase.BACKWARD


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_recomputation_has_its_own_phase_and_labels_are_restored(trace_of, how):
    trace = trace_of(NET + f"    train(Net({how!r}).cuda())\n")
    assert set(modules(trace, Phase.RECOMPUTE)) >= {"blocks.0.fc", "blocks.1.fc", "blocks.0"}
    backward = modules(trace, Phase.BACKWARD)
    for module in ("first", "blocks.0.fc", "blocks.1.fc", "last.0"):
        assert backward[module], module
    assert all(label is not None for label, _ in allocations(trace))


@pytest.mark.parametrize("how", ["plain", "reentrant", pytest.param("not reentrant", marks=pytest.mark.slow)])
def test_recording_labels_does_not_change_figures(trace_of, how):
    script = NET + f"    train(Net({how!r}).cuda(), steps=3)\n"
    with_labels, without = trace_of(script), trace_of(script, "--no-labels")
    for column in ("action", "size"):
        assert getattr(with_labels.events, column).tolist() == getattr(without.events, column).tolist()
    assert dict(with_labels.statistics) == dict(without.statistics)


def test_an_exception_inside_a_module_restores_the_labels(trace_of):
    script = (
        NET
        + """
    class Fussy(nn.Module):
        def forward(self, x):
            raise ValueError
    model, fussy = Net().cuda(), Fussy()
    try:
        nn.Sequential(nn.Linear(4, 4), fussy)(torch.ones(1, 4))
    except ValueError:
        pass
    train(model)
    """
    )
    forward = modules(trace_of(script), Phase.FORWARD)
    assert forward["Net.blocks.0.fc"]
    assert not any(module.startswith("Sequential.0.") for module in forward)


def test_submodules_of_copies_and_submodules_called_directly_keep_their_names(trace_of):
    script = (
        NET
        + """
    twin = copy.deepcopy(Net()).cuda()
    twin.blocks[1](torch.ones(8, 512, device="cuda"))
    parent = Net().cuda()
    parent.blocks[0](torch.ones(8, 512, device="cuda"))
    """
    )
    assert {"blocks.0", "blocks.0.fc", "blocks.1", "blocks.1.fc"} == set(
        modules(trace_of(script), Phase.FORWARD)
    )


def test_names_of_two_models_include_their_classes(trace_of):
    script = (
        NET
        + """
    class Critic(Net):
        pass
    critic, net = Critic().cuda(), Net().cuda()
    critic(net(torch.ones(64, 512, device="cuda")))
    """
    )
    assert {"Critic.first", "Net.first"} <= set(modules(trace_of(script), Phase.FORWARD))


def test_a_history_that_the_script_records_changes_nothing_in_the_trace(trace_of):
    """Called first: before CUDA is initialised, where PyTorch's own function would restart the history."""
    begin = "torch.cuda.memory._record_memory_history(max_entries=3)"
    end = "torch.cuda.memory._record_memory_history(enabled=None)"
    script = """
    {begin}
    train(Net().cuda(), steps=1)
    {end}
    train(Net().cuda(), steps=1)
    """
    plain, recorded = (
        trace_of(NET + script.format(begin=first, end=then))
        for first, then in (("pass", "pass"), (begin, end))
    )
    events = recorded.events.action != Action.SNAPSHOT  # what the script's calls leave in PyTorch's history
    assert not events.all()
    assert recorded.events.size[events].tolist() == plain.events.size.tolist()
    assert recorded.events.action[events].tolist() == plain.events.action.tolist()
    stacks, found = ([stacks_of(trace)[at] for at in trace.events.stack] for trace in (plain, recorded))
    assert [stack for stack, kept in zip(found, events, strict=True) if kept] == stacks
    assert recorded.notes == plain.notes


def stacks_of(trace):
    """Return the stacks as text; the last one, -1, is that of events without a frame."""
    frames = [f"{frame.file}:{frame.line}" for frame in trace.frames]
    return [*([frames[index] for index in stack] for stack in trace.stacks), []]


def test_peaks_after_a_reset_agree_with_the_statistics(trace_of):
    script = (
        NET
        + """
    big = torch.empty(1 << 28, device="cuda")
    del big
    torch.cuda.reset_peak_memory_stats()
    train(Net().cuda())
    """
    )
    trace = trace_of(script)
    assert int(memory_timeline(trace).allocated.max()) == 4 << 28
    assert trace.statistics["allocated_bytes.all.peak"] < 4 << 28


@pytest.mark.slow
def test_parameters_under_torch_func_are_skipped(trace_of):
    script = (
        NET
        + """
    from torch.func import functional_call, grad, vmap
    net = Net().cuda()
    parameters = dict(net.named_parameters())
    def loss(parameters, x):
        return functional_call(net, parameters, (x,)).square().mean()
    vmap(grad(loss), in_dims=(None, 0))(parameters, torch.ones(4, 512, device="cuda"))
    """
    )
    assert len(trace_of(script, without_step="it takes gradients alone").events) > 20


def test_recording_labels_keeps_gradient_accumulation_in_place(trace_of):
    script = (
        NET
        + """
    model = Net().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        for _ in range(3):
            model(torch.ones(64, 512, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    """
    )
    with_labels, without = trace_of(script), trace_of(script, "--no-labels")
    assert dict(with_labels.statistics) == dict(without.statistics)
