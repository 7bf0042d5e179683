"""The thread of a producer: jobs in order, timed work when it is due, pauses that end when the producer is closed."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

import pytest

from txnstore.clients.producer.thread import Alarm, DelayedJob, SenderStopped, SenderThread
from txnstore.deadline import Deadline
from txnstore.errors import OutcomeUnknown, StoreFull, StoreUnavailable

PATIENCE_SECONDS = 60.0


class Timed:
    """Timed work that is due once, at a moment that the test sets."""

    def __init__(self):
        self.at_seconds = None
        self.ran = threading.Event()

    def due_seconds(self, now_seconds):
        return self.at_seconds

    def run(self):
        self.at_seconds = None
        self.ran.set()


#: No other thread of the tests is called like this one.
NAME = f"sender of {__name__}"


def runs():
    return NAME in {running.name for running in threading.enumerate()}


@pytest.fixture
def trouble():
    return []


@pytest.fixture
def thread(trouble):
    lock = threading.RLock()
    thread = SenderThread(
        NAME,
        threading.Condition(lock),
        Alarm(lock),
        backoff_seconds=0.001,
        backoff_max_seconds=0.004,
        report_trouble=trouble.append,
    )
    yield thread
    assert thread.stop(PATIENCE_SECONDS)


def test_jobs_run_in_order_on_one_thread_that_starts_with_the_first(thread):
    assert not runs()
    futures = [thread.submit(lambda number=number: (number, threading.get_ident())) for number in range(20)]
    results = [future.result(PATIENCE_SECONDS) for future in futures]
    assert [number for number, _ in results] == list(range(20))
    assert len({ident for _, ident in results} - {threading.get_ident()}) == 1


def test_an_error_of_a_job_comes_out_of_its_future_and_the_next_one_runs(thread):
    failing = thread.submit(lambda: 1 / 0)
    working = thread.submit(lambda: "worked")
    with pytest.raises(ZeroDivisionError):
        failing.result(PATIENCE_SECONDS)
    assert working.result(PATIENCE_SECONDS) == "worked"


def test_a_job_runs_here_unless_there_is_other_work(thread):
    assert thread.run_here(lambda: True)
    assert not runs()
    began, goes_on = threading.Event(), threading.Event()

    def work():
        began.set()
        assert goes_on.wait(PATIENCE_SECONDS)

    working = thread.submit(work)
    assert began.wait(PATIENCE_SECONDS)
    assert not thread.run_here(lambda: pytest.fail("something else is under way"))
    goes_on.set()
    working.result(PATIENCE_SECONDS)
    with thread.changed:
        waiting = thread.submit(lambda: None)
        assert not thread.run_here(lambda: pytest.fail("something else waits"))
    waiting.result(PATIENCE_SECONDS)
    assert thread.stop(PATIENCE_SECONDS)
    assert not thread.run_here(lambda: pytest.fail("it was stopped"))


def test_a_job_runs_here_beside_work_that_stands_aside_and_not_before_or_behind(thread):
    def work():
        found = [thread.run_here(lambda: True)]
        with thread.aside():
            found.append(thread.run_here(lambda: True))
        return [*found, thread.run_here(lambda: True)]

    assert thread.submit(work).result(PATIENCE_SECONDS) == [False, True, False]


def test_timed_work_runs_when_it_is_due_and_not_before(thread):
    early, late = Timed(), Timed()
    thread.timed_work += [early, late]
    late.at_seconds = time.monotonic() + 3600
    early.at_seconds = time.monotonic() + 0.02
    thread.submit(lambda: None).result(PATIENCE_SECONDS)
    assert early.ran.wait(PATIENCE_SECONDS)
    assert not late.ran.is_set()


def test_timed_work_that_fails_is_logged_and_does_not_end_the_thread(thread, caplog):
    class Failing(Timed):
        def run(self):
            super().run()
            raise ZeroDivisionError

    failing = Failing()
    failing.at_seconds = 0.0
    thread.timed_work.append(failing)
    assert thread.submit(lambda: "still here").result(PATIENCE_SECONDS) == "still here"
    assert failing.ran.wait(PATIENCE_SECONDS)
    assert thread.submit(lambda: "still here").result(PATIENCE_SECONDS) == "still here"
    assert "failed; it goes on" in caplog.text


def test_who_sleeps_is_woken_only_for_what_comes_before_he_wakes_by_himself():
    alarm = Alarm(threading.RLock())
    falls_asleep, is_up = threading.Event(), threading.Event()
    slept = []

    def sleep(until_seconds):
        with alarm.lock:
            falls_asleep.set()
            alarm.sleep(until_seconds)
            slept.append(time.monotonic())
            is_up.set()

    for rung_at in (time.monotonic(), -math.inf):
        falls_asleep.clear()
        is_up.clear()
        until_seconds = time.monotonic() + 3600
        threading.Thread(target=sleep, args=(until_seconds,), daemon=True).start()
        assert falls_asleep.wait(PATIENCE_SECONDS)
        with alarm.lock:
            alarm.ring(until_seconds)
            alarm.ring(until_seconds + 1)
        assert not is_up.is_set()
        with alarm.lock:
            assert not is_up.is_set()
            alarm.ring(rung_at)
        assert is_up.wait(PATIENCE_SECONDS)
    assert all(at_seconds < until_seconds for at_seconds in slept)


def test_a_delayed_job_that_is_forgotten_does_not_run_and_a_later_one_keeps_the_first_ones_time(thread):
    delayed = DelayedJob(thread.alarm, 0.02)
    thread.timed_work.append(delayed)
    ran = threading.Event()
    forgotten = threading.Event()
    delayed.set(forgotten.set)
    due_seconds = delayed.due_seconds(0.0)
    delayed.set(forgotten.set)
    assert delayed.due_seconds(0.0) == due_seconds
    delayed.forget()
    assert delayed.due_seconds(0.0) is None
    delayed.set(ran.set)
    thread.start()
    assert ran.wait(PATIENCE_SECONDS)
    assert not forgotten.is_set()


def test_a_request_is_repeated_until_it_is_answered_and_the_application_hears_why(thread, trouble):
    errors = [StoreUnavailable(), OutcomeUnknown(), StoreUnavailable()]

    def request():
        if errors:
            raise errors.pop()
        return "answer"

    assert thread.submit(lambda: thread.until_answered(request)).result(PATIENCE_SECONDS) == "answer"
    assert len(trouble) == 3


def test_a_request_that_is_refused_is_not_repeated(thread, trouble):
    calls = []

    def request():
        calls.append(1)
        raise StoreFull

    with pytest.raises(StoreFull):
        thread.submit(lambda: thread.until_answered(request)).result(PATIENCE_SECONDS)
    assert (len(calls), trouble) == (1, [])


def test_a_request_is_given_up_at_its_deadline(thread):
    def request():
        raise StoreUnavailable

    deadline = Deadline(0.02)
    with pytest.raises(StoreUnavailable):
        thread.submit(lambda: thread.until_answered(request, deadline)).result(PATIENCE_SECONDS)
    assert deadline.left_seconds() == 0


def test_stopping_ends_a_pause_and_refuses_what_waits(thread):
    pausing = threading.Event()

    def pause():
        thread.backoff.not_before_seconds = time.monotonic() + 3600
        pausing.set()
        thread.pause()

    paused = thread.submit(pause)
    waiting = thread.submit(lambda: None)
    assert pausing.wait(PATIENCE_SECONDS)
    assert thread.stop(PATIENCE_SECONDS)
    for future in (paused, waiting):
        with pytest.raises(SenderStopped):
            future.result(PATIENCE_SECONDS)
    with pytest.raises(SenderStopped):
        thread.submit(lambda: None)


def test_an_alarm_that_was_interrupted_before_anybody_was_woken_rings_the_next_time(monkeypatch):
    lock = threading.RLock()
    alarm, heard = Alarm(lock), []
    alarm._sleeps_until = math.inf

    def interrupted():
        raise KeyboardInterrupt

    with lock:
        with monkeypatch.context() as patch:
            patch.setattr(alarm._rung, "notify_all", interrupted)
            with pytest.raises(KeyboardInterrupt):
                alarm.ring()
        monkeypatch.setattr(alarm._rung, "notify_all", lambda: heard.append(1))
        alarm.ring()
    assert heard == [1]


def test_an_alarm_that_is_rung_while_the_thread_goes_to_sleep_anew_rings_the_next_time(monkeypatch):
    """As where a signal's handler flushes in the middle of it: that waits, and lets the thread run meanwhile."""
    lock = threading.RLock()
    alarm, heard = Alarm(lock), []

    def sleep_anew():
        heard.append(1)
        alarm._sleeps_until = math.inf

    alarm._sleeps_until = math.inf
    monkeypatch.setattr(alarm._rung, "notify_all", sleep_anew)
    with lock:
        for _ in range(2):
            alarm.ring()
    assert heard == [1, 1]


