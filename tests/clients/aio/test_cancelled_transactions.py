"""A commit that was cancelled goes on, and what becomes of it is told: by the next commit, or by an abort."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import wait

import pytest

from tests.clients.steps import PATIENCE_SECONDS, create_topic
from txnstore import KafkaError, KafkaException, TopicPartition
from txnstore.aio import AIOProducer


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_SECONDS))


class Held:
    """A call of the producer below that has begun and goes on once it may."""

    def __init__(self, monkeypatch, producer, name, error=None):
        self.loop = asyncio.get_running_loop()
        self.begun = asyncio.Event()
        self.may_go_on = threading.Event()
        self.call = getattr(producer._producer, name)
        self.error = error
        self.count = 0
        monkeypatch.setattr(producer._producer, name, self)

    def __call__(self, *arguments, **keywords):
        self.count += 1
        self.loop.call_soon_threadsafe(self.begun.set)
        assert self.may_go_on.wait(PATIENCE_SECONDS)
        error, self.error = self.error, None
        if error is not None:
            raise KafkaException(error) if isinstance(error, KafkaError) else error
        return self.call(*arguments, **keywords)

    async def cancel(self, call):
        """Cancel a call of the producer that has begun it."""
        task = asyncio.ensure_future(call)
        await self.begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def a_transaction(url, value):
    async with AIOProducer({"bootstrap.servers": url, "transactional.id": "x"}) as producer:
        await producer.init_transactions(PATIENCE_SECONDS)
        await producer.begin_transaction()
        await producer.produce("t", value, partition=0)
        yield producer


async def code_of(call):
    with pytest.raises(KafkaException) as caught:
        await call
    return caught.value.args[0]


@pytest.fixture
def committed_values(url, make_consumer):
    create_topic(url, "t")

    def read(count):
        consumer = make_consumer()
        consumer.assign([TopicPartition("t", 0, 0)])
        read = consumer.consume(count, PATIENCE_SECONDS) if count else []
        return [message.value() for message in [*read, *consumer.consume(1, 0)]]

    return read


def test_the_next_commit_takes_up_the_answer_of_a_cancelled_one(url, monkeypatch, committed_values):
    async def scenario():
        async with a_transaction(url, b"0") as producer:
            held = Held(monkeypatch, producer, "commit_transaction")
            await held.cancel(producer.commit_transaction(PATIENCE_SECONDS))
            error = await code_of(producer.commit_transaction(0.01))
            assert (error.code(), error.retriable()) == (KafkaError._TIMED_OUT, True)
            error = await code_of(producer.abort_transaction(0.01))
            assert (error.code(), error.retriable()) == (KafkaError._TIMED_OUT, True)
            committing = asyncio.create_task(producer.commit_transaction(PATIENCE_SECONDS))
            await asyncio.sleep(0)
            held.may_go_on.set()
            await committing
            assert held.count == 1
            # Told once: there is no transaction any more.
            assert (await code_of(producer.commit_transaction(PATIENCE_SECONDS))).code() == KafkaError._STATE
            await producer.begin_transaction()
            await producer.produce("t", b"1", partition=0)
            await producer.commit_transaction(PATIENCE_SECONDS)

    run(scenario())
    assert committed_values(2) == [b"0", b"1"]


def test_a_cancelled_commit_is_not_taken_up_as_one_of_other_writers(url, monkeypatch, committed_values):
    async def scenario():
        async with a_transaction(url, b"0") as producer:
            held = Held(monkeypatch, producer, "commit_transaction")
            await held.cancel(producer.commit_transaction(PATIENCE_SECONDS, writers=[]))
            held.may_go_on.set()
            for writers in ([1], None):
                error = await code_of(producer.commit_transaction(PATIENCE_SECONDS, writers=writers))
                assert (error.code(), error.retriable()) == (KafkaError._INVALID_ARG, False)
            await producer.commit_transaction(PATIENCE_SECONDS, writers=[])
            assert held.count == 1

    run(scenario())
    assert committed_values(1) == [b"0"]


def test_an_abort_after_a_cancelled_commit_says_that_it_has_committed(url, monkeypatch, committed_values):
    async def scenario():
        async with a_transaction(url, b"0") as producer:
            held = Held(monkeypatch, producer, "commit_transaction")
            await held.cancel(producer.commit_transaction(PATIENCE_SECONDS))
            held.may_go_on.set()
            error = await code_of(producer.abort_transaction(PATIENCE_SECONDS))
            assert (error.code(), error.str()) == (
                KafkaError._STATE,
                "the transaction is committed: its commit went on after the call was cancelled",
            )

    run(scenario())
    assert committed_values(1) == [b"0"]


def test_an_abort_after_a_cancelled_commit_that_failed_aborts(url, monkeypatch, committed_values):
    async def scenario():
        async with a_transaction(url, b"0") as producer:
            error = KafkaError(KafkaError._INCONSISTENT, "why", txn_requires_abort=True)
            held = Held(monkeypatch, producer, "commit_transaction", error)
            await held.cancel(producer.commit_transaction(PATIENCE_SECONDS))
            held.may_go_on.set()
            await producer.abort_transaction(PATIENCE_SECONDS)
            await producer.begin_transaction()

    run(scenario())
    assert committed_values(0) == []


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "error",
    [KafkaException(KafkaError(KafkaError._FAIL, "why", retriable=True)), TypeError("why")],
    ids=["retriable", "mistake"],
)
def test_an_abort_after_a_cancelled_commit_that_only_raised_aborts_at_once(url, monkeypatch, committed_values, error):
    async def scenario():
        async with a_transaction(url, b"0") as producer:
            held = Held(monkeypatch, producer, "commit_transaction", error)
            await held.cancel(producer.commit_transaction(PATIENCE_SECONDS))
            held.may_go_on.set()
            await producer.abort_transaction(PATIENCE_SECONDS)
            await producer.begin_transaction()

    run(scenario())
    assert committed_values(0) == []


def test_an_abort_after_a_cancelled_commit_that_was_fatal_raises_that(url, monkeypatch, committed_values):
    async def scenario():
        async with a_transaction(url, b"0") as producer:
            error = KafkaError(KafkaError._FENCED, "why", fatal=True)
            held = Held(monkeypatch, producer, "commit_transaction", error)
            await held.cancel(producer.commit_transaction(PATIENCE_SECONDS))
            held.may_go_on.set()
            assert await code_of(producer.abort_transaction(PATIENCE_SECONDS)) is error

    run(scenario())
    assert committed_values(0) == []


def test_the_next_commit_raises_what_a_cancelled_one_raised(url, monkeypatch, committed_values):
    async def scenario():
        async with a_transaction(url, b"0") as producer:
            error = KafkaError(KafkaError._INCONSISTENT, "why", txn_requires_abort=True)
            held = Held(monkeypatch, producer, "commit_transaction", error)
            await held.cancel(producer.commit_transaction(PATIENCE_SECONDS))
            held.may_go_on.set()
            assert await code_of(producer.commit_transaction(PATIENCE_SECONDS)) is error
            await producer.abort_transaction(PATIENCE_SECONDS)

    run(scenario())
    assert committed_values(0) == []


def test_a_cancelled_commit_whose_time_was_up_is_resumed(url, monkeypatch, committed_values):
    async def scenario():
        async with a_transaction(url, b"0") as producer:
            error = KafkaError(KafkaError._TIMED_OUT, "why", retriable=True)
            held = Held(monkeypatch, producer, "commit_transaction", error)
            await held.cancel(producer.commit_transaction(PATIENCE_SECONDS))
            held.may_go_on.set()
            await producer.commit_transaction(PATIENCE_SECONDS)
            assert held.count == 2

    run(scenario())
    assert committed_values(1) == [b"0"]


def test_a_cancelled_commit_is_no_answer_for_the_transaction_after_it(url, monkeypatch, committed_values):
    async def scenario():
        async with a_transaction(url, b"0") as producer:
            held = Held(monkeypatch, producer, "commit_transaction")
            await held.cancel(producer.commit_transaction(PATIENCE_SECONDS))
            held.may_go_on.set()
            await asyncio.wrap_future(producer._left["commit"])
            await producer.begin_transaction()
            await producer.produce("t", b"1", partition=0)
            await producer.commit_transaction(PATIENCE_SECONDS)
            assert held.count == 2

    run(scenario())
    assert committed_values(2) == [b"0", b"1"]


def test_a_commit_that_is_told_late_of_its_cancelling_answers_nothing_later(url, monkeypatch, committed_values):
    async def scenario():
        async with a_transaction(url, b"0") as producer:
            executor, submitted = producer._calls.executor, []
            submit = executor.submit

            def submit_and_note(work):
                submitted.append(submit(work))
                return submitted[-1]

            monkeypatch.setattr(executor, "submit", submit_and_note)
            held = Held(monkeypatch, producer, "commit_transaction")
            committing = asyncio.create_task(producer.commit_transaction(PATIENCE_SECONDS))
            await held.begun.wait()
            held.may_go_on.set()

            def submit_and_wait(work):
                done = submit(work)
                wait([done], PATIENCE_SECONDS)
                return done

            # From here to the beginning of the next transaction the loop does nothing else.
            wait(submitted, PATIENCE_SECONDS)
            monkeypatch.setattr(executor, "submit", submit_and_wait)
            committing.cancel()
            await producer.begin_transaction()
            with pytest.raises(asyncio.CancelledError):
                await committing
            monkeypatch.setattr(executor, "submit", submit)
            await producer.produce("t", b"1", partition=0)
            await producer.commit_transaction(PATIENCE_SECONDS)
            assert held.count == 2

    run(scenario())
    assert committed_values(2) == [b"0", b"1"]


def test_a_commit_that_is_cancelled_while_it_waits_for_a_thread_is_not_made(url, monkeypatch, committed_values):
    async def scenario():
        async with a_transaction(url, b"0") as producer:
            held = Held(monkeypatch, producer, "commit_transaction")
            held.may_go_on.set()
            monkeypatch.setattr(producer, "flush", lambda timeout: asyncio.sleep(0))
            may_go_on = threading.Event()
            busy = [producer._calls.executor.submit(may_go_on.wait, PATIENCE_SECONDS) for _ in range(4)]
            committing = asyncio.create_task(producer.commit_transaction(PATIENCE_SECONDS))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert producer._calls.executor._work_queue.qsize()
            committing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await committing
            may_go_on.set()
            await asyncio.gather(*map(asyncio.wrap_future, busy))
            monkeypatch.undo()
            await producer.abort_transaction(PATIENCE_SECONDS)
            assert held.count == 0

    run(scenario())
    assert committed_values(0) == []


@pytest.mark.parametrize("name", ["init_transactions", "abort_transaction"])
def test_the_next_call_takes_up_the_answer_of_other_cancelled_ones(url, monkeypatch, name):
    async def scenario():
        async with AIOProducer({"bootstrap.servers": url, "transactional.id": "x"}) as producer:
            if name == "abort_transaction":
                await producer.init_transactions(PATIENCE_SECONDS)
                await producer.begin_transaction()
            held = Held(monkeypatch, producer, name)
            await held.cancel(getattr(producer, name)(PATIENCE_SECONDS))
            held.may_go_on.set()
            await getattr(producer, name)(PATIENCE_SECONDS)
            assert held.count == 1
            await producer.begin_transaction()

    run(scenario())
