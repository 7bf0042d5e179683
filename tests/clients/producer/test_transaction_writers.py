"""Several producers in one transaction, as their users write them: a token, a report, and the commit that names."""

from __future__ import annotations

import asyncio
import pickle
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.clients.callers import calling
from tests.clients.steps import PATIENCE_SECONDS, create_topic, error_of, read_to_end, time_out, values
from txnstore import KafkaError, Producer
from txnstore.aio import AIOProducer
from txnstore.clients.producer import progress
from txnstore.transactions.recovery import abort_by_administrator
from txnstore.transactions.tokens import TransactionToken

pytestmark = pytest.mark.least_privilege

TOPIC = "orders"


@pytest.fixture
def topic(url):
    return create_topic(url, TOPIC, partition_count=2)


@pytest.fixture
def producer(make_producer, topic, clock):
    producer = make_producer({"transactional.id": "anna", "txnstore.clock": clock})
    producer.init_transactions(PATIENCE_SECONDS)
    return producer


@pytest.fixture
def token(producer):
    producer.begin_transaction()
    return producer.transaction_token(PATIENCE_SECONDS)


@pytest.fixture
def make_writer(make_producer, clock):
    return lambda token, **more: make_producer({"txnstore.transaction.token": token, "txnstore.clock": clock, **more})


@pytest.fixture
def seen(url, clock):
    """Return what a reader gets that goes by the same clock: by another one, what is open might be overdue."""

    def read():
        messages = read_to_end(url, TOPIC, partitions=(0, 1), **{"txnstore.clock": clock})
        return sorted((value or b"").decode() for value in values(messages))

    return read


def test_writers_that_joined_by_a_token_count_once_they_have_reported(url, producer, token, make_writer, seen) -> None:
    good, silent, empty = (make_writer(token) for _ in range(3))
    for number in range(4):
        good.produce(TOPIC, f"good {number}", partition=number % 2)
        silent.produce(TOPIC, f"silent {number}", partition=number % 2)
    assert silent.flush(PATIENCE_SECONDS) == 0
    producer.produce(TOPIC, "own", partition=0)
    ids = {writer.report_writer(PATIENCE_SECONDS) for writer in (good, empty)}
    assert len(ids) == 2
    assert good.report_writer() in ids
    assert seen() == []
    producer.commit_transaction(PATIENCE_SECONDS)
    assert seen() == ["good 0", "good 1", "good 2", "good 3", "own"]
    # The next transaction is like any other.
    with producer.transaction():
        producer.produce(TOPIC, "next", partition=0)
    assert "next" in seen()


def test_the_committer_names_who_counts(url, producer, token, make_writer, seen) -> None:
    named, other = make_writer(token), make_writer(token)
    for writer in (named, other):
        writer.produce(TOPIC, "named" if writer is named else "other", partition=0)
    other.report_writer(PATIENCE_SECONDS)
    producer.commit_transaction(writers=[named.report_writer(PATIENCE_SECONDS)])
    assert seen() == ["named"]


