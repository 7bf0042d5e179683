"""A connection that is cut at a COMMIT while a producer works: its program notices nothing, nothing is there twice."""

from __future__ import annotations

import pytest
from sqlalchemy import delete

from tests.clients.callers import calling, ledger_of, make_ledger
from tests.clients.steps import NO_MEMBER, PATIENCE_SECONDS, create_topic, error_of, read_to_end, values
from tests.tools.proxy import Proxy, upstream_of
from txnstore import Consumer, KafkaError, Producer, TopicPartition
from txnstore.clients.producer import enlistment
from txnstore.clients.producer.progress import TransactionOffsets
from txnstore.clients.producer.requests import ProducerSession
from txnstore.db.callers.enlisted import EnlistedConnection
from txnstore.db.opening import open_store
from txnstore.db.schema import transaction_log, transactions
from txnstore.errors import OutcomeUnknown
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.outcome import resolve_end

TOPIC = "orders"

#: The calls of a program in turn; the cut comes in one of them.
STEPS = {
    "init": lambda producer: producer.init_transactions(PATIENCE_SECONDS),
    "begin": lambda producer: producer.begin_transaction(),
    "produce": lambda producer: producer.produce(TOPIC, b"flushed", partition=0),
    "flush": lambda producer: producer.flush(PATIENCE_SECONDS),
    "send_offsets": lambda producer: producer.send_offsets_to_transaction(
        [TopicPartition(TOPIC, 0, 7)], NO_MEMBER, PATIENCE_SECONDS
    ),
    "produce more": lambda producer: producer.produce(TOPIC, b"with the commit", partition=0),
    "commit": lambda producer: producer.commit_transaction(PATIENCE_SECONDS),
    "begin again": lambda producer: producer.begin_transaction(),
    "produce in vain": lambda producer: producer.produce(TOPIC, b"aborted", partition=0),
    "flush in vain": lambda producer: producer.flush(PATIENCE_SECONDS),
    "abort": lambda producer: producer.abort_transaction(PATIENCE_SECONDS),
    "begin once more": lambda producer: producer.begin_transaction(),
    "produce once more": lambda producer: producer.produce(TOPIC, b"last", partition=0),
    "commit once more": lambda producer: producer.commit_transaction(PATIENCE_SECONDS),
}
COMMITTED = [b"flushed", b"with the commit", b"last"]


@pytest.fixture
def proxy(txnstore_postgresql_url):
    with Proxy(upstream_of(txnstore_postgresql_url)) as proxy:
        yield proxy


@pytest.mark.slow
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize(
    "cut_in", ["init", "flush", "send_offsets", "commit", "flush in vain", "abort", "commit once more"]
)
def test_a_program_does_not_notice_that_the_connection_was_cut(txnstore_postgresql_url, proxy, cut_in, side):
    url = txnstore_postgresql_url
    create_topic(url, TOPIC)
    producer = Producer({"bootstrap.servers": proxy.url(url), "transactional.id": "anna", "linger.ms": 50_000})
    for name, step in STEPS.items():
        cut = proxy.cut(**{side: "COMMIT"}) if name == cut_in else None
        step(producer)
        assert cut is None or cut.fired
    producer.close()

    assert values(read_to_end(url, TOPIC)) == COMMITTED
    assert values(read_to_end(url, TOPIC, isolation="read_uncommitted")) == [*COMMITTED[:2], b"aborted", b"last"]
    consumer = Consumer({"bootstrap.servers": url, "group.id": "readers"})
    (position,) = consumer.committed([TopicPartition(TOPIC, 0)], PATIENCE_SECONDS)
    consumer.close()
    assert position.offset == 7


