"""Querying a fake cuDNN: caching, crashes, timeouts, forks and refusals."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from memfit.ghost.build.runtime_library import build_ghost
from memfit.ghost.cudnn import client as client_module
from memfit.ghost.cudnn.cache import EngineConfig, HeuristicsCache, HeuristicsResult
from memfit.ghost.cudnn.client import CudnnClient, NoCudnnAnswerError
from memfit.native_build import find_compiler
from support.cudnn_descriptors import convolution

pytestmark = pytest.mark.process

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
    return build_ghost().no_device


def client_of(library, driver, folder):
    return CudnnClient(library, [driver], {"deviceVer": 800}, HeuristicsCache.of(folder, library, {}))


def reason(client, question=QUESTION):
    with pytest.raises(NoCudnnAnswerError) as caught:
        client.answer(question)
    return str(caught.value)


def test_an_answer_is_cached_for_the_next_run(fake, driver, tmp_path):
    library = fake()
    first, second = client_of(library, driver, tmp_path), client_of(library, driver, tmp_path)
    expected = HeuristicsResult(92400, (EngineConfig(4096),))
    assert first.answer(QUESTION) == expected
    assert first.process()
    assert second.answer(QUESTION) == expected
    assert not second.process(), "the second client started no server"


def test_a_cache_file_is_for_one_library_one_device_and_one_environment(fake, tmp_path, monkeypatch):
    library = fake()
    paths = {HeuristicsCache.of(tmp_path, library, {"deviceVer": version})._path for version in (800, 900)}
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    paths.add(HeuristicsCache.of(tmp_path, library, {"deviceVer": 800})._path)
    library.write_bytes(library.read_bytes() + b" ")
    paths.add(HeuristicsCache.of(tmp_path, library, {"deviceVer": 800})._path)
    assert len(paths) == 4


def test_damaged_lines_are_skipped_and_the_next_answer_is_readable(tmp_path):
    path = tmp_path / "cache.jsonl"
    answer = HeuristicsResult(92400, (EngineConfig(7, 1, 2, 3), EngineConfig(0)))
    HeuristicsCache(path).put(QUESTION, answer)
    whole = path.read_bytes()
    for damaged in (b"\0" * 99, b"{}", b'{"question":1}', whole.strip()[:-9], b"\xff\xfe"):
        path.write_bytes(damaged)
        assert HeuristicsCache(path).get(QUESTION) is None
        HeuristicsCache(path).put(QUESTION, answer)
        assert HeuristicsCache(path).get(QUESTION) == answer, "a line after a partial line counts"


def test_answers_are_returned_even_if_the_cache_cannot_be_written(fake, driver, tmp_path):
    (tmp_path / "file").write_text("")
    client = client_of(fake(), driver, tmp_path / "file")  # a file where a folder should be
    assert (
        client.answer(QUESTION) == client.answer(QUESTION) == HeuristicsResult(92400, (EngineConfig(4096),))
    )


def test_several_processes_can_append_to_one_cache_file(tmp_path):
    path = tmp_path / "cache.jsonl"
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
    cache = HeuristicsCache(path)
    for child in range(4):
        for i in range(50):
            assert cache.get(b"%d %d" % (child, i)) == HeuristicsResult(child, (EngineConfig(i),) * 30)


def test_the_server_is_not_a_child_process_and_ends_with_its_client(fake, driver, tmp_path):
    client = client_of(fake(), driver, tmp_path)
    client.answer(QUESTION)
    process = client.process()
    status = Path(f"/proc/{process}/status").read_text()
    assert f"PPid:\t{os.getpid()}\n" not in status  # a script that waits for its children would wait for it
    assert "PPid:\t" in status
    client._disconnect("", for_good=False)
    for _ in range(100):
        if not Path(f"/proc/{process}").exists():
            return
        time.sleep(0.05)
    raise AssertionError("the server is still running")


def test_a_killed_server_is_restarted_once(fake, driver, tmp_path):
    client = client_of(fake(), driver, tmp_path)
    client.answer(QUESTION)
    for question in OTHERS[:2]:
        os.kill(client.process() or pytest.fail("no process"), signal.SIGKILL)
        assert "ended" in reason(client, question)
        if question is OTHERS[0]:
            assert client.answer(question).configurations
    assert "ended" in reason(client, OTHERS[2])
    assert not client.process(), "the server was not started a third time"
    assert client.answer(QUESTION).configurations, "the cached answer is still available"


def test_a_forked_child_starts_its_own_server(fake, driver, tmp_path):
    client = client_of(fake(), driver, tmp_path)
    client.answer(QUESTION)
    ours = client.process()
    client._lock.acquire()  # as if by a thread that the child does not have
    pid = os.fork()
    if not pid:
        signal.alarm(20)  # a child with a held lock would wait forever
        fine = client.process() == 0 and client.answer(OTHERS[0]).version == 92400
        os._exit(0 if fine and client.process() not in (0, ours) else 1)
    client._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert client.answer(OTHERS[1]).version == 92400
    assert client.process() == ours


def test_a_cudnn_without_deviceless_planning_is_refused(fake, driver, tmp_path):
    client = client_of(fake("OLD"), driver, tmp_path)
    assert "cuDNN 9.7.1 is too old" in reason(client)
    assert not client.process()
    assert reason(client) == reason(client, OTHERS[0])


def test_the_first_crash_fails_one_question_and_the_second_all_later_ones(fake, driver, tmp_path):
    client = client_of(fake("CRASH"), driver, tmp_path)
    expected = ["the process that runs cuDNN ended unexpectedly"] * 3
    assert [reason(client, question) for question in OTHERS[:3]] == expected
    assert client._given_up


def test_a_cudnn_that_does_not_answer_in_time_is_not_queried_again(fake, driver, tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "ANSWER_TIMEOUT", 0.3)
    client = client_of(fake("HANG"), driver, tmp_path)
    assert "in time" in reason(client)
    monkeypatch.setattr(client_module, "_Server", None)
    assert "in time" in reason(client, OTHERS[0]), "no server is started again"


def test_an_unreadable_reply_is_reported_and_not_cached(fake, driver, tmp_path):
    client = client_of(fake("GARBAGE"), driver, tmp_path)
    assert "lost contact with the process that runs cuDNN" in reason(client)
    assert not list(tmp_path.glob("*.jsonl")), "the reply is not cached"


def test_a_refusal_quotes_cudnn_and_concerns_one_question(fake, driver, tmp_path):
    client = client_of(fake("REFUSE"), driver, tmp_path)
    assert "CUDNN_STATUS_OF_ITS_OWN because" in reason(client)
    assert client.process()


def test_an_empty_list_of_configurations_is_an_answer(fake, driver, tmp_path):
    assert client_of(fake("EMPTY"), driver, tmp_path).answer(QUESTION) == HeuristicsResult(92400, ())


def test_a_library_that_cannot_be_loaded_is_named(driver, tmp_path):
    broken = tmp_path / "libcudnn.so.9"
    broken.write_text("not a library")
    assert "libcudnn.so.9" in reason(client_of(broken, driver, tmp_path))


def test_a_server_that_does_not_start_is_reported(fake, driver, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    assert "did not start" in reason(client_of(fake(), driver, tmp_path))