def test_a_commit_that_names_writers_is_taken_up_again_once_it_is_done(
    url, producer, token, make_writer, seen, monkeypatch
) -> None:
    writer = make_writer(token)
    writer.produce(TOPIC, "a", partition=0)
    writers = [writer.report_writer(PATIENCE_SECONDS)]
    started: list[Future[Any]] = []

    def is_left(work, wait_seconds):
        started.append(work)
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(progress, "result_within", is_left)
        error = error_of(lambda: producer.commit_transaction(0.0, writers=writers))
    assert (error.code(), error.retriable()) == (KafkaError._TIMED_OUT, True)
    started[0].result(PATIENCE_SECONDS)
    producer.commit_transaction(PATIENCE_SECONDS, writers=writers)
    assert seen() == ["a"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("kind", ["alone", "with a connection"])
def test_a_commit_under_way_is_not_taken_up_as_one_of_other_writers(
    url, producer, token, make_writer, seen, monkeypatch, kind
) -> None:
    named, other = (make_writer(token) for _ in range(2))
    for writer in (named, other):
        writer.produce(TOPIC, "named" if writer is named else "other", partition=0)
    first, second = (writer.report_writer(PATIENCE_SECONDS) for writer in (named, other))

    def is_left(*_):
        raise TimeoutError

    with calling(url, "core") as caller:
        if kind == "with a connection":
            producer.enlist(caller.given, PATIENCE_SECONDS)
        with monkeypatch.context() as patch:
            patch.setattr(progress, "result_within", is_left)
            error = error_of(lambda: producer.commit_transaction(0.0, writers=[first]))
        assert (error.code(), error.retriable()) == (KafkaError._TIMED_OUT, True)
        if kind == "with a connection":
            # What it waited for has come meanwhile.
            producer._transactions.progress.work.result(PATIENCE_SECONDS)
        for writers in ([first, second], [second], [], None):
            error = error_of(producer.commit_transaction, PATIENCE_SECONDS, writers=writers)
            assert (error.code(), error.retriable()) == (KafkaError._INVALID_ARG, False), writers
            assert "other writers" in error.str()
        producer.commit_transaction(PATIENCE_SECONDS, writers=[first, first])
    assert seen() == ["named"]
    # The next one has writers of its own.
    producer.begin_transaction()
    producer.commit_transaction(PATIENCE_SECONDS)


def test_a_commit_whose_time_was_up_as_its_work_was_done_is_taken_up_again(url, producer, token, seen, monkeypatch):
    def is_done_too_late(work, _):
        work.result(PATIENCE_SECONDS)
        raise TimeoutError

    with calling(url, "core") as caller:
        producer.produce(TOPIC, "a", partition=0)
        producer.enlist(caller.given, PATIENCE_SECONDS)
        with monkeypatch.context() as patch:
            patch.setattr(progress, "result_within", is_done_too_late)
            error = error_of(lambda: producer.commit_transaction(0.0))
        assert (error.code(), error.retriable()) == (KafkaError._TIMED_OUT, True)
        producer.commit_transaction(PATIENCE_SECONDS)
    assert seen() == ["a"]


def test_a_commit_of_some_writers_that_nobody_takes_up_ends_as_the_producer_is_closed(
    url, producer, token, make_writer, seen, monkeypatch
) -> None:
    named, other = (make_writer(token) for _ in range(2))
    for writer in (named, other):
        writer.produce(TOPIC, "named" if writer is named else "other", partition=0)
    ids = [writer.report_writer(PATIENCE_SECONDS) for writer in (named, other)]

    def is_left(*_):
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(progress, "result_within", is_left)
        error_of(lambda: producer.commit_transaction(0.0, writers=ids[:1]))
    producer.close()
    assert seen() == ["named"]


def test_a_block_takes_up_a_commit_of_some_writers_that_it_has_begun_itself(
    url, producer, make_writer, seen, monkeypatch
) -> None:
    def is_left(*_):
        raise TimeoutError

    for number in range(2):
        with producer.transaction(PATIENCE_SECONDS):
            token = producer.transaction_token(PATIENCE_SECONDS)
            named, other = (make_writer(token) for _ in range(2))
            for writer in (named, other):
                writer.produce(TOPIC, f"{'named' if writer is named else 'other'} {number}", partition=0)
            ids = [writer.report_writer(PATIENCE_SECONDS) for writer in (named, other)]
            with monkeypatch.context() as patch:
                patch.setattr(progress, "result_within", is_left)
                error_of(lambda: producer.commit_transaction(0.0, writers=ids[:1]))  # noqa: B023
    assert seen() == ["named 0", "named 1"]
    # None of these is the next one's.
    with producer.transaction(PATIENCE_SECONDS):
        producer.produce(TOPIC, "own", partition=0)
    assert seen() == ["named 0", "named 1", "own"]


def test_an_abort_aborts_what_writers_wrote(url, producer, token, make_writer, seen) -> None:
    writer = make_writer(token)
    writer.produce(TOPIC, "a", partition=0)
    writer.report_writer(PATIENCE_SECONDS)
    producer.abort_transaction(PATIENCE_SECONDS)
    assert seen() == []
    producer.begin_transaction()
    producer.commit_transaction(PATIENCE_SECONDS)


def test_a_commit_that_names_a_stranger_takes_an_abort(url, producer, token, make_writer, seen) -> None:
    writer = make_writer(token)
    writer.produce(TOPIC, "a", partition=0)
    writer.report_writer(PATIENCE_SECONDS)
    error = error_of(lambda: producer.commit_transaction(writers=[10**12]))
    assert (error.code(), error.txn_requires_abort(), error.fatal()) == (KafkaError.INVALID_REQUEST, True, False)
    assert "not in the transaction" in error.str()
    producer.abort_transaction(PATIENCE_SECONDS)
    assert seen() == []


def test_writers_are_named_only_where_a_token_was_given_out(producer) -> None:
    producer.begin_transaction()
    error = error_of(lambda: producer.commit_transaction(writers=[1]))
    assert error.code() == KafkaError._INVALID_ARG
    for wrong, text in ((1, "collection"), ("1", "collection"), (["1"], "integer"), ([1.0], "integer")):
        with pytest.raises(TypeError, match=text):
            producer.commit_transaction(writers=wrong)
    producer.commit_transaction(writers=[])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("how", ["commit", "abort", "init", "timeout", "administrator", "next"])
def test_a_writer_that_comes_late_is_fenced(
    url, store, clock, producer, token, make_writer, make_producer, how, seen
) -> None:
    started, late = make_writer(token), make_writer(token)
    started.produce(TOPIC, "in time", partition=0)
    assert started.flush(PATIENCE_SECONDS) == 0
    if how == "timeout":
        clock.advance(60_001)
        time_out(store)
    elif how == "administrator":
        assert abort_by_administrator(store, "anna")
    elif how == "init":
        make_producer({"transactional.id": "anna"}).init_transactions(PATIENCE_SECONDS)
    elif how == "abort":
        producer.abort_transaction(PATIENCE_SECONDS)
    else:
        producer.commit_transaction(PATIENCE_SECONDS)
        if how == "next":
            producer.begin_transaction()
            producer.transaction_token(PATIENCE_SECONDS)
    for writer in (started, late):
        failed = []
        writer.produce(TOPIC, "late", partition=0, callback=lambda error, _: failed.append(error))  # noqa: B023
        assert writer.flush(PATIENCE_SECONDS) == 0
        assert [error.code() for error in failed] == [KafkaError.PRODUCER_FENCED]
        error = error_of(writer.report_writer)
        assert (error.code(), error.fatal()) == (KafkaError._FENCED, True)
        assert "is over" in error.str()
        assert "is over" in error_of(lambda: writer.produce(TOPIC, "more")).str()  # noqa: B023
    assert seen() == []


def refused_calls():
    return {
        "init_transactions": lambda writer: writer.init_transactions(),
        "begin_transaction": lambda writer: writer.begin_transaction(),
        "commit_transaction": lambda writer: writer.commit_transaction(),
        "abort_transaction": lambda writer: writer.abort_transaction(),
        "send_offsets_to_transaction": lambda writer: writer.send_offsets_to_transaction([], b""),
        "transaction_token": lambda writer: writer.transaction_token(),
        "transaction": lambda writer: writer.transaction().__enter__(),
    }


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", sorted(refused_calls()))
def test_a_writer_neither_begins_nor_ends_the_transaction(url, producer, token, make_writer, name, seen) -> None:
    writer = make_writer(token)
    error = error_of(lambda: refused_calls()[name](writer))
    assert error.code() == KafkaError._STATE
    assert "transaction of another one" in error.str()
    # It does no harm.
    writer.produce(TOPIC, "a", partition=0)
    writer.report_writer(PATIENCE_SECONDS)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert seen() == ["a"]


def test_only_a_writer_reports_and_only_an_open_transaction_has_a_token(make_producer, producer) -> None:
    for other in (producer, make_producer()):
        assert error_of(other.report_writer).code() == KafkaError._NOT_CONFIGURED
    assert error_of(producer.transaction_token).code() == KafkaError._STATE
    assert error_of(make_producer().transaction_token).code() == KafkaError._NOT_CONFIGURED


def test_a_writer_that_reported_produces_no_more(producer, token, make_writer) -> None:
    writer = make_writer(token)
    writer.report_writer(PATIENCE_SECONDS)
    error = error_of(lambda: writer.produce(TOPIC, "more"))
    assert error.code() == KafkaError._STATE
    assert "has reported" in error.str()
    producer.abort_transaction(PATIENCE_SECONDS)


def test_a_writer_whose_report_came_too_late_is_not_said_to_have_reported(
    url, producer, token, make_writer, hold_database, seen
) -> None:
    writer = make_writer(token)
    with hold_database(url):
        writer.produce(TOPIC, "a", partition=0)
        assert error_of(writer.report_writer, 0.05).code() == KafkaError._TIMED_OUT
        error = error_of(lambda: writer.produce(TOPIC, "more"))
    assert (error.code(), "call it again" in error.str()) == (KafkaError._STATE, True)
    assert "has reported" not in error.str()
    writer.report_writer(PATIENCE_SECONDS)
    assert "has reported" in error_of(lambda: writer.produce(TOPIC, "more")).str()
    producer.commit_transaction(PATIENCE_SECONDS)
    assert seen() == ["a"]


def test_a_writer_whose_record_was_refused_does_not_count(url, producer, token, make_writer, seen) -> None:
    writer = make_writer(token, **{"allow.auto.create.topics": False})
    writer.produce(TOPIC, "a", partition=0)
    writer.produce("nowhere", "b")
    error = error_of(lambda: writer.report_writer(PATIENCE_SECONDS))
    assert error.fatal()
    producer.commit_transaction(PATIENCE_SECONDS)
    assert seen() == []


def test_a_writer_that_is_closed_without_a_report_does_not_count(url, producer, token, make_writer, seen) -> None:
    with make_writer(token) as writer:
        writer.produce(TOPIC, "a", partition=0)
    assert values(read_to_end(url, TOPIC, isolation="read_uncommitted", partitions=(0, 1))) == [b"a"]
    producer.commit_transaction(PATIENCE_SECONDS)
    assert seen() == []


@pytest.mark.slow
def test_writers_in_many_threads_lose_and_repeat_nothing(url, producer, token, make_writer, seen) -> None:
    start = threading.Barrier(4)

    def write(number):
        writer = make_writer(token)
        start.wait(PATIENCE_SECONDS)
        for index in range(50):
            writer.produce(TOPIC, f"{number}/{index:02}", partition=index % 2)
            if index % 10 == 0:
                writer.flush(PATIENCE_SECONDS)
        return writer.report_writer(PATIENCE_SECONDS)

    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(write, range(4)))
    producer.commit_transaction(writers=ids[:3])
    assert seen() == [f"{number}/{index:02}" for number in range(3) for index in range(50)]


