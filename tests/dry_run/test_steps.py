"""When a dry run ends the script, and whether memory grows from step to step."""

import pytest

from memfit.trace.trace_file import read_trace
from support.scripts import TRAIN, figures

pytestmark = pytest.mark.warm


def test_the_script_is_ended_after_the_requested_steps(dry_run):
    script = TRAIN + "    for n in range(100): step(); print('did', n)\n    print('never')\n"
    run = dry_run(script, options=("--steps", "2"))
    assert run.answer["steps"] == 2
    assert run.answer["end"]["reason"] == "steps"
    assert "never" not in run.out
    assert "did 0" in run.out


def test_two_optimizers_step_in_turn(dry_run):
    script = """
        import torch
        first, second = torch.nn.Linear(8, 8).cuda(), torch.nn.Linear(8, 8).cuda()
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (first, second)]
        for turn in range(50):
            optimizer = optimizers[turn % 5 == 4]
            optimizer.zero_grad()
            second(first(torch.ones(2, 8, device="cuda"))).sum().backward()
            optimizer.step()
            print("turn", turn)
    """
    run = dry_run(script)
    assert run.answer["steps"] == 3
    assert "turn 13" in run.out  # the slower optimizer's third step is in the fifteenth turn
    assert "turn 14" not in run.out


def test_an_optimizer_that_never_steps_does_not_keep_the_script_running(dry_run):
    unused = "    spare = torch.optim.SGD(torch.nn.Linear(4, 4).cuda().parameters(), 0.1)\n"
    run = dry_run(TRAIN + unused + "    for n in range(10_000): step()\n    print('never')\n")
    assert run.answer["end"]["reason"] == "steps"
    assert "never" not in run.out


def test_steps_skipped_by_the_scaler_are_counted(dry_run):
    script = """
        import torch
        model = torch.nn.Linear(8, 8).cuda()
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler()
        optimizer.step = lambda *a, **k: None  # a scaler that always finds an overflow never steps
        for n in range(50):
            scaler.scale(model(torch.ones(2, 8, device="cuda")).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        print("reached the end")
    """
    run = dry_run(script)
    assert (run.answer["steps"], run.answer["verdict"]) == (3, "unknown")
    assert "reached the end" not in run.out
    assert "its optimizers never stepped" in run.out


def test_floats_that_were_never_computed_are_finite_wherever_a_script_asks(dry_run):
    script = """
        import torch
        inf = float("inf")
        gradient = torch.randn(1 << 16, device="cuda", dtype=torch.bfloat16)
        norm = torch.linalg.vector_norm(gradient.float())
        found = norm == inf, norm != norm, norm < inf, gradient.eq(-inf).any(), norm.ne(inf), norm > 3
        print(*(each.item() for each in found))
    """
    run = dry_run(script)
    assert run.out.splitlines()[0] == "False False True False True False"
    assert any("assumed to be finite" in note["text"] for note in run.answer["notes"])


def test_backward_passes_for_their_gradients_alone_are_a_whole_run(dry_run):
    script = """
        import torch
        weight = torch.ones(64, 64, device="cuda", requires_grad=True)
        (weight @ weight).sum().backward()
    """
    run = dry_run(script)
    assert (run.code, run.answer["verdict"]) == (0, "fits")


def test_gradients_made_in_a_function_s_forward_are_part_of_that_forward(dry_run):
    script = """
        import torch

        class Early(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight):
                for _ in range(4):
                    with torch.enable_grad():
                        loss = (x.detach() @ weight.exp()).sum()
                    gradient, = torch.autograd.grad(loss, weight)
                ctx.save_for_backward(gradient)
                kept.append(torch.empty(2**22, device="cuda"))  # after it: the forward goes on
                return loss.detach()

            @staticmethod
            def backward(ctx, upstream):
                return None, ctx.saved_tensors[0] * upstream

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(64, 64))

            def forward(self, x):
                return Early.apply(x, self.weight)

        net, kept = Net().cuda(), []
        for n in range(8):
            net(torch.ones(2, 64, device="cuda")).backward()
            with torch.no_grad():
                net.weight -= net.weight.grad
            print("turn", n)
    """
    run = dry_run(script)
    assert run.answer["steps"] == 3
    assert "turn 2" in run.out
    assert "turn 3" not in run.out
    assert run.answer["peak"]["phase"] == "forward"
    assert run.answer["peak"]["module"] == "Net"


def test_backward_passes_count_as_steps_without_an_optimizer(dry_run):
    script = """
        import torch
        w = torch.zeros(1024, device="cuda", requires_grad=True)
        for n in range(50):
            (w * 2).sum().backward()
            with torch.no_grad():
                w -= 0.1 * w.grad
            w.grad = None
            print("did", n)
    """
    run = dry_run(script)
    assert run.answer["steps"] == 3
    assert "did 2" in run.out
    assert "did 3" not in run.out


