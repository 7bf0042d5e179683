"""A closed store: the database itself refuses every write, whoever makes it and however long he has been there."""

from __future__ import annotations

import re
import threading
import time
from contextlib import closing as closing_after
from functools import partial

import psycopg
import pytest
from sqlalchemy import create_engine, delete, insert, select, text, update

from txnstore import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from txnstore.admin import AdminClient, NewTopic
from txnstore.db import closing
from txnstore.db.closing import Move, MoveState, close, open_, read_move, set_move, wait_for_writers
from txnstore.db.opening import open_store
from txnstore.db.postgresql import closing as postgresql_closing
from txnstore.db.postgresql.segments import SEGMENT_TABLES
from txnstore.db.schema import metadata, outbox, stores, topics
from txnstore.db.sqlite import closing as sqlite_closing
from txnstore.errors import StoreMoved, TxnStoreError
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic
from txnstore.model import Record
from txnstore.outbox import Outbox
from txnstore.participants.adoption import adopt
from txnstore.testing.postgres_server import connection_string
from txnstore.testing.private_cluster import PrivateCluster

MOVE = Move(MoveState.CLOSED, "00000000-0000-4000-8000-000000000001", "postgresql://new's \\home/shop")


def close_store(url, move=MOVE):
    with open_store(url) as store:
        store.write(wait_and_close(move))


def wait_and_close(move):
    def work(connection):
        wait_for_writers(connection)
        close(connection, move)

    return work


def create(admin):
    admin.create_topics([NewTopic("u", 1)])["u"].result()


def first_row(table, connection):
    return connection.execute(select(table).limit(1)).first()


def run(statement, connection):
    return connection.execute(statement)


def names_new_home(error):
    return "is closed" in str(error) and MOVE.peer in str(error)


@pytest.mark.slow
def test_no_table_takes_a_row_gives_one_up_or_changes_one(store) -> None:
    store.write(lambda connection: create_topic(connection, name="t", partition_count=1))
    store.write(wait_and_close(MOVE))
    for table in metadata.tables.values():
        column = stores.c.next_producer_id if table is stores else next(iter(table.c))
        row = dict.fromkeys((each.name for each in table.primary_key), None)
        for statement in (insert(table).values(row), delete(table), update(table).values({column: column})):
            is_row_by_row = store.backend.name == "sqlite" and not isinstance(statement, type(insert(table)))
            has_rows = store.read(partial(first_row, table))
            if is_row_by_row and not has_rows:
                # There is nothing that could be changed.
                continue
            with pytest.raises(StoreMoved) as refused:
                store.write(partial(run, statement))
            assert names_new_home(refused.value), statement
    store.write(open_)
    assert store.read(read_move) is None
    store.write(lambda connection: create_topic(connection, name="u", partition_count=1))


def test_no_segment_of_the_log_is_written_to_by_its_own_name(txnstore_postgresql_url) -> None:
    with open_store(txnstore_postgresql_url) as store:
        store.write(wait_and_close(MOVE))
        for table in SEGMENT_TABLES:
            for statement in (f"DELETE FROM txnstore.{table}", f"TRUNCATE txnstore.{table}"):
                with pytest.raises(StoreMoved):
                    store.write(partial(run, text(statement)))
        store.write(open_)
        for table in SEGMENT_TABLES:
            store.write(partial(run, text(f"TRUNCATE txnstore.{table}")))


@pytest.mark.slow
def test_tools_that_turn_triggers_off_are_refused_too(txnstore_postgresql_url) -> None:
    """What replicates or restores sets this for its session."""
    for move in (MOVE, Move(MoveState.ARRIVING, MOVE.uuid, MOVE.peer, "[]")):
        close_store(txnstore_postgresql_url, move)
        with closing_after(psycopg.connect(connection_string(txnstore_postgresql_url), autocommit=True)) as connection:
            # A subscription's changes meet those of each row alone, in segments as well.
            enabled = "SELECT DISTINCT tgenabled::text FROM pg_trigger WHERE tgname LIKE 'txnstore\\_closed%'"
            assert connection.execute(enabled).fetchall() == [("A",)]
            connection.execute("SET session_replication_role = replica")
            for table in (*(str(table.name) for table in metadata.tables.values()), *SEGMENT_TABLES):
                with pytest.raises(psycopg.Error, match="is closed"):
                    connection.execute(f"DELETE FROM txnstore.{table}")
        with open_store(txnstore_postgresql_url, moving=True) as store:
            store.write(open_)


def test_what_is_enabled_in_the_whole_of_the_log_is_in_its_segments_by_then() -> None:
    """PostgreSQL before 14.5 looks for it there, by its name."""
    tables = [(str(table.name), None) for table in metadata.tables.values()]
    statements = postgresql_closing.close("txnstore", tables, "it is closed", None)
    (enabled,) = (
        number
        for number, statement in enumerate(statements)
        if re.search(r'ALTER TABLE "txnstore"."record_batches" ENABLE ALWAYS TRIGGER txnstore_closed$', statement)
    )
    for segment in SEGMENT_TABLES:
        assert any(
            f'ON "txnstore"."{segment}" ' in statement and statement.startswith("CREATE TRIGGER txnstore_closed ")
            for statement in statements[:enabled]
        ), segment


