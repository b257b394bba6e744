"""Waiting for autograd's threads, with a thread that only bears their name."""

import ctypes
import threading
import time

from memfit.ghost.shutdown import wait_for_autograd

BUSY = 0.15  # seconds; far below the longest wait


def test_waits_while_such_a_thread_works():
    ready, leave = threading.Event(), threading.Event()
    idle_since = []

    def work():
        ctypes.CDLL(None).pthread_setname_np(
            ctypes.c_ulong(threading.get_ident()), ctypes.c_char_p(b"pt_autograd_9")
        )
        ready.set()
        until = time.monotonic() + BUSY
        while time.monotonic() < until:
            pass
        idle_since.append(time.monotonic())
        leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    wait_for_autograd()
    returned = time.monotonic()
    leave.set()
    thread.join()
    assert idle_since
    assert idle_since[0] <= returned


def test_returns_at_once_without_them():
    start = time.monotonic()
    wait_for_autograd()
    assert time.monotonic() - start < BUSY
