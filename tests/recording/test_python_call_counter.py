"""Counting the Python functions that a thread calls."""

import sys

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
