"""The lazy import of Dynamo: unnoticed by the script, but for the time."""

import pytest


@pytest.mark.slow
def test_dynamo_is_imported_when_it_is_used_and_its_objects_are_stood_for_until_then(dry_run):
    done = dry_run("""
        import gc, sys, torch
        from torch.utils.checkpoint import checkpoint

        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        add = torch.optim.Optimizer.add_param_group.__wrapped__

        def train(model):
            x = torch.randn(8, 64, device="cuda", requires_grad=True)
            for reentrant in (True, False):
                checkpoint(model, x, use_reentrant=reentrant).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        train(model)
        assert "torch._dynamo" in sys.modules and "torch._dynamo.eval_frame" not in sys.modules
        assert vars(add)["__dynamo_disable"] is add
        gc.collect()
        stood_for = len(gc.get_objects())

        import torch._dynamo.eval_frame as by_import
        assert by_import is sys.modules["torch._dynamo.eval_frame"] is torch._dynamo.eval_frame
        assert by_import.__spec__.origin == by_import.__file__
        assert type(torch._dynamo) is type(sys)
        assert "__dynamo_disable" not in vars(add)
        assert not hasattr(torch._dynamo, "absent")
        gc.collect()
        assert abs(len(gc.get_objects()) / stood_for - 1) < 0.01, (len(gc.get_objects()), stood_for)

        compiled = torch.compile(model, backend="eager")
        assert isinstance(compiled, by_import.OptimizedModule)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2, device="cuda"))]})
        assert vars(add)["__dynamo_disable"] is not add
        train(compiled)
        train(compiled)
    """)
    assert done.answer["end"]["reason"] == "steps", done.err
    assert done.answer["steps"] == 3


@pytest.mark.slow
def test_a_first_use_by_the_script_itself_imports_dynamo(dry_run):
    done = dry_run("""
        import sys, torch
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, device="cuda"))])
        assert "torch._dynamo.config" not in sys.modules

        @torch.compiler.disable
        def double(x):
            return 2 * x

        assert double._torchdynamo_disable
        assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
        torch.compile(double, backend="eager")(torch.ones(2, device="cuda"))
    """)
    assert done.answer["end"]["reason"] == "end", done.err


def test_the_first_use_may_be_the_import_of_a_config_module_which_refuses_attributes(dry_run):
    done = dry_run("""
        import sys, torch
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, device="cuda"))])
        import torch._dynamo.config as config
        assert config.__spec__.origin == config.__file__
        assert config.suppress_errors is False
        config.suppress_errors = True
        from torch._dynamo import config as found
        assert "torch._dynamo.eval_frame" not in sys.modules
        torch.compile(torch.nn.Linear(2, 2), backend="eager")
        assert "torch._dynamo.eval_frame" in sys.modules
        assert config is found is torch._dynamo.config
        assert config.suppress_errors is True
    """)
    assert done.answer["end"]["reason"] == "end", done.err


@pytest.mark.slow
def test_garbage_that_holds_memory_is_collected_as_by_the_import(dry_run):
    done = dry_run("""
        import gc, torch
        weight = torch.nn.Parameter(torch.zeros(2, device="cuda"))
        cycle = [torch.empty(1 << 20, device="cuda")]
        cycle.append(cycle)
        held = [[] for _ in range(300_000)]  # as a library makes: the import still makes a quarter
        gc.collect()  # old objects are collected only with all others
        del cycle
        before = torch.cuda.memory_allocated()
        torch.optim.SGD([weight])
        print(before - torch.cuda.memory_allocated())
    """)
    assert done.out.splitlines()[0] == str(4 << 20), (done.out, done.err)
