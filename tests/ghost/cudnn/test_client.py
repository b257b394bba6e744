"""Asking a cuDNN: what becomes of a question when the one who should answer cannot."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from memfit.ghost.build.runtime_library import build
from memfit.ghost.cudnn import client as client_module
from memfit.ghost.cudnn.cache import EngineConfig, HeuristicsCache, HeuristicsResult
from memfit.ghost.cudnn.client import CudnnClient, NoAnswerError
from memfit.native_build import find_compiler
from support.cudnn_descriptors import convolution

QUESTION = convolution("forward")
OTHERS = [convolution("forward", images=images) for images in range(2, 6)]


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """Return a function that compiles a libcudnn with one fault."""

    def make(fault=""):
        folder = tmp_path_factory.mktemp("fake")
        library = folder / "libcudnn.so.9"
        source = Path(__file__).with_name("fake_cudnn.c")
        options = [f"-D{fault}"] if fault else []
        subprocess.run(
            [*find_compiler(), "-Wall", "-Wextra", "-shared", "-fPIC", *options, source, "-o", library],
            check=True,
        )
        return library

    return make


@pytest.fixture(scope="module")
def driver():
    return build().no_device


def asks(library, driver, folder):
    return CudnnClient(library, [driver], {"deviceVer": 800}, HeuristicsCache.of(folder, library, {}))


def reason(client, question=QUESTION):
    with pytest.raises(NoAnswerError) as caught:
        client.answer(question)
    return str(caught.value)


def test_an_answer_is_kept_for_the_next_run(fake, driver, tmp_path):
    library = fake()
    first, second = asks(library, driver, tmp_path), asks(library, driver, tmp_path)
    expected = HeuristicsResult(92400, (EngineConfig(4096),))
    assert first.answer(QUESTION) == expected
    assert first.process()
    assert second.answer(QUESTION) == expected
    assert not second.process(), "nobody had to be asked"


def test_what_is_kept_is_for_one_library_one_device_and_one_environment(fake, tmp_path, monkeypatch):
    library = fake()
    places = {HeuristicsCache.of(tmp_path, library, {"deviceVer": version})._path for version in (800, 900)}
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    places.add(HeuristicsCache.of(tmp_path, library, {"deviceVer": 800})._path)
    library.write_bytes(library.read_bytes() + b" ")
    places.add(HeuristicsCache.of(tmp_path, library, {"deviceVer": 800})._path)
    assert len(places) == 4


def test_damaged_lines_are_passed_over_and_mended_by_asking(tmp_path):
    path = tmp_path / "kept.jsonl"
    answer = HeuristicsResult(92400, (EngineConfig(7, 1, 2, 3), EngineConfig(0)))
    HeuristicsCache(path).put(QUESTION, answer)
    whole = path.read_bytes()
    for damaged in (b"\0" * 99, b"{}", b'{"question":1}', whole.strip()[:-9], b"\xff\xfe"):
        path.write_bytes(damaged)
        assert HeuristicsCache(path).get(QUESTION) is None
        HeuristicsCache(path).put(QUESTION, answer)
        assert HeuristicsCache(path).get(QUESTION) == answer, "a line after half a line counts"


def test_nothing_is_lost_where_nothing_can_be_written(fake, driver, tmp_path):
    (tmp_path / "file").write_text("")
    client = asks(fake(), driver, tmp_path / "file")  # a file where a folder should be
    assert (
        client.answer(QUESTION) == client.answer(QUESTION) == HeuristicsResult(92400, (EngineConfig(4096),))
    )


def test_many_processes_may_add_to_one_file(tmp_path):
    path = tmp_path / "kept.jsonl"
    children = []
    for child in range(4):
        pid = os.fork()
        if not pid:
            for i in range(50):
                HeuristicsCache(path).put(
                    b"%d %d" % (child, i), HeuristicsResult(child, (EngineConfig(i),) * 30)
                )
            os._exit(0)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 4
    kept = HeuristicsCache(path)
    for child in range(4):
        for i in range(50):
            assert kept.get(b"%d %d" % (child, i)) == HeuristicsResult(child, (EngineConfig(i),) * 30)


def test_the_process_is_nobodys_child_and_ends_with_its_client(fake, driver, tmp_path):
    client = asks(fake(), driver, tmp_path)
    client.answer(QUESTION)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    process = client.process()
    client._ended("", for_good=False)
    for _ in range(100):
        if not Path(f"/proc/{process}").exists():
            return
        time.sleep(0.05)
    raise AssertionError("it is still there")


def test_killed_once_it_is_started_again_and_twice_is_enough(fake, driver, tmp_path):
    client = asks(fake(), driver, tmp_path)
    client.answer(QUESTION)
    for question in OTHERS[:2]:
        os.kill(client.process() or pytest.fail("no process"), signal.SIGKILL)
        assert "ended" in reason(client, question)
        if question is OTHERS[0]:
            assert client.answer(question).configurations
    assert "ended" in reason(client, OTHERS[2])
    assert not client.process(), "it was not started a third time"
    assert client.answer(QUESTION).configurations, "what is known is known"


def test_a_fork_has_a_process_of_its_own(fake, driver, tmp_path):
    client = asks(fake(), driver, tmp_path)
    client.answer(QUESTION)
    ours = client.process()
    client._lock.acquire()  # by a thread that the fork does not have
    pid = os.fork()
    if not pid:
        signal.alarm(20)  # it would wait for ever
        fine = client.process() == 0 and client.answer(OTHERS[0]).version == 92400
        os._exit(0 if fine and client.process() not in (0, ours) else 1)
    client._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert client.answer(OTHERS[1]).version == 92400
    assert client.process() == ours


def test_an_old_version_is_not_asked(fake, driver, tmp_path):
    client = asks(fake("OLD"), driver, tmp_path)
    assert "90701" in reason(client)
    assert not client.process()
    assert reason(client) == reason(client, OTHERS[0])


def test_a_crash_costs_one_question_and_a_second_one_all(fake, driver, tmp_path):
    client = asks(fake("CRASH"), driver, tmp_path)
    assert [reason(client, question) for question in OTHERS[:3]] == ["the process that asks it ended"] * 3
    assert client._given_up


def test_it_is_not_waited_for_for_ever(fake, driver, tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "ANSWERING", 0.3)
    client = asks(fake("HANG"), driver, tmp_path)
    begun = time.monotonic()
    assert "in time" in reason(client)
    monkeypatch.setattr(client_module, "_Process", None)
    assert "in time" in reason(client, OTHERS[0]), "nobody is asked again"
    assert time.monotonic() - begun < 10


def test_garbage_is_no_answer(fake, driver, tmp_path):
    client = asks(fake("GARBAGE"), driver, tmp_path)
    assert "the process that asks it" in reason(client)
    assert not list(tmp_path.glob("*.jsonl")), "and is not kept"


def test_a_refusal_is_told_in_its_own_words_and_holds_for_one_question(fake, driver, tmp_path):
    client = asks(fake("REFUSE"), driver, tmp_path)
    assert "CUDNN_STATUS_OF_ITS_OWN because" in reason(client)
    assert client.process()


def test_no_configuration_is_an_answer(fake, driver, tmp_path):
    assert asks(fake("EMPTY"), driver, tmp_path).answer(QUESTION) == HeuristicsResult(92400, ())


def test_a_library_that_cannot_be_loaded(driver, tmp_path):
    broken = tmp_path / "libcudnn.so.9"
    broken.write_text("not a library")
    assert "libcudnn.so.9" in reason(asks(broken, driver, tmp_path))


def test_no_interpreter(fake, driver, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    assert "did not start" in reason(asks(fake(), driver, tmp_path))
