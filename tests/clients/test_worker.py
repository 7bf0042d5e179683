"""The worker: the order of its jobs, their errors, and its end."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from concurrent.futures import CancelledError, Future, wait

import pytest

from tests.clients.consumer.log_writer import eventually
from tests.clients.moments import attempt, every_interrupt, is_no_moment_for_signals
from txnstore import background_thread
from txnstore.background_thread import BackgroundThread
from txnstore.clients.worker import Worker

#: A bound for waiting on threads; nothing takes so long unless it is broken.
PATIENCE_SECONDS = 60


@pytest.fixture
def worker():
    worker = Worker("a worker of the tests")
    yield worker
    worker.close(PATIENCE_SECONDS)


@pytest.fixture
def gate():
    """What holds up a job; open at the end of the test, so that no thread is left."""
    gate = threading.Event()
    yield gate
    gate.set()


def hold_up(worker, gate):
    """Return once the worker runs a job that ends when the gate opens."""
    running = threading.Event()

    def work():
        running.set()
        assert gate.wait(PATIENCE_SECONDS)
        return "held up"

    future = worker.submit(work)
    assert running.wait(PATIENCE_SECONDS)
    return future


def test_jobs_run_in_order_on_one_daemon_thread_with_the_workers_name(worker):
    ran = []
    futures = [
        worker.submit(lambda number=number: ran.append((number, threading.current_thread()))) for number in range(100)
    ]
    wait(futures, PATIENCE_SECONDS)
    assert [number for number, _ in ran] == list(range(100))
    (thread,) = {thread for _, thread in ran}
    assert (thread.name, thread.daemon) == ("a worker of the tests", True)
    assert thread is not threading.current_thread()


def test_no_thread_is_started_before_the_first_job():
    before = set(threading.enumerate())
    worker = Worker("idle")
    assert set(threading.enumerate()) <= before
    assert worker.close(PATIENCE_SECONDS) is True


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt(), SystemExit(3)], ids=ascii)
def test_an_error_comes_out_of_its_future_and_the_next_job_runs(worker, error):
    def fail():
        raise error

    failed, succeeded = worker.submit(fail), worker.submit(lambda: 7)
    assert failed.exception(PATIENCE_SECONDS) is error
    assert succeeded.result(PATIENCE_SECONDS) == 7


@pytest.mark.parametrize("closes", [False, True])
def test_a_signals_handler_may_submit_or_close_while_a_job_is_submitted(closes):
    def submit():
        futures.append(worker.submit(lambda: None))

    def handle():
        # Else it would wait for ever.
        assert worker._lock.acquire(blocking=False)
        worker._lock.release()
        if closes:
            worker.close(0)
        else:
            submit()

    for _, moment in every_interrupt({"clients/worker.py"}, is_no_moment_for_signals, handle):
        worker = Worker("interrupted")
        futures: list[Future[None]] = []
        with contextlib.suppress(RuntimeError) if closes else contextlib.nullcontext():
            attempt(moment, submit)
        for future in futures:
            with contextlib.suppress(CancelledError):
                future.result(PATIENCE_SECONDS)
        assert closes or len(futures) == (1 if moment.where is None else 2)
        assert worker.close(PATIENCE_SECONDS), moment.where


def test_a_cancelled_job_does_not_run(worker, gate):
    held_up = hold_up(worker, gate)
    cancelled = worker.submit(lambda: pytest.fail("ran"))
    after = worker.submit(lambda: "after")
    assert cancelled.cancel()
    gate.set()
    assert held_up.result(PATIENCE_SECONDS) == "held up"
    assert after.result(PATIENCE_SECONDS) == "after"


def test_a_job_may_submit_the_next_one(worker):
    inner = worker.submit(lambda: worker.submit(lambda: "inner")).result(PATIENCE_SECONDS)
    assert inner.result(PATIENCE_SECONDS) == "inner"


def test_a_result_is_not_kept_until_the_next_job(worker):
    class Result:
        pass

    future = worker.submit(Result)
    result = weakref.ref(future.result(PATIENCE_SECONDS))
    del future
    # The next job's end shows that the worker has left the first one behind.
    worker.submit(lambda: None).result(PATIENCE_SECONDS)
    gc.collect()
    assert result() is None


def test_close_drops_what_waits_and_waits_for_what_runs(worker, gate):
    held_up = hold_up(worker, gate)
    waiting = [worker.submit(lambda: pytest.fail("ran")) for _ in range(3)]
    assert worker.close(0) is False
    for future in waiting:
        assert future.cancelled()
        with pytest.raises(CancelledError):
            future.result(0)
    assert not held_up.done()
    gate.set()
    assert worker.close(PATIENCE_SECONDS) is True
    assert held_up.result(0) == "held up"


def test_close_is_bounded_and_may_be_called_again(worker, gate):
    hold_up(worker, gate)
    assert worker.close(0.01) is False
    assert worker.close(-1) is False
    gate.set()
    assert worker.close(PATIENCE_SECONDS) is True
    assert worker.close(PATIENCE_SECONDS) is True


def test_after_close_nothing_is_taken(worker):
    worker.submit(lambda: None).result(PATIENCE_SECONDS)
    assert worker.close(PATIENCE_SECONDS) is True
    with pytest.raises(RuntimeError, match="a worker of the tests has been closed"):
        worker.submit(lambda: pytest.fail("ran"))


def test_a_job_may_close_its_worker(worker):
    assert worker.submit(lambda: worker.close(PATIENCE_SECONDS)).result(PATIENCE_SECONDS) is False
    assert worker.close(PATIENCE_SECONDS) is True


def test_jobs_of_many_threads_run_one_at_a_time(worker):
    running, most = [], []

    def work():
        running.append(1)
        most.append(len(running))
        running.pop()

    def submit():
        for _ in range(50):
            worker.submit(work)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    worker.submit(lambda: None).result(PATIENCE_SECONDS)
    assert most == [1] * 200


@pytest.fixture
def interpreter_ends(monkeypatch):
    """Begin the end of the interpreter, when Python 3.12 starts no new thread."""

    def start(_thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    return lambda: monkeypatch.setattr(threading.Thread, "start", start)


def test_where_no_thread_can_be_started_jobs_are_refused_or_done_at_once_and_the_end_is_the_same(interpreter_ends):
    needing, other = Worker("needs a thread"), Worker("needs none", needs_thread=False)
    interpreter_ends()
    with pytest.raises(RuntimeError, match="new thread"):
        needing.submit(lambda: 1)
    assert other.submit(threading.current_thread).result(0) is threading.current_thread()
    assert isinstance(other.submit(lambda: 1 // 0).exception(0), ZeroDivisionError)
    for worker in (needing, other):
        worker.close(0)
        with pytest.raises(RuntimeError, match="has been closed"):
            worker.submit(lambda: 1)


@pytest.fixture
def start_is_interrupted(monkeypatch):
    """Let Ctrl-C come in each start of a thread from now on, before the thread is there or after."""
    start = threading.Thread.start

    def begin(*, is_there):
        def interrupted(thread):
            if is_there:
                start(thread)
            raise KeyboardInterrupt

        monkeypatch.setattr(threading.Thread, "start", interrupted)

    return begin


def threads_named(name):
    return [thread for thread in threading.enumerate() if thread.name == name]


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("starts", [1, 2, 3])
def test_an_interrupt_while_its_thread_starts_leaves_one_thread_that_ends_with_it(
    worker, start_is_interrupted, monkeypatch, is_there, starts
):
    start_is_interrupted(is_there=is_there)
    for _ in range(starts):
        # The thread that was there at the last attempt may have begun to work.
        with contextlib.suppress(KeyboardInterrupt):
            worker.submit(threading.current_thread)
    monkeypatch.undo()
    ran = []
    futures = [
        worker.submit(lambda number=number: ran.append((number, threading.current_thread()))) for number in range(100)
    ]
    wait(futures, PATIENCE_SECONDS)
    assert [number for number, _ in ran] == list(range(100))
    assert len({thread for _, thread in ran}) == 1
    assert worker.close(PATIENCE_SECONDS) is True
    eventually(lambda: not threads_named("a worker of the tests"))


def test_a_worker_that_is_closed_after_an_interrupted_start_leaves_no_thread(worker, start_is_interrupted, monkeypatch):
    start_is_interrupted(is_there=True)
    with pytest.raises(KeyboardInterrupt):
        worker.submit(threading.current_thread)
    monkeypatch.undo()
    worker.close(PATIENCE_SECONDS)
    eventually(lambda: not threads_named("a worker of the tests"))


def test_a_thread_that_could_not_be_started_is_tried_again(monkeypatch):
    thread, has_run = BackgroundThread("tried again"), threading.Event()

    def start(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            thread.start(has_run.set)
    assert thread.close(0) is True
    thread.start(has_run.set)
    thread.start(has_run.clear)
    assert has_run.wait(PATIENCE_SECONDS)
    assert thread.close(PATIENCE_SECONDS) is True
    assert has_run.is_set()


@pytest.mark.parametrize("name", ["set_result", "set_exception"])
def test_an_outcome_is_told_though_there_was_no_memory_for_it_at_first_and_the_next_job_runs(worker, monkeypatch, name):
    tell = getattr(Future, name)
    refused: list[str] = []

    def failing(future, outcome):
        if not refused:
            refused.append(name)
            raise MemoryError
        tell(future, outcome)

    monkeypatch.setattr(Future, name, failing)
    job = worker.submit(lambda: 1 / (name == "set_result"))
    assert worker.submit(lambda: "next").result(PATIENCE_SECONDS) == "next"
    assert type(job.exception(PATIENCE_SECONDS)) is (type(None) if name == "set_result" else ZeroDivisionError)
    assert refused == [name]


def test_a_thread_does_last_what_it_is_given_unless_it_has_ended_or_never_began():
    """Who is told no does it."""
    thread, goes_on = BackgroundThread("ending"), threading.Event()
    done: list[object] = []
    assert not thread.do_last(lambda: done.append("too early"))

    def run():
        assert goes_on.wait(PATIENCE_SECONDS)
        done.append("run")

    thread.start(run)
    assert thread.do_last(lambda: done.append("first"))
    assert thread.do_last(lambda: done.append(thread.do_last(lambda: done.append("last"))))
    assert done == []
    goes_on.set()
    assert thread.close(PATIENCE_SECONDS)
    assert done == ["run", "first", True, "last"]
    assert not thread.do_last(lambda: done.append("too late"))


@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit()])
def test_what_fails_at_the_end_of_a_thread_is_logged_and_the_rest_is_done(caplog, monkeypatch, error):
    thread, goes_on = BackgroundThread("ending"), threading.Event()
    done: list[str] = []

    def run():
        assert goes_on.wait(PATIENCE_SECONDS)

    def fail():
        raise error

    def log(record):
        if not done:
            raise OSError("no room for logs")
        return record

    # A log that fails as well keeps nothing from being done.
    monkeypatch.setattr(logging.getLogger("txnstore.background_thread"), "filter", log)
    thread.start(run)
    for work in (fail, lambda: done.append("second"), fail, lambda: done.append("last")):
        assert thread.do_last(work)
    goes_on.set()
    assert thread.close(PATIENCE_SECONDS)
    assert done == ["second", "last"]
    assert [record.getMessage() for record in caplog.records] == ["ending failed at what it was to do last"]
    # It has ended: the program does not wait for it, and nobody leaves anything to it.
    assert thread not in background_thread._ending
    assert not thread.do_last(fail)