def test_a_job_of_which_its_caller_is_told_an_error_does_not_run(thread, monkeypatch):
    def fail(*_):
        raise MemoryError

    thread.submit(lambda: None).result(PATIENCE_SECONDS)
    ran = []
    with monkeypatch.context() as patched:
        patched.setattr(Alarm, "ring", fail)
        with pytest.raises(MemoryError):
            thread.submit(lambda: ran.append("it ran"))
    thread.submit(lambda: None).result(PATIENCE_SECONDS)
    assert ran == []


def fail_first(monkeypatch, owner, name):
    """Let the first call of a function find no memory."""
    function = getattr(owner, name)
    refused: list[str] = []

    def failing(*arguments):
        if not refused:
            refused.append(name)
            raise MemoryError(name)
        return function(*arguments)

    monkeypatch.setattr(owner, name, failing)
    return refused


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Alarm, "sleep"),
        (Future, "set_result"),
        (Future, "set_running_or_notify_cancel"),
        (SenderThread, "_next_work"),
        (SenderThread, "_run_job"),
        (Timed, "due_seconds"),
    ],
)
def test_whatever_fails_around_a_job_its_caller_is_told_its_answer(thread, monkeypatch, owner, name):
    thread.timed_work.append(Timed())
    refused = fail_first(monkeypatch, owner, name)
    assert thread.submit(lambda: "done").result(PATIENCE_SECONDS) == "done"
    assert thread.submit(lambda: "next").result(PATIENCE_SECONDS) == "next"
    assert refused == [name]


