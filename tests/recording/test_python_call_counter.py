"""Counting the Python functions that a thread calls."""

import posixpath
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from memfit.recording.python_call_counter import PythonCallCounter


def one():
    return len("C functions do not count")


def several(count):
    for _ in range(count):
        one()


def items():
    yield from range(100)


def counted(run, **options):
    counter = PythonCallCounter(**options)
    assert counter.start()
    run()
    counter.stop()
    return counter.calls


def test_every_call_of_a_python_function_counts_once():
    assert counted(lambda: several(5)) - counted(lambda: several(0)) == 5


def test_the_items_of_a_generator_are_no_calls():
    assert counted(lambda: list(items())) == counted(lambda: None)


def test_functions_in_a_folder_that_is_left_out_do_not_count_nor_what_they_call():
    here = str(Path(__file__).parent)
    library = posixpath.join, "a", "b"
    assert counted(partial(*library), without=here) > counted(int, without=here)
    assert counted(lambda: several(5), without=here) == counted(int, without=here)
    assert counted(lambda: [partial(*library)() for _ in range(5)], without=here) == counted(
        int, without=here
    )


@pytest.mark.warm
def test_what_memfit_does_in_a_dry_run_does_not_count(dry_run):
    """A model's forward counts the same, watched by memfit or not."""
    script = """
        import torch
        from memfit.recording.python_call_counter import PythonCallCounter

        def count(model, inputs):
            counter = PythonCallCounter()
            counter.start()
            loss = model(inputs).sum()
            counter.stop()
            return counter.calls, loss

        def build(device):
            layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)) for _ in range(3)]
            return torch.nn.Sequential(*layers).to(device)

        model, inputs = build("cuda"), torch.ones(2, 8, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            calls, loss = count(model, inputs)
            print(f"step {step}: {calls} calls")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    printed = dry_run(script).out
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)) for _ in range(3))
    )
    inputs = torch.ones(2, 8)
    calls = counted(lambda: model(inputs).sum()) - 1  # the lambda's own
    assert f"step 1: {calls} calls" in printed
    assert f"step 2: {calls} calls" in printed


def test_a_profiler_of_the_scripts_own_stays():
    def own(*_):
        return None

    sys.setprofile(own)
    try:
        counter = PythonCallCounter()
        assert not counter.start()
        counter.stop()
        assert sys.getprofile() is own
    finally:
        sys.setprofile(None)
