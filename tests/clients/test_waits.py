"""How the caller of a client waits: in pieces, for a signal that comes just before CPython waits is heard after it."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from txnstore.deadline import WAIT_SECONDS_MAX, result_within, wait_within

PIECES = 3


class Answer(Future[str]):
    """What is there after some pieces of the wait, and keeps no time."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def result(self, timeout=None):
        if timeout is None:
            return super().result(0)
        self.waits.append(timeout)
        if len(self.waits) == PIECES:
            self.set_result("answer")
        raise TimeoutError


class Changed(threading.Condition):
    """The same as a condition."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def wait_for(self, predicate, timeout=None):
        self.waits.append(timeout)
        return predicate()


def test_a_result_is_waited_for_in_pieces():
    answer = Answer()
    assert result_within(answer, 3600) == "answer"
    assert answer.waits == [WAIT_SECONDS_MAX] * PIECES


def test_a_result_without_a_limit_is_waited_for_in_pieces():
    answer = Answer()
    assert result_within(answer, -1) == "answer"
    assert answer.waits == [WAIT_SECONDS_MAX] * PIECES


def test_a_result_that_does_not_come_in_time_is_a_timeout():
    with pytest.raises(TimeoutError):
        result_within(Future(), 0.01)


def test_what_the_work_raises_comes_at_once_also_if_it_is_a_timeout():
    failed: Future[str] = Future()
    failed.set_exception(TimeoutError("of the work"))
    with pytest.raises(TimeoutError, match="of the work"):
        result_within(failed, 3600)


def test_a_change_is_waited_for_in_pieces():
    changed = Changed()
    assert wait_within(changed, lambda: len(changed.waits) == PIECES, -1)
    assert changed.waits == [WAIT_SECONDS_MAX] * PIECES


def test_a_change_that_does_not_come_in_time_is_none():
    changed = threading.Condition()
    with changed:
        assert not wait_within(changed, lambda: False, 0.01)