@pytest.mark.slow
def test_a_subscription_writes_nothing_to_a_closed_store() -> None:
    with PrivateCluster(fsync=False, settings={"wal_level": "logical"}) as server:
        stores_ = [server.url(name) for name in ("first", "second")]
        for name, url in zip(("first", "second"), stores_, strict=True):
            server.create_database(name)
            open_store(url).close()
        close_store(stores_[1])
        with server.connect("first") as first, server.connect("second") as second:
            first.autocommit = second.autocommit = True
            for table in ("outbox", "record_batches"):
                first.execute(f"CREATE PUBLICATION of_{table} FOR TABLE txnstore.{table}")
                first.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [f"of_{table}"])
                second.execute(
                    f"CREATE SUBSCRIPTION of_{table} CONNECTION '{connection_string(stores_[0])}'"
                    f" PUBLICATION of_{table} WITH (create_slot = false, copy_data = false)"
                )
            first.execute("INSERT INTO txnstore.outbox (topic, value) VALUES ('t', '')")
            with open_store(stores_[0]) as store:
                (number,) = store.write(lambda connection: create_topic(connection, name="t")).partition_ids
                item = Append(number, encode([Record(b"x")]))
                store.write(lambda connection: append(connection, [item]))
            refused = "SELECT count(*) FROM pg_stat_subscription_stats WHERE apply_error_count > 0"
            written = "SELECT (SELECT count(*) FROM txnstore.outbox) + (SELECT count(*) FROM txnstore.record_batches)"
            until = time.monotonic() + 60
            while second.execute(refused).fetchone() != (2,):
                assert second.execute(written).fetchone() == (0,)
                assert time.monotonic() < until


def first_error(consumer):
    for _ in range(300):
        message = consumer.poll(0.1)
        if message is not None and message.error() is not None:
            return message.error()
    raise AssertionError("it heard of nothing")


def test_clients_that_were_there_before_are_told_where_the_store_went(url) -> None:
    admin = AdminClient({"bootstrap.servers": url})
    admin.create_topics([NewTopic("t", 1)])["t"].result()
    reports = []
    plain = Producer({"bootstrap.servers": url, "on_delivery": lambda error, _: reports.append(error)})
    unsequenced = Producer({"bootstrap.servers": url, "enable.idempotence": False})
    payments = Producer({"bootstrap.servers": url, "transactional.id": "payments"})
    consumer = Consumer(
        {
            "bootstrap.servers": url,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "heartbeat.interval.ms": 100,
            "session.timeout.ms": 1_000,
        }
    )
    try:
        plain.produce("t", b"before")
        assert plain.flush(60) == 0
        assert reports == [None]
        payments.init_transactions()
        payments.begin_transaction()
        payments.produce("t", b"open")
        payments.flush()
        consumer.subscribe(["t"])
        first = consumer.poll(60)
        assert first is not None
        assert first.value() == b"before"

        close_store(url)

        reports.clear()
        plain.produce("t", b"after")
        plain.flush(60)
        assert [(error.code(), error.retriable()) for error in reports] == [(KafkaError._INVALID_ARG, False)]
        assert names_new_home(reports[0].str())
        unsequenced.produce("t", b"after", on_delivery=lambda error, _: reports.append(error))
        unsequenced.flush(60)
        assert names_new_home(reports[-1].str())
        for call in (
            lambda: payments.commit_transaction(60),
            lambda: consumer.commit(offsets=[TopicPartition("t", 0, 1)], asynchronous=False),
            partial(create, admin),
        ):
            with pytest.raises(KafkaException) as refused:
                call()
            assert names_new_home(refused.value.args[0].str()), call
        # A member that only reads hears of it when it renews its place.
        error = first_error(consumer)
        assert (error.code(), names_new_home(error.str())) == (KafkaError._INVALID_ARG, True)
    finally:
        for client in (plain, unsequenced, payments):
            client.close()
        consumer.close()
    with open_store(url, moving=True) as store:
        heads = store.read(lambda connection: connection.execute(text(_COUNT[store.backend.name])).scalar_one())
        assert heads == 2, "a record was written to a closed store"
    with pytest.raises(StoreMoved) as refused_opening:
        open_store(url)
    assert names_new_home(refused_opening.value)
    with pytest.raises(KafkaException) as refused_client:
        Producer({"bootstrap.servers": url, "transactional.id": "payments"}).init_transactions(60)
    assert names_new_home(refused_client.value.args[0].str())


_COUNT = {
    "sqlite": "SELECT next_offset FROM txnstore_partition_heads",
    "postgresql": "SELECT next_offset FROM txnstore.partition_heads",
}
_INSERT = {
    "sqlite": "INSERT INTO txnstore_outbox (topic, value) VALUES ('t', x'00')",
    "postgresql": "INSERT INTO txnstore.outbox (topic, value) VALUES ('t', '\\x00')",
}


def plain_engine(url):
    return create_engine(url.replace("postgresql://", "postgresql+psycopg://"))


