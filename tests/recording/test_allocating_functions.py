"""The PyTorch functions that allocated, from stack frames."""

import pytest

from memfit.recording.allocating_functions import (
    TorchFunction,
    torch_function_of_stack,
    torch_functions_of_events,
)
from memfit.recording.annotate_events import label_with_better_op
from memfit.records import EventLabel, Phase
from memfit.trace.stack_table import torch_folder

T = "/site/torch/"


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        ([("optim/adam", "_multi_tensor_adam"), ("optim/adam", "adam")], "adam/_multi_tensor_adam"),
        ([("optim/sgd", "_init_group"), ("optim/sgd", "step")], "step/_init_group"),
        (
            [
                ("nn/utils/clip_grad", "_get_total_norm"),
                ("nn/utils/clip_grad", "_no_grad_wrapper"),
                ("nn/utils/clip_grad", "clip_grad_norm_"),
                ("nn/utils/clip_grad", "_no_grad_wrapper"),
            ],
            "clip_grad_norm_/_get_total_norm",
        ),
        (
            [("_tensor", "__rdiv__"), ("nn/utils/clip_grad", "_clip_grads_with_norm_")],
            "_clip_grads_with_norm_",
        ),
        ([("nn/functional", "relu"), ("nn/modules/activation", "forward")], "relu"),
        ([("nn/modules/linear", "forward"), ("nn/parallel/distributed", "_run_ddp_forward")], ""),
        ([], ""),
    ],
)
def test_the_innermost_informative_function_and_its_caller_are_named(frames, name):
    found = torch_function_of_stack(
        [*((f"{T}{file}.py", function) for file, function in frames), ("train.py", "main")], T
    )
    assert found == TorchFunction(name)


def test_script_code_called_by_pytorch_belongs_to_the_script():
    assert (
        torch_function_of_stack([("train.py", "loss"), (f"{T}nn/functional.py", "relu")], T)
        == TorchFunction()
    )


@pytest.mark.parametrize(
    ("file", "communicates"),
    [
        ("distributed/fsdp/_fully_shard/_fsdp_collectives", True),
        ("nn/parallel/distributed", True),
        ("distributed/tensor/_dispatch", False),  # dispatches every op on a DTensor
        ("optim/sgd", False),
    ],
)
def test_functions_of_distributed_code_communicate(file, communicates):
    frames = [(f"{T}{file}.py", "allocate"), (f"{T}optim/adam.py", "adam")]
    assert torch_function_of_stack(frames, T).communicates is communicates


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("adam/_multi_tensor_adam", "foreach"),
        ("_single_tensor_adafactor/norm", "for-loop"),
        ("sgd/_fused_sgd", "fused"),
        ("step/_init_group", ""),
        ("", ""),
    ],
)
def test_the_name_determines_the_implementation_of_an_optimizer_step(name, how):
    assert TorchFunction(name).how == how


@pytest.mark.parametrize(
    ("phase", "op", "function", "chosen"),
    [
        (Phase.OPTIMIZER, "Adam.step", TorchFunction("adam/_fused_adam"), "Adam.step (fused)"),
        (Phase.OPTIMIZER, "Adam.step", TorchFunction("step/_init_group"), "Adam.step"),
        (Phase.BACKWARD, "TBackward0", TorchFunction("adam/_multi_tensor_adam"), "adam/_multi_tensor_adam"),
        (Phase.BACKWARD, "TBackward0", TorchFunction("checkpoint/backward"), "TBackward0"),
        (
            Phase.BACKWARD,
            "TBackward0",
            TorchFunction("foreach_reduce/allocate", True),
            "foreach_reduce/allocate",
        ),
        (Phase.FORWARD, "", TorchFunction("relu"), "relu"),
    ],
)
def test_the_more_informative_op_is_chosen(phase, op, function, chosen):
    assert label_with_better_op(EventLabel(phase, "fc", op, 0), function) == EventLabel(
        phase, "fc", chosen, 0
    )


def test_events_with_the_same_stack_share_a_function():
    stack = [{"filename": f"{torch_folder()}optim/sgd.py", "name": "sgd"}]
    column, table = torch_functions_of_events([{"frames": stack}, {}, {"frames": stack}])
    assert [table[index].name for index in column] == ["sgd", "", "sgd"]
    assert table == (TorchFunction(), TorchFunction("sgd"))
