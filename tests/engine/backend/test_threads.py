"""Threads for work in NumPy."""

import threading
import time

import pytest

from engine.backend.threads import in_parallel


def test_all_pieces_have_ended_when_an_error_of_one_of_them_is_raised() -> None:
    failing, ended = threading.Event(), threading.Event()

    def slow() -> None:
        failing.wait()
        time.sleep(0.1)  # it still computes when the other has failed
        ended.set()

    def fail() -> None:
        failing.set()
        raise ValueError("this thread's")

    with pytest.raises(ValueError, match="this thread's"):
        in_parallel([slow, fail])
    assert ended.is_set()


def test_an_error_on_another_thread_is_raised_here() -> None:
    def fail() -> None:
        raise ValueError("the other's")

    done = []
    with pytest.raises(ValueError, match="the other's"):
        in_parallel([fail, lambda: done.append(1)])
    in_parallel([lambda: done.append(2), lambda: done.append(3)])  # the thread still helps
    assert sorted(done) == [1, 2, 3]
