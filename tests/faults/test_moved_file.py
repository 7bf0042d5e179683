"""An SQLite file that is moved, deleted or replaced under those that have it open: SQLite itself would not notice.

What they then wrote would be reported as lasting, and lost with the last of them.
"""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import literal, select

from txnstore import Consumer, Producer
from txnstore.db.backend import Limits
from txnstore.db.opening import open_store
from txnstore.db.sqlite.connections import WAL_BYTES_DUE
from txnstore.db.statements import HotStatement
from txnstore.errors import StoreUnavailable

PATIENCE_SECONDS = 30.0
PATIENCE_MS = 30_000
ONE = HotStatement(select(literal(1).label("number")))
#: The database, its log and the index of that.
OF_SQLITE = ("", "-wal", "-shm")


@pytest.fixture
def path(txnstore_sqlite_url):
    return Path(txnstore_sqlite_url.removeprefix("sqlite:///"))


@pytest.fixture
def orders(txnstore_sqlite_url, orders_of):
    """The topic, with no second try: one fault is one error."""
    with open_store(txnstore_sqlite_url, limits=Limits(retry_timeout_ms=0)) as store:
        yield orders_of(store)


def move(path, to):
    for ending in OF_SQLITE:
        if (file := Path(f"{path}{ending}")).exists():
            file.rename(f"{to}{ending}")


def back_up(path, to):
    with closing(sqlite3.connect(path)) as original, closing(sqlite3.connect(to)) as copy:
        original.backup(copy)


def value_of(message):
    assert message is not None
    return message.value()


def values_at(path, orders_of):
    with open_store(f"sqlite:///{path}") as store:
        return orders_of(store).committed()


def test_nothing_is_written_to_a_file_that_was_moved_away_and_none_is_made_in_its_place(orders, orders_of, path):
    orders.add(b"before")
    away = path.with_name("away.db")
    move(path, away)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"was moved, deleted or replaced while it was open"):
            orders.add(b"lost")
        with pytest.raises(StoreUnavailable, match=r"was moved, deleted or replaced while it was open"):
            orders.values()
    assert not path.exists()
    assert values_at(away, orders_of) == [b"before"]
    move(away, path)
    orders.add(b"after")
    assert values_at(path, orders_of) == [b"before", b"after"]


def test_a_file_that_was_put_in_its_place_is_the_one_that_is_written_and_read(orders, orders_of, path):
    orders.add(b"before the backup")
    backup = path.with_name("backup.db")
    back_up(path, backup)
    orders.add(b"not in the backup")
    away = path.with_name("away.db")
    move(path, away)
    move(backup, path)
    with pytest.raises(StoreUnavailable):
        orders.add(b"not done")
    orders.add(b"behind it")
    assert orders.committed() == values_at(path, orders_of) == [b"before the backup", b"behind it"]
    assert values_at(away, orders_of) == [b"before the backup", b"not in the backup"]


def test_the_log_of_the_file_in_its_place_is_moved_into_it_again(orders, path):
    """The connections that do so are kept, and had the other file open."""
    log = Path(f"{path}-wal")
    for _ in range(2 * WAL_BYTES_DUE // 100_000):
        orders.add(bytes(100_000))
    assert orders.store.engine.checkpointer._kept
    backup = path.with_name("backup.db")
    back_up(path, backup)
    move(path, path.with_name("away.db"))
    move(backup, path)
    with pytest.raises(StoreUnavailable):
        orders.add(b"not done")
    for _ in range(3 * WAL_BYTES_DUE // 100_000):
        orders.add(bytes(100_000))
    assert log.stat().st_size < 2 * WAL_BYTES_DUE


def test_who_waits_for_news_hears_of_the_file_in_its_place(orders, path):
    with closing(orders.store.waiter()) as waiter:
        waiter.wait(0)
        backup = path.with_name("backup.db")
        back_up(path, backup)
        move(path, path.with_name("away.db"))
        assert waiter.rows(ONE, {}) is None
        assert waiter.wait(PATIENCE_MS)
        # No look of its makes a file.
        assert not waiter.wait(0)
        assert not path.exists()
        move(backup, path)
        waiter.wait(PATIENCE_MS)
        assert waiter.rows(ONE, {}) == [(1,)]
        # An application's commit comes without a stamp.
        with closing(sqlite3.connect(path)) as application:
            application.execute("CREATE TABLE accounts (name TEXT)")
        assert waiter.wait(PATIENCE_MS)


def test_what_clients_report_as_delivered_is_in_the_file_at_its_path(txnstore_sqlite_url, path):
    settings = {"bootstrap.servers": txnstore_sqlite_url}
    reports = []

    def produce(producer, value):
        producer.produce("t", value, on_delivery=lambda error, message: reports.append((error, message.value())))
        assert producer.flush(PATIENCE_SECONDS) == 0

    with (
        Producer(settings) as producer,
        Producer(settings | {"transactional.id": "shop"}) as transactional,
        Consumer(settings | {"group.id": "readers", "auto.offset.reset": "earliest"}) as consumer,
    ):
        transactional.init_transactions(PATIENCE_SECONDS)
        produce(producer, b"first")
        consumer.subscribe(["t"])
        assert value_of(consumer.poll(PATIENCE_SECONDS)) == b"first"
        found = []
        # It waits for news of the file that is about to go.
        reader = threading.Thread(target=lambda: found.append(consumer.poll(PATIENCE_SECONDS)))
        reader.start()
        backup = path.with_name("backup.db")
        back_up(path, backup)
        move(path, path.with_name("away.db"))
        move(backup, path)
        produce(producer, b"second")
        reader.join()
        assert value_of(found[0]) == b"second"
        with transactional.transaction():
            transactional.produce("t", b"third")
        assert value_of(consumer.poll(PATIENCE_SECONDS)) == b"third"
    assert reports == [(None, b"first"), (None, b"second")]
    with Consumer(settings | {"group.id": "others", "auto.offset.reset": "earliest"}) as consumer:
        consumer.subscribe(["t"])
        assert [value_of(consumer.poll(PATIENCE_SECONDS)) for _ in range(3)] == [b"first", b"second", b"third"]