def test_whatever_fails_as_a_job_is_refused_its_caller_is_told_so(thread, monkeypatch):
    """Its error comes as it has begun to run and has not left the queue: the thread ends before it could be run."""
    may_fail, ended = threading.Event(), threading.Event()

    class Jobs(deque[Any]):
        def popleft(self):
            assert may_fail.wait(PATIENCE_SECONDS)
            thread._is_stopping = True
            raise MemoryError

    thread._jobs = Jobs()
    thread.at_end.append(ended.set)
    futures = [thread.submit(lambda: None) for _ in range(3)]
    assert futures[1].cancel()
    refused = fail_first(monkeypatch, Future, "set_exception")
    may_fail.set()
    for future in (futures[0], futures[2]):
        with pytest.raises(SenderStopped):
            future.result(PATIENCE_SECONDS)
    assert ended.wait(PATIENCE_SECONDS)
    assert refused == ["set_exception"]


def test_an_error_is_told_though_there_was_no_memory_for_it_at_first(thread, monkeypatch):
    refused = fail_first(monkeypatch, Future, "set_exception")
    failing = thread.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(PATIENCE_SECONDS)
    assert refused == ["set_exception"]


def test_a_job_that_cannot_be_told_of_the_end_leaves_no_other_one_untold(thread, monkeypatch):
    may_end, ended = threading.Event(), threading.Event()
    thread.at_end.append(ended.set)
    thread.submit(lambda: may_end.wait(PATIENCE_SECONDS))
    futures = [thread.submit(lambda: None) for _ in range(2)]
    refuse = Future.set_exception

    def failing(future, error):
        if future is futures[0]:
            raise MemoryError
        refuse(future, error)

    monkeypatch.setattr(Future, "set_exception", failing)
    thread.stop(0)
    may_end.set()
    with pytest.raises(SenderStopped):
        futures[1].result(PATIENCE_SECONDS)
    assert ended.wait(PATIENCE_SECONDS)


def test_after_mistakes_that_are_over_the_next_pause_is_a_short_one_again(thread, caplog):
    """Also where nothing is asked of a database on this thread; its own pauses are another matter."""
    failed = threading.Event()

    class Mistaken(Timed):
        tries = 0

        def due_seconds(self, now_seconds):
            return now_seconds if self.tries < 3 else None

        def run(self):
            self.tries += 1
            if self.tries == 3:
                failed.set()
            raise ZeroDivisionError

    thread.timed_work.append(Mistaken())
    thread.start()
    assert failed.wait(PATIENCE_SECONDS)
    for _ in range(2):
        # What the first one leaves behind is seen by the second one.
        is_pausing = thread.submit(lambda: thread._after_mistakes.is_pausing).result(PATIENCE_SECONDS)
    assert (is_pausing, thread.backoff.is_pausing) == (False, False)
    # One and the same is told once in a while, however often it is made.
    assert ["it goes on" in record.getMessage() for record in caplog.records if record.exc_info] == [True]


def test_what_is_due_is_not_asked_for_without_a_pause_while_that_fails(thread, monkeypatch):
    pauses = []
    may_stop = threading.Event()

    class Mistaken(Timed):
        def due_seconds(self, now_seconds):
            raise ZeroDivisionError

    def pause(*, backoff):
        pauses.append(backoff.is_pausing)
        if len(pauses) == 3:
            thread.timed_work.clear()
            may_stop.set()

    monkeypatch.setattr(thread, "pause", pause)
    thread.timed_work.append(Mistaken())
    thread.start()
    assert may_stop.wait(PATIENCE_SECONDS)
    assert thread.submit(lambda: "done").result(PATIENCE_SECONDS) == "done"
    assert pauses == [True] * 3


@pytest.mark.parametrize("what", ["timed work", "a job's beginning"])
def test_what_fails_each_time_is_not_done_again_without_a_pause(thread, monkeypatch, what):
    """As the sending of records to several databases, which is due at once again."""
    pauses, tries, may_stop = [], [], threading.Event()

    def fail(*_):
        tries.append(1)
        raise ZeroDivisionError

    def pause(*, backoff):
        pauses.append((backoff.is_pausing, len(tries)))
        if len(pauses) == 3:
            thread.timed_work.clear()
            monkeypatch.undo()
            may_stop.set()

    class Mistaken(Timed):
        def due_seconds(self, now_seconds):
            return now_seconds

        run = fail

    monkeypatch.setattr(thread, "pause", pause)
    if what == "timed work":
        thread.timed_work.append(Mistaken())
    else:
        monkeypatch.setattr(Future, "set_running_or_notify_cancel", fail)
    job = thread.submit(lambda: "done")
    assert may_stop.wait(PATIENCE_SECONDS)
    assert job.result(PATIENCE_SECONDS) == "done"
    assert pauses == [(True, number) for number in (1, 2, 3)]
