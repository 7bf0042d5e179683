"""How the caller of a client waits: in pieces, for a signal that comes just before CPython waits is heard after it."""

from __future__ import annotations

import threading
from concurrent.futures import Future, as_completed, wait
from typing import Any

import pytest

from tests.clients.consumer.log_writer import eventually
from tests.clients.steps import PATIENCE_SECONDS
from txnstore.deadline import WAIT_SECONDS_MAX, give, new_future, result_within, wait_within

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


def test_who_waits_for_a_result_is_woken_though_that_failed_at_first(monkeypatch):
    """The future has it by then."""
    future, heard = new_future(), list[Any]()
    future.add_done_callback(heard.append)
    waiter = threading.Thread(target=lambda: heard.append(future.result()), daemon=True)
    waiter.start()
    condition: Any = future._condition
    eventually(lambda: condition._waiters)
    notify_all = condition.notify_all

    def failing():
        monkeypatch.undo()
        assert future._state == "FINISHED"
        raise MemoryError

    monkeypatch.setattr(condition, "notify_all", failing)
    give(future, future.set_result, "result")
    waiter.join(PATIENCE_SECONDS)
    assert sorted(heard, key=str) == sorted([future, "result"], key=str)
    assert condition.notify_all == notify_all


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("waits", ["wait", "as_completed"])
def test_who_waits_for_several_futures_is_woken_though_that_failed_at_first(monkeypatch, waits, fails):
    """Also who waits for one that is done later, and each is told of it once."""
    first, second = new_future(), new_future()
    waiting = {
        "wait": lambda: list(wait([first, second]).done),
        "as_completed": lambda: list(as_completed([first, second])),
    }
    heard: list[Any] = []
    waiters = [threading.Thread(target=lambda: heard.append(waiting[waits]()), daemon=True) for _ in range(2)]
    for waiter in waiters:
        waiter.start()
    eventually(lambda: len(first._waiters) == len(second._waiters) == 2)
    refuses: Any = first._waiters[1]
    name = "add_exception" if fails else "add_result"

    def failing(_: object) -> None:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(refuses, name, failing)
    give(first, first.set_exception if fails else first.set_result, ValueError())
    assert heard == []
    give(second, second.set_result, "result")
    for waiter in waiters:
        waiter.join(PATIENCE_SECONDS)
    assert [set(futures) for futures in heard] == [{first, second}] * 2


def test_who_was_told_of_a_result_is_not_told_again_though_another_could_not_be(monkeypatch):
    future, heard = new_future(), list[Any]()
    future.add_done_callback(heard.append)
    future.add_done_callback(lambda _: 1 / 0)

    def failing(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("concurrent.futures._base.LOGGER.exception", failing)
    give(future, future.set_result, "result")
    assert heard == [future]
    assert future.result(0) == "result"