@pytest.mark.slow
@pytest.mark.parametrize("side", ["before", "after"])
def test_records_outside_of_transactions_are_there_once(txnstore_postgresql_url, proxy, side):
    url = txnstore_postgresql_url
    create_topic(url, TOPIC)
    reports = []
    producer = Producer({"bootstrap.servers": proxy.url(url)})
    for number in range(5):
        cut = proxy.cut(**{side: "COMMIT"})
        producer.produce(
            TOPIC, b"%d" % number, partition=0, on_delivery=lambda error, message: reports.append((error, message))
        )
        assert producer.flush(PATIENCE_SECONDS) == 0
        assert cut.fired
    producer.close()

    assert [(error, message.offset()) for error, message in reports] == [(None, number) for number in range(5)]
    assert values(read_to_end(url, TOPIC)) == [b"%d" % number for number in range(5)]


# --- another process starts before an answer that was lost is asked for again -------------------------------------


def lose_answer(monkeypatch, since):
    """Lose the answer to the next end of a transaction, with whatever happens until the next try."""
    end = TransactionCoordinator.end_transaction

    def end_once(*arguments, **keywords):
        monkeypatch.setattr(TransactionCoordinator, "end_transaction", end)
        end(*arguments, **keywords)
        since()
        raise OutcomeUnknown

    monkeypatch.setattr(TransactionCoordinator, "end_transaction", end_once)


@pytest.fixture
def commit(make_producer, url):
    """A producer in a transaction, with one record that is sent and one that goes with the commit, and its reports."""
    create_topic(url, TOPIC)
    reports = []
    producer = make_producer({"transactional.id": "anna", "linger.ms": 50_000})
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()
    for value in (b"sent before", b"with the commit"):
        producer.produce(
            TOPIC, value, partition=0, on_delivery=lambda error, message: reports.append((error, message.offset()))
        )
        if not reports:
            producer.flush(PATIENCE_SECONDS)
    return producer, reports


def test_a_commit_that_stands_is_no_error_though_another_process_has_started(commit, make_producer, url, monkeypatch):
    producer, reports = commit
    newer = make_producer({"transactional.id": "anna"})
    lose_answer(monkeypatch, lambda: newer.init_transactions(PATIENCE_SECONDS))
    producer.commit_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, TOPIC)) == [b"sent before", b"with the commit"]
    assert reports == [(None, 0), (None, 1)]
    # Only what comes next is refused.
    producer.begin_transaction()
    producer.produce(TOPIC, b"too late", partition=0)
    error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
    assert (error.code(), error.fatal()) == (KafkaError._FENCED, True)
    assert values(read_to_end(url, TOPIC)) == [b"sent before", b"with the commit"]


def test_a_commit_that_the_journal_does_not_remember_is_not_said_to_be_aborted(commit, make_producer, url, monkeypatch):
    producer, _ = commit
    newer = make_producer({"transactional.id": "anna"})

    def since():
        with open_store(url) as store:
            store.write(lambda connection: connection.execute(delete(transaction_log)))
        newer.init_transactions(PATIENCE_SECONDS)

    lose_answer(monkeypatch, since)
    error = error_of(producer.commit_transaction, PATIENCE_SECONDS)
    assert (error.code(), error.fatal(), error.retriable()) == (KafkaError._TIMED_OUT, True, False)
    assert "the outcome is unknown" in error.str()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("stands", [True, False], ids=["after", "before"])
def test_a_commit_for_whose_answer_there_is_no_memory_is_asked_for_again(commit, url, monkeypatch, stands):
    producer, reports = commit
    end = TransactionCoordinator.end_transaction

    def end_once(*arguments, **keywords):
        monkeypatch.setattr(TransactionCoordinator, "end_transaction", end)
        if stands:
            end(*arguments, **keywords)
        raise MemoryError

    monkeypatch.setattr(TransactionCoordinator, "end_transaction", end_once)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert reports == [(None, 0), (None, 1)]
    producer.begin_transaction()
    producer.produce(TOPIC, b"next", partition=0)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert values(read_to_end(url, TOPIC)) == [b"sent before", b"with the commit", b"next"]


