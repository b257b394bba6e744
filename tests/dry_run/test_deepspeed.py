"""DeepSpeed's optimizers on the ghost: no compiler is needed, and their flat buffers have rows.

The scripts use classes with DeepSpeed's names and attributes; its engine runs in
``benchmarks/parallel_modes.py``.
"""

import pytest

BUILDER = """
    class OpBuilder:
        BUILD_VAR = "DS_BUILD_FUSED_ADAM"

        def __init__(self, name):
            self.name = name

        def load(self, verbose=False):
            return self.jit_load(verbose)

        def jit_load(self, verbose=True):
            raise OSError("CUDA_HOME environment variable is not set")
"""
STAGE_3 = """
    class DeepSpeedZeroOptimizer_Stage3:
        def __init__(self, optimizer, parameters, gradients, bucket):
            self.optimizer, self.lp_param_buffer = optimizer, parameters
            self.grad_partitions_flat_buffer, self.ipg_buckets = gradients, {"bfloat16": bucket}

        def step(self):
            self.optimizer.step()
"""


@pytest.fixture
def engine(dry_run, tmp_path):
    """Return a function that runs a script beside a package with DeepSpeed's names."""
    for name, text in {"ops/op_builder/builder": BUILDER, "runtime/zero/stage3": STAGE_3}.items():
        path = tmp_path / "deepspeed" / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text("\n".join(line[4:] for line in text.splitlines()))
    return dry_run


@pytest.mark.slow
def test_the_kernels_of_an_optimizer_are_not_compiled(engine):
    done = engine(
        """
        import torch
        from deepspeed.ops.op_builder.builder import OpBuilder

        kernels = OpBuilder("fused_adam").load()
        kernels.multi_tensor_adam(65536, torch.zeros(1, dtype=torch.int32, device="cuda"), [[]], 1e-3)
        """
    )
    assert done.code == 0, done.err
    assert done.answer["peak"]["allocated"] == 512
    (note,) = (each for each in done.answer["notes"] if "fused_adam" in each["text"])
    assert note["provenance"] == "assumed"


@pytest.mark.parametrize("name", [pytest.param("fused_adam", marks=pytest.mark.slow), "quantizer"])
def test_what_is_compiled_is_named_and_so_is_what_a_failure_lacks(engine, name):
    done = engine(
        f"""
        import torch
        from deepspeed.ops.op_builder.builder import OpBuilder

        OpBuilder({name!r}).load().another_function()
        """
    )
    assert done.code != 0
    assert f"memfit: DeepSpeed compiles {name}, which may take minutes." in done.err
    assert "DS_BUILD_FUSED_ADAM=1 pip install deepspeed" in done.err


def test_flat_buffers_are_parameters_and_gradients_and_what_zero3_gathers_is_communication(engine):
    done = engine(
        """
        from types import SimpleNamespace

        import torch
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

        share, gradient, bucket = (torch.zeros(count << 20, device="cuda") for count in (1, 2, 4))
        model = torch.nn.Linear(1024, 2048, bias=False, device="cuda")
        model.weight.ds_persist = False
        master = torch.nn.Parameter(torch.zeros(1 << 18, device="cuda"))
        optimizer = torch.optim.SGD([master])
        zero = DeepSpeedZeroOptimizer_Stage3(optimizer, share, gradient, SimpleNamespace(buffer=[bucket]))
        for _ in range(3):
            model(torch.zeros(1, 1024, device="cuda")).sum().backward()
            master.grad = torch.zeros_like(master)
            zero.step()
            master.grad = model.weight.grad = None
        """
    )
    assert done.code == 0, done.err
    rows = {each["name"]: each["bytes"] >> 20 for each in done.answer["terms"]}
    assert rows["parameters"] == 4 + 1
    assert rows["gradients"] == 8 + 16 + 8 + 1
    assert rows["communication"] == 8