def test_an_application_that_fills_the_outbox_by_its_own_sql_is_refused(url) -> None:
    close_store(url)
    engine = plain_engine(url)
    try:
        with engine.connect() as connection, pytest.raises(Exception, match="once `txnstore copy` has ended"):
            connection.execute(text(_INSERT[engine.dialect.name].replace("\\", "\\\\")))
    finally:
        engine.dispose()


def test_a_snapshot_from_before_the_closing_lets_nobody_in(txnstore_postgresql_url) -> None:
    """An application's REPEATABLE READ would not see any row that says so."""
    engine = plain_engine(txnstore_postgresql_url).execution_options(isolation_level="REPEATABLE READ")
    for move in (MOVE, Move(MoveState.ARRIVING, MOVE.uuid, MOVE.peer, "[]")):
        with engine.connect() as connection:
            assert connection.execute(text("SELECT count(*) FROM txnstore.topics")).scalar_one() == 0
            close_store(txnstore_postgresql_url, move)
            with pytest.raises(Exception, match="new's"):
                connection.execute(text(_INSERT["postgresql"].replace("\\", "\\\\")))
            connection.rollback()
        with open_store(txnstore_postgresql_url, moving=True) as store:
            store.write(open_)
    engine.dispose()


def test_who_is_writing_at_that_moment_is_waited_for(url) -> None:
    """What the application has inserted and not committed is committed before, and so it is copied."""
    engine = plain_engine(url)
    closer = threading.Thread(target=close_store, args=(url,))
    with open_store(url) as store:
        connection = engine.connect()
        connection.execute(text(_INSERT[engine.dialect.name].replace("\\", "\\\\")))
        closer.start()
        closer.join(0.2)
        assert closer.is_alive(), "it was closed while somebody was writing"
        connection.commit()
        connection.close()
        closer.join(60)
        assert not closer.is_alive()
        assert store.read(read_move) == MOVE
        assert len(store.read(lambda connection: connection.execute(select(outbox)).all())) == 1
    engine.dispose()


def test_enlisted_connections_and_outboxes_are_refused_and_commit_nothing(url, tmp_path) -> None:
    engine = plain_engine(url)
    outbox_ = Outbox(url, sequencer=False)
    payments = Producer({"bootstrap.servers": url, "transactional.id": "payments"})
    AdminClient({"bootstrap.servers": url}).create_topics([NewTopic("t", 1)])["t"].result()
    payments.init_transactions()
    payments.begin_transaction()
    close_store(url)
    with engine.connect() as connection:
        with pytest.raises(Exception, match="is closed"):
            outbox_.produce(connection, "t", b"x")
        connection.rollback()
    with engine.connect() as connection:
        payments.enlist(connection)
        payments.produce("t", b"x")
        with pytest.raises(KafkaException, match="is closed"):
            payments.commit_transaction(60)
        # It gives SQLite's write lock back before it asks for the abort, which is refused as well.
        with pytest.raises(KafkaException, match="is closed"):
            payments.abort_transaction(5)
    payments.close()
    outbox_.close()
    engine.dispose()


def test_only_who_names_the_move_fills_a_store_that_arrives(store) -> None:
    arriving = Move(MoveState.ARRIVING, MOVE.uuid, MOVE.peer, "here")
    store.write(wait_and_close(arriving))

    def fill(move, connection):
        assert closing.admit(connection, move)
        connection.execute(insert(topics), {"name": "t", "topic_uuid": MOVE.uuid, "created_ms": 1})
        set_move(connection, arriving)

    with pytest.raises(StoreMoved, match="is being filled by a copy of"):
        store.write(lambda connection: create_topic(connection, name="t", partition_count=1))
    store.write(lambda connection: fill(arriving, connection))
    # Behind it everything is refused again, also on the very same connection.
    with pytest.raises(StoreMoved):
        store.write(lambda connection: connection.execute(delete(topics)))
    for other in (
        Move(MoveState.ARRIVING, MOVE.uuid, MOVE.peer, "elsewhere"),
        Move(MoveState.ARRIVING, OTHER, "", "here"),
    ):
        with pytest.raises(AssertionError):
            store.write(partial(fill, other))
    assert store.read(read_move) == arriving


OTHER = "00000000-0000-4000-8000-000000000002"


def test_a_closed_store_is_not_adopted_by_accident(url) -> None:
    close_store(url)
    with open_store(url, moving=True) as store, pytest.raises(TxnStoreError, match="is closed"):
        adopt([store], force=True)


@pytest.mark.parametrize(
    "changed",
    [
        ("SELECT RAISE", "DELETE FROM txnstore_topics; SELECT RAISE"),
        ("ABORT, '", "ABORT, '' || load('"),
        ("BEFORE", "AFTER"),
    ],
)
def test_only_what_closes_a_store_is_taken_for_that(changed) -> None:
    for statement in sqlite_closing.close([("topics", None), ("stores", ["store_uuid", "created_ms"])], "it's closed"):
        assert sqlite_closing.is_ours(statement)
        assert not sqlite_closing.is_ours(statement.replace(*changed))
    assert not sqlite_closing.is_ours(None)
