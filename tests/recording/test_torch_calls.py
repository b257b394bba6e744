"""What of PyTorch allocated, from frames."""

import pytest

from memfit.recording.resolve import with_op
from memfit.recording.torch_calls import Call, call_of, calls
from memfit.records import Label, Phase
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
def test_it_is_the_innermost_function_that_says_something(frames, name):
    found = call_of([*((f"{T}{file}.py", function) for file, function in frames), ("train.py", "main")], T)
    assert found == Call(name)


def test_what_the_script_calls_within_pytorch_is_the_scripts():
    assert call_of([("train.py", "loss"), (f"{T}nn/functional.py", "relu")], T) == Call()


@pytest.mark.parametrize(
    ("file", "communicates"),
    [
        ("distributed/fsdp/_fully_shard/_fsdp_collectives", True),
        ("nn/parallel/distributed", True),
        ("distributed/tensor/_dispatch", False),  # any op on a DTensor passes through it
        ("optim/sgd", False),
    ],
)
def test_what_communicates(file, communicates):
    frames = [(f"{T}{file}.py", "allocate"), (f"{T}optim/adam.py", "adam")]
    assert call_of(frames, T).communicates is communicates


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
def test_how_an_optimizer_steps_is_in_the_name(name, how):
    assert Call(name).how == how


@pytest.mark.parametrize(
    ("phase", "op", "call", "better"),
    [
        (Phase.OPTIMIZER, "Adam.step", Call("adam/_fused_adam"), "Adam.step (fused)"),
        (Phase.OPTIMIZER, "Adam.step", Call("step/_init_group"), "Adam.step"),
        (Phase.BACKWARD, "TBackward0", Call("adam/_multi_tensor_adam"), "adam/_multi_tensor_adam"),
        (Phase.BACKWARD, "TBackward0", Call("checkpoint/backward"), "TBackward0"),
        (Phase.BACKWARD, "TBackward0", Call("foreach_reduce/allocate", True), "foreach_reduce/allocate"),
        (Phase.FORWARD, "", Call("relu"), "relu"),
    ],
)
def test_what_is_known_better(phase, op, call, better):
    assert with_op(Label(phase, "fc", op, 0), call) == Label(phase, "fc", better, 0)


def test_events_of_a_stack_share_a_call():
    stack = [{"filename": f"{torch_folder()}optim/sgd.py", "name": "sgd"}]
    column, table = calls([{"frames": stack}, {}, {"frames": stack}])
    assert [table[index].name for index in column] == ["sgd", "", "sgd"]
    assert table == (Call(), Call("sgd"))
