"""A store that is made anew, replaced by another one, or loses its last commits, while clients have it open.

They remember topics by the numbers of their partitions, which may be those of other topics by now, and themselves by a
producer id, which may be given to another one.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, create_engine, delete, make_url, select, update

from txnstore import Consumer, KafkaException, Message, Producer, TopicPartition
from txnstore.clients.consumer.reader import PartitionReader
from txnstore.db import opening
from txnstore.db.backend import Limits
from txnstore.db.identity import check_same_store
from txnstore.db.opening import open_store
from txnstore.db.schema import finished_transactions, partition_heads, producer_states, record_batches, stores
from txnstore.db.store import Store
from txnstore.errors import StoreCopied
from txnstore.log import partition_rows
from txnstore.log.bounds import read_bounds
from txnstore.log.partition_rows import PRODUCER_IDS_IN_TURN_MS, allocate_producer_id
from txnstore.log.topics import create_topic
from txnstore.testing.postgres_server import connection_string

PATIENCE_SECONDS = 60
#: As they are for users: conftest.py changes them.
PARTITION_ID_MAX = (1 << 31) - 1
PRODUCER_ID_MS = 10

NUMBERS = itertools.count(1)


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path, txnstore_postgres_server):
    """The URL of an empty database, and what deletes it and makes it anew."""
    if request.param == "sqlite":
        path = tmp_path / "store.db"

        def remove():
            for ending in ("", "-wal", "-shm"):
                Path(f"{path}{ending}").unlink(missing_ok=True)

        yield f"sqlite:///{path}", remove
        return
    server, name = txnstore_postgres_server, f"txnstore_another_{os.getpid()}_{next(NUMBERS)}"
    server.create_database(name)

    def remake():
        server.drop_database(name)
        server.create_database(name)

    yield server.url(name), remake
    server.drop_database(name)


def drop_tables(url: str) -> None:
    """Drop all that is ours, from another connection; those of clients stay."""
    if url.startswith("postgresql"):
        with psycopg.connect(connection_string(url)) as server:
            server.execute("DROP SCHEMA txnstore CASCADE")
        return
    with closing(sqlite3.connect(make_url(url).database or "", timeout=PATIENCE_SECONDS)) as file, file:
        names = file.execute("SELECT type, name FROM sqlite_master WHERE name LIKE 'txnstore%' ORDER BY type = 'table'")
        for kind, name in names.fetchall():
            if kind in ("table", "view"):
                file.execute(f"DROP {kind} {name}")


def test_nothing_is_written_to_the_topics_of_another_store(place, orders_of):
    url, remake = place
    with open_store(url, limits=Limits(retry_timeout_ms=5_000)) as store:
        orders = orders_of(store)
        orders.add(b"before")
        remake()
        with open_store(url) as other:
            other.write(lambda connection: create_topic(connection, "payments"))
            payments = orders_of(other, "payments")
            assert payments.partition_id == orders.partition_id
            for _ in range(2):
                with pytest.raises(StoreCopied, match=r"or was replaced: restart the program"):
                    orders.add(b"an order")
                with pytest.raises(StoreCopied):
                    orders.values()
            assert payments.values() == []


@pytest.mark.slow_but_first
@pytest.mark.parametrize("names", [["payments"], ["payments", "orders"]], ids=["without its topic", "with one like it"])
def test_tables_that_are_made_anew_under_connections_that_stay_are_another_store(txnstore_url, names, monkeypatch):
    monkeypatch.setattr(opening, "FIRST_PARTITION_ID_MAX", PARTITION_ID_MAX)
    told = []
    with (
        Producer({"bootstrap.servers": txnstore_url}) as producer,
        Consumer({"bootstrap.servers": txnstore_url, "group.id": "readers"}) as consumer,
    ):
        producer.produce("orders", "before")
        assert producer.flush(PATIENCE_SECONDS) == 0
        consumer.assign([TopicPartition("orders", 0, 0)])
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None
        assert message.value() == b"before"
        drop_tables(txnstore_url)
        with open_store(txnstore_url) as other:
            made = [other.write(lambda connection, name=name: create_topic(connection, name)) for name in names]
            for _ in range(2):
                producer.produce("orders", "an order", on_delivery=lambda error, _: told.append(error.str()))
                assert producer.flush(PATIENCE_SECONDS) == 0
                assert "or was replaced" in told.pop()
            with pytest.raises(KafkaException, match="or was replaced"):
                consumer.get_watermark_offsets(TopicPartition("orders", 0), timeout=PATIENCE_SECONDS)
            ids = [topic.partition_id(0) for topic in made]
            bounds = other.read(lambda connection: read_bounds(connection, ids))
            assert [of.high_watermark for of in bounds.values()] == [0] * len(made)


def test_whoever_comes_after_the_last_commits_were_lost_is_not_taken_for_a_producer_that_lives_on(
    txnstore_empty_url, txnstore_clock, monkeypatch
):
    """A standby that lagged has become the primary, or a backup was restored: it has not given out the id yet."""
    monkeypatch.setattr(partition_rows, "PRODUCER_ID_MS", PRODUCER_ID_MS)
    configuration = {"bootstrap.servers": txnstore_empty_url, "txnstore.clock": txnstore_clock}
    with open_store(txnstore_empty_url, clock=txnstore_clock) as store, Producer(configuration) as living:
        given = store.read(lambda connection: connection.execute(select(stores.c.next_producer_id)).scalar_one())
        living.produce("payments", "before")
        assert living.flush(PATIENCE_SECONDS) == 0
        store.write(lambda connection: connection.execute(update(stores).values(next_producer_id=given)))
        txnstore_clock.advance(PRODUCER_IDS_IN_TURN_MS + PRODUCER_ID_MS)
        with Producer(configuration) as newcomer:
            for producer in living, newcomer:
                producer.produce("orders", "an order")
                assert producer.flush(PATIENCE_SECONDS) == 0
        with Consumer({**configuration, "group.id": "readers"}) as consumer:
            bounds = consumer.get_watermark_offsets(TopicPartition("orders", 0), timeout=PATIENCE_SECONDS)
    assert bounds == (0, 2)


def test_producer_ids_by_the_age_of_a_store_stay_among_those_of_their_database(
    txnstore_empty_url, txnstore_clock, monkeypatch
):
    monkeypatch.setattr(partition_rows, "PRODUCER_ID_MS", PRODUCER_ID_MS)
    with open_store(txnstore_empty_url, clock=txnstore_clock) as store:
        assert store.write(allocate_producer_id) == 0
        txnstore_clock.advance(PRODUCER_IDS_IN_TURN_MS)
        assert store.write(allocate_producer_id) == 1
        txnstore_clock.advance(PRODUCER_ID_MS * 1_000)
        assert [store.write(allocate_producer_id) for _ in range(2)] == [1_000, 1_001]
        third = 2 << 40
        store.write(lambda connection: connection.execute(update(stores).values(next_producer_id=third + 5)))
        assert store.write(allocate_producer_id) == third + 1_000
        txnstore_clock.advance(-PRODUCER_ID_MS * 2_000)
        assert store.write(allocate_producer_id) == third + 1_001


def go_back(store: Store, next_offset: int) -> None:
    """Let each partition of the store be as it was when its log ended here, as a backup that is restored would."""

    def work(connection: Connection) -> None:
        connection.execute(delete(record_batches).where(record_batches.c.last_offset >= next_offset))
        connection.execute(delete(finished_transactions))
        connection.execute(delete(producer_states))
        connection.execute(update(partition_heads).values(next_offset=next_offset))

    store.write(work, wakes_readers=True)


@pytest.fixture
def older_store(txnstore_empty_url):
    """A store in which `go_back` harms nobody else."""
    with open_store(txnstore_empty_url) as store:
        store.write(lambda connection: create_topic(connection, "orders"))
        yield store


def test_a_producer_that_is_given_offsets_once_more_says_so_and_writes_nothing_more(
    older_store, txnstore_empty_url, orders_of
):
    told: list[Any] = []
    configuration = {"bootstrap.servers": txnstore_empty_url, "error_cb": told.append}
    with Producer(configuration) as producer:
        for value in ("a", "b"):
            producer.produce("orders", value)
            assert producer.flush(PATIENCE_SECONDS) == 0
        go_back(older_store, 1)
        producer.produce("orders", "c", on_delivery=lambda error, message: told.append((error, message.offset())))
        with pytest.raises(KafkaException, match="has gone back to an older state") as fatal:
            producer.flush(PATIENCE_SECONDS)
        assert fatal.value.args[0].fatal()
        assert producer.flush(PATIENCE_SECONDS) == 0
        assert told == [(None, 1)], "what was written is there"
        producer.produce("orders", "d", on_delivery=lambda error, _: told.append(error.str()))
        assert producer.flush(PATIENCE_SECONDS) == 0
        assert "Restart the program" in told[-1]
    assert orders_of(older_store).values() == [b"a", b"c"]


def test_a_transactional_producer_that_is_given_offsets_once_more_is_finished(
    older_store, txnstore_empty_url, orders_of
):
    with Producer({"bootstrap.servers": txnstore_empty_url, "transactional.id": "orders"}) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        for value in ("a", "b", "c"):
            if value == "c":
                go_back(older_store, 1)
            producer.begin_transaction()
            producer.produce("orders", value)
            producer.commit_transaction(PATIENCE_SECONDS)
        producer.begin_transaction()
        producer.produce("orders", "d")
        with pytest.raises(KafkaException, match="has gone back to an older state") as fatal:
            producer.commit_transaction(PATIENCE_SECONDS)
        assert fatal.value.args[0].fatal()
    assert orders_of(older_store).values() == [b"a", b"c"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("order", ["offset", "commit"])
@pytest.mark.parametrize("next_offset", [1, 3], ids=["behind the reader", "ahead of it"])
def test_a_reader_of_a_log_that_has_become_shorter_says_so_and_reads_nothing_more(
    older_store, txnstore_empty_url, order, next_offset
):
    """Also where it has not read that far: it knows how far the log had come."""
    configuration = {
        "bootstrap.servers": txnstore_empty_url,
        "group.id": "readers",
        "auto.offset.reset": "earliest",
        "txnstore.delivery.order": order,
        "enable.auto.commit": False,
    }
    with Producer({"bootstrap.servers": txnstore_empty_url}) as producer, Consumer(configuration) as consumer:
        for number in range(4):
            producer.produce("orders", str(number))
            assert producer.flush(PATIENCE_SECONDS) == 0
        consumer.assign([TopicPartition("orders", 0, 0)])
        for _ in range(4):
            message = consumer.poll(PATIENCE_SECONDS)
            assert message is not None
            assert message.error() is None
        consumer.pause(consumer.assignment())
        if next_offset == 3:
            consumer.seek(TopicPartition("orders", 0, 1))
        go_back(older_store, next_offset)
        consumer.resume(consumer.assignment())
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None
        assert "has gone back to an older state" in str(message.error())
        with pytest.raises(KafkaException, match="has gone back to an older state"):
            consumer.get_watermark_offsets(TopicPartition("orders", 0), timeout=PATIENCE_SECONDS)


@pytest.mark.slow
def test_nothing_is_read_or_committed_where_the_log_has_come_as_far_again(older_store, txnstore_empty_url, monkeypatch):
    """A reader that waits for an open transaction to end asks by another way whether there is something new."""
    refused = threading.Semaphore(0)
    read = PartitionReader.read

    def reads(*arguments: Any, **keywords: Any) -> Any:
        try:
            return read(*arguments, **keywords)
        except StoreCopied:
            refused.release()
            raise

    monkeypatch.setattr(PartitionReader, "read", reads)
    settings = {"bootstrap.servers": txnstore_empty_url}
    reading = {**settings, "group.id": "readers", "auto.offset.reset": "earliest", "enable.auto.commit": False}
    with Producer(settings | {"transactional.id": "open"}) as holder, Consumer(reading) as consumer:
        produce_one(settings, "before")
        holder.init_transactions(PATIENCE_SECONDS)
        holder.begin_transaction()
        holder.produce("orders", "never")
        assert holder.flush(PATIENCE_SECONDS) == 0
        produce_one(settings, "lost")
        consumer.assign([TopicPartition("orders", 0, 0)])
        assert polled(consumer).value() == b"before"
        go_back(older_store, 2)
        assert refused.acquire(timeout=PATIENCE_SECONDS)
        produce_one(settings | {"transactional.id": "open"}, None)
        for _ in range(3):
            produce_one(settings, "new")
        assert refused.acquire(timeout=PATIENCE_SECONDS)
        assert "has gone back to an older state" in str(polled(consumer).error())
        assert consumer.poll(0) is None
        engine = create_engine(txnstore_empty_url)
        with engine.begin() as connection, pytest.raises(KafkaException, match="has gone back to an older state"):
            consumer.commit(offsets=[TopicPartition("orders", 0, 1)], connection=connection)
        engine.dispose()


def polled(consumer: Consumer) -> Message:
    """Return what comes next; something has to."""
    message = consumer.poll(PATIENCE_SECONDS)
    assert message is not None
    return message


def produce_one(settings: dict[str, Any], value: str | None) -> None:
    """Let another client write this; with a transactional id and None it ends what is open under it."""
    with Producer(settings) as producer:
        if value is None:
            producer.init_transactions(PATIENCE_SECONDS)
        else:
            producer.produce("orders", value)
            assert producer.flush(PATIENCE_SECONDS) == 0


def test_a_standby_that_shows_less_than_was_seen_is_waited_for(older_store, txnstore_empty_url, monkeypatch):
    """One that was restarted shows what it has replayed, and goes on from there."""
    asked = threading.Event()

    def is_standby(*_: object) -> bool:
        asked.set()
        return True

    monkeypatch.setattr(type(older_store.backend), "is_standby", is_standby)
    reading = {"bootstrap.servers": txnstore_empty_url, "group.id": "readers", "enable.auto.commit": False}
    with Consumer(reading) as consumer:
        for value in ("a", "b", "c"):
            produce_one({"bootstrap.servers": txnstore_empty_url}, value)
        consumer.assign([TopicPartition("orders", 0, 2)])
        assert polled(consumer).value() == b"c"
        show_end(older_store, 2)
        consumer.seek(TopicPartition("orders", 0, 1))
        assert consumer.poll(0) is None or asked.is_set()
        assert asked.wait(PATIENCE_SECONDS)
        show_end(older_store, 3)
        values: list[Any] = []
        while len(values) < 2:
            message = polled(consumer)
            values += [message.value()] if message.error() is None else []
        assert values == [b"b", b"c"]


def show_end(store: Store, next_offset: int) -> None:
    """Let partitions seem to end here."""
    store.write(lambda connection: connection.execute(update(partition_heads).values(next_offset=next_offset)))


def test_a_store_that_has_given_out_more_producer_ids_before_is_an_older_state_of_itself(
    older_store, txnstore_empty_url
):
    with open_store(txnstore_empty_url) as living:
        living.write(allocate_producer_id)
        living.read(lambda connection: check_same_store(living, connection))
        older_store.write(lambda connection: connection.execute(update(stores).values(next_producer_id=0)))
        for _ in range(2):
            with pytest.raises(StoreCopied, match="has gone back to an older state"):
                living.read(lambda connection: check_same_store(living, connection))
        with pytest.raises(StoreCopied, match="has gone back to an older state"):
            living.write(allocate_producer_id)
    with open_store(txnstore_empty_url) as newcomer:
        assert newcomer.write(allocate_producer_id) == 0