def test_a_token_is_opaque_picklable_and_holds_no_credentials(url, producer, token) -> None:
    assert isinstance(token, bytes)
    assert pickle.loads(pickle.dumps(token)) == token == producer.transaction_token()
    assert b"://" not in token
    assert b"postgres:" not in token
    producer.abort_transaction(PATIENCE_SECONDS)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"x",
        *(
            b"txnstore.transaction.1:" + rest
            for rest in (b"", b"[]", b'["a","b",true,1]', b'{"a":1}', b"\xff", b"[" * 100_000)
        ),
    ],
    ids=range(8),
)
def test_bytes_that_are_no_token_are_refused_at_once(url, wrong) -> None:
    error = error_of(lambda: Producer({"bootstrap.servers": url, "txnstore.transaction.token": wrong}))
    assert error.code() == KafkaError._INVALID_ARG
    assert "not a token" in error.str()


def test_a_token_goes_with_no_transactional_id_and_no_other_kind_of_value(url, producer, token) -> None:
    for more in ({"transactional.id": "bert"}, {"enable.idempotence": False}, {"acks": 1}):
        configuration = {"bootstrap.servers": url, "txnstore.transaction.token": token, **more}
        assert error_of(lambda: Producer(configuration)).code() == KafkaError._INVALID_ARG  # noqa: B023
    with pytest.raises(TypeError, match="bytes"):
        Producer({"bootstrap.servers": url, "txnstore.transaction.token": token.decode()})
    producer.abort_transaction(PATIENCE_SECONDS)


def test_a_token_of_another_database_is_refused(producer, token, make_writer) -> None:
    parsed = TransactionToken.parse(token)
    foreign = bytes(TransactionToken("00000000-0000-0000-0000-000000000000", "anna", parsed.transaction))
    writer = make_writer(foreign)
    error = error_of(lambda: writer.report_writer(PATIENCE_SECONDS))
    assert (error.code(), error.fatal()) == (KafkaError.INVALID_REQUEST, True)
    assert "another database" in error.str()
    producer.abort_transaction(PATIENCE_SECONDS)


def test_coroutines_write_together_as_well(url, topic, seen) -> None:
    async def main():
        producer = AIOProducer({"bootstrap.servers": url, "transactional.id": "anna"})
        await producer.init_transactions()
        await producer.begin_transaction()
        writer = AIOProducer(
            {"bootstrap.servers": url, "txnstore.transaction.token": await producer.transaction_token()}
        )
        await writer.produce(TOPIC, value="a", partition=0)
        await producer.commit_transaction(writers=[await writer.report_writer()])
        await writer.close()
        await producer.close()

    asyncio.run(main())
    assert seen() == ["a"]