@pytest.mark.parametrize("options", [("--to-end",), ("--steps", "5")])
def test_the_last_update_by_hand_counts_too(dry_run, options):
    script = """
        import torch

        def train(model):
            for _ in range(5):
                loss = model(torch.ones(64, 256, device="cuda")).square().mean()
                loss.backward()
                with torch.no_grad():
                    for each in model.parameters():
                        each -= 0.1 * each.grad
                        each.grad = None

        model = torch.nn.Linear(256, 256).cuda()
        train(model)
        with torch.no_grad():
            held = model(torch.ones(4096, 256, device="cuda"))  # its memory is none of the last step's
    """
    run = dry_run(script, options=options)
    assert run.answer["steps"] == 5
    assert "This result covers the whole run: 5 training steps." in run.out
    assert run.answer["growth"]["steady_from"] == 1
    assert run.answer["peak"]["step"] == 6


def test_accumulation_counts_optimizer_steps(dry_run):
    script = (
        TRAIN.replace("optimizer.zero_grad()", "return")
        + """
    for n in range(100):
        model(torch.randn(64, 256, device="cuda")).mean().backward()
        if n % 4 == 3:
            optimizer.step(); optimizer.zero_grad(); print("step", n)
    """
    )
    run = dry_run(script)
    assert run.answer["steps"] == 3
    assert "step 7" in run.out


def test_a_script_that_catches_everything_is_still_ended(dry_run):
    script = (
        TRAIN
        + """
    while True:
        try:
            step()
        except BaseException:
            print("caught")
    """
    )
    run = dry_run(script)
    assert run.answer["end"]["reason"] == "steps"
    assert run.out.count("caught") < 10


def test_inference_runs_to_its_end(dry_run):
    script = """
        import torch
        model = torch.nn.Linear(1024, 1024).cuda().eval()
        with torch.inference_mode():
            for _ in range(7):
                model(torch.ones(64, 1024, device="cuda"))
        print("done")
    """
    run = dry_run(script)
    assert "done" in run.out
    assert run.answer["steps"] == 0
    assert any("no training step" in note["text"] for note in run.answer["notes"])
    assert figures(run.answer)["parameters"] == 4 * 1024 * 1024 + 4096


def test_a_leak_is_distinguished_from_steady_memory(dry_run):
    steady = dry_run(TRAIN + "    for _ in range(4): step()\n").answer["growth"]
    assert steady == {"steady_from": 1, "bytes_per_step": 0, "line": "", "leak": False}
    leak = """
    kept = []
    for _ in range(4):
        kept.append(torch.empty(1 << 20, device="cuda"))  # a leak
        step()
    """
    run = dry_run(TRAIN + leak)
    assert run.answer["growth"]["leak"]
    assert run.answer["growth"]["bytes_per_step"] == 4 << 20
    line = int(run.answer["growth"]["line"].rpartition(":")[2])
    assert "a leak" in (run.folder / "script.py").read_text().splitlines()[line - 1]


def test_the_batch_size_is_that_of_training_not_of_an_evaluation_after_it(dry_run):
    script = """
        import torch
        from torch.utils.data import DataLoader
        model = torch.nn.Linear(4, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for batch in DataLoader(torch.ones(12, 4), batch_size=4):
            model(batch.cuda()).sum().backward()
            optimizer.step()
        for batch in DataLoader(torch.ones(12, 4), batch_size=6):
            model(batch.cuda())
    """
    run = dry_run(script, options=("--to-end", "-o", "run.memfit"))
    assert read_trace(run.folder / "run.memfit").loader.size == 4


ENGINE = """
    import torch
    from torch.autograd import Variable
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda().bfloat16()
    buffer = torch.zeros(sum(each.numel() for each in model.parameters()), device="cuda")
    at = 0
    def add(parameter):
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
    for parameter in model.parameters():
        parameter.main_grad = buffer[at : at + parameter.numel()].view_as(parameter)
        at += parameter.numel()
        parameter.register_post_accumulate_grad_hook(add)
    masters = [parameter.detach().float() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    for _ in range(3):
        output = model(torch.ones(4096, 1024, device="cuda", dtype=torch.bfloat16))
        Variable._execution_engine.run_backward(
            tensors=(output,), grad_tensors=(torch.ones_like(output),), keep_graph=False, create_graph=False,
            inputs=(), allow_unreachable=True, accumulate_grad=True,
        )
        for master, parameter in zip(masters, model.parameters()):
            master.grad = parameter.main_grad
        optimizer.step()
        buffer.zero_()
"""


def test_a_backward_that_a_library_runs_on_autograd_s_engine_is_one(dry_run):
    """Megatron's pipelines call the engine, and add each gradient to its part of one buffer."""
    run = dry_run(ENGINE)
    terms = {term["name"]: term["bytes"] for term in run.answer["terms"]}
    assert (run.answer["steps"], run.answer["peak"]["phase"]) == (3, "backward")
    assert terms["gradients"] >= 4 * 4 * 1024 * 1025
    assert terms["activations"] >= 3 * 4096 * 1024 * 2
    assert terms["outputs"] == 2 * 4096 * 1024 * 2  # the output, and the gradient that it is given