#: What comes behind the answer of a commit.
BEHIND_THE_ANSWER = [
    (ProducerSession, "begin_transaction"),
    (TransactionOffsets, "were_committed"),
    (ProducerSession, "note_places"),
]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_enlisted", [False, True])
@pytest.mark.parametrize(("owner", "name"), BEHIND_THE_ANSWER)
def test_a_commit_behind_whose_answer_there_is_no_memory_stands(
    make_producer, url, monkeypatch, owner, name, is_enlisted
):
    create_topic(url, TOPIC)
    make_ledger(url)
    reports, step = [], getattr(owner, name)

    def fail_once(*_):
        monkeypatch.setattr(owner, name, step)
        raise MemoryError

    producer = make_producer({"transactional.id": "anna", "linger.ms": 50_000})
    producer.init_transactions(PATIENCE_SECONDS)
    with calling(url, "core") as caller:
        producer.begin_transaction()
        if is_enlisted:
            producer.enlist(caller.given)
            caller.write("1")
        producer.produce(TOPIC, b"1", partition=0, on_delivery=lambda error, _: reports.append(error))
        monkeypatch.setattr(owner, name, fail_once)
        producer.commit_transaction(PATIENCE_SECONDS)
        # It cannot be aborted any more.
        assert error_of(producer.abort_transaction, PATIENCE_SECONDS).code() == KafkaError._STATE
    assert reports == [None]
    producer.begin_transaction()
    producer.produce(TOPIC, b"2", partition=0)
    producer.commit_transaction(PATIENCE_SECONDS)
    assert (ledger_of(url), values(read_to_end(url, TOPIC))) == (["1"] if is_enlisted else [], [b"1", b"2"])


def test_an_enlisted_commit_is_asked_about_again_if_there_is_no_memory_for_the_answer(make_producer, url, monkeypatch):
    create_topic(url, TOPIC)
    make_ledger(url)
    producer = make_producer({"transactional.id": "anna", "linger.ms": 50_000})
    producer.init_transactions(PATIENCE_SECONDS)
    send, asked = EnlistedConnection._send_commit, []

    def lose(*arguments):
        send(*arguments)
        raise OutcomeUnknown

    def resolve_twice(*arguments, **keywords):
        asked.append(resolve_end(*arguments, **keywords))
        if len(asked) == 1:
            raise MemoryError
        return asked[-1]

    monkeypatch.setattr(EnlistedConnection, "_send_commit", lose)
    monkeypatch.setattr(enlistment, "resolve_end", resolve_twice)
    producer.begin_transaction()
    with calling(url, "core") as caller:
        producer.enlist(caller.given)
        caller.write("1")
        producer.produce(TOPIC, b"1", partition=0)
        producer.commit_transaction(PATIENCE_SECONDS)
    assert [answer.is_committed for answer in asked] == [True, True]
    assert (ledger_of(url), values(read_to_end(url, TOPIC))) == (["1"], [b"1"])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("stands", [True, False])
def test_an_enlisted_commit_is_told_as_it_is_though_an_expired_producer_id_was_replaced(
    make_producer, url, monkeypatch, stands
):
    create_topic(url, TOPIC)
    make_ledger(url)
    producer, newer = (make_producer({"transactional.id": "anna", "linger.ms": 50_000}) for _ in range(2))
    producer.init_transactions(PATIENCE_SECONDS)
    producer.begin_transaction()

    def since():
        with open_store(url) as store:
            store.write(lambda connection: connection.execute(delete(transactions)))
        newer.init_transactions(PATIENCE_SECONDS)

    def lose(taken, connection, deadline):
        if stands:
            send(taken, connection, deadline)
        else:
            connection.exec_driver_sql("ROLLBACK")
        since()
        raise OutcomeUnknown

    send = EnlistedConnection._send_commit
    with calling(url, "core") as caller:
        producer.enlist(caller.given)
        caller.write("1")
        producer.produce(TOPIC, b"1", partition=0)
        monkeypatch.setattr(EnlistedConnection, "_send_commit", lose)
        if stands:
            producer.commit_transaction(PATIENCE_SECONDS)
        else:
            assert error_of(producer.commit_transaction, PATIENCE_SECONDS).fatal()
    assert (ledger_of(url), values(read_to_end(url, TOPIC))) == ((["1"], [b"1"]) if stands else ([], []))
