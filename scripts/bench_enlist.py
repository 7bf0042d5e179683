"""What it costs to share a commit: with the records by enlist(), with the consumed offsets by commit(connection=)."""

# ruff: noqa: S608 - what stands in these statements are constants of these files

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.bench_support import VALUE, Bench, Raw, Result
from txnstore import Consumer, Producer, TopicPartition
from txnstore.log.topics import ensure_topic

TRANSACTIONS = 100
PATIENCE_SECONDS = 30.0
#: What is asked of a small transaction without enlist() too.
REACH = 2.0


class Application:
    """An application with a table of its own, and tables like ours to write the same rows by hand."""

    def __init__(self, raw: Raw, name: str) -> None:
        """Make the tables."""
        self._raw = raw
        self._name = name
        self._next_id = 0
        self._lock = "" if raw.is_sqlite else " FOR UPDATE"
        raw.run(f"CREATE TABLE {name}_ledger (id INTEGER PRIMARY KEY, entry BLOB)")
        raw.run(f"CREATE TABLE {name}_log (id INTEGER PRIMARY KEY, value BLOB)")
        raw.run(f"CREATE TABLE {name}_state (id INTEGER PRIMARY KEY, epoch BIGINT)")
        for number in range(4):
            raw.run(f"INSERT INTO {name}_state VALUES ({number}, 0)")

    def insert_entry(self) -> None:
        """Insert the application's row; the database transaction stays open."""
        self._next_id += 1
        self._raw.run(f"INSERT INTO {self._name}_ledger VALUES (?, ?)", (self._next_id, VALUE))

    def write_transaction(self) -> None:
        """Write the rows of a transaction of one record and one offset."""
        for state in range(4):  # the transaction, the head, the producer, the group
            self._raw.run(f"SELECT epoch FROM {self._name}_state WHERE id = ?{self._lock}", (state,)).fetchone()
        for record in range(4):  # the record, its marker, the index of ended transactions, the journal
            row = (4 * self._next_id + record, VALUE if record == 0 else b"")
            self._raw.run(f"INSERT INTO {self._name}_log VALUES (?, ?)", row)
        for state in range(4):
            self.move(state)

    def move(self, state: int) -> None:
        """Update one of the rows that say how things stand."""
        self._raw.run(f"UPDATE {self._name}_state SET epoch = ? WHERE id = ?", (self._next_id, state))

    @property
    def connection(self) -> Any:
        """The driver's connection."""
        return self._raw.connection

    def begin(self) -> None:
        """Begin, so that SQLite's write lock is taken at once."""
        self._raw.run("BEGIN IMMEDIATE" if self._raw.is_sqlite else "BEGIN")

    def commit(self) -> None:
        """Commit."""
        self._raw.run("COMMIT")


def bench_enlist(bench: Bench) -> Iterator[Result]:
    """One row, one record and one offset in a transaction, against the same rows by hand."""
    application, plain = Application(bench.raw, "enlisted"), Application(bench.raw, "plain_enlisted")
    bench.store.write(lambda connection: ensure_topic(connection, "bench-enlist"))
    consumer = Consumer({"bootstrap.servers": bench.url, "group.id": "bench-enlist", "enable.auto.commit": False})
    metadata = consumer.consumer_group_metadata()
    with Producer({"bootstrap.servers": bench.url, "transactional.id": "bench-enlist"}) as producer:
        producer.init_transactions(PATIENCE_SECONDS)

        def ours(*, enlisted: bool = True) -> None:
            for number in range(TRANSACTIONS):
                application.begin()
                producer.begin_transaction()
                if enlisted:
                    producer.enlist(application.connection)
                application.insert_entry()
                if not enlisted:
                    application.commit()
                producer.produce("bench-enlist", VALUE, partition=0)
                position = TopicPartition("bench-enlist", 0, number)
                producer.send_offsets_to_transaction([position], metadata, PATIENCE_SECONDS)
                producer.commit_transaction(PATIENCE_SECONDS)

        def by_hand() -> None:
            for _ in range(TRANSACTIONS):
                plain.begin()
                plain.insert_entry()
                plain.write_transaction()
                plain.commit()

        seconds = bench.compare(ours, by_hand)
        what = ("row, record and offset in one commit: enlist()", "the same rows by hand")
        yield bench.latency(what, TRANSACTIONS, seconds, reach=REACH)
        seconds = bench.compare(ours, lambda: ours(enlisted=False))
        what = ("the same", "the row and the transaction in commits of their own")
        yield bench.latency(what, TRANSACTIONS, seconds, reach=1.0)
    consumer.close()


def bench_commit_on_connection(bench: Bench) -> Iterator[Result]:
    """One row and the offset in the application's own commit, against the same by hand."""
    application, plain = Application(bench.raw, "committed"), Application(bench.raw, "plain_committed")
    bench.store.write(lambda connection: ensure_topic(connection, "bench-commit"))
    consumer = Consumer({"bootstrap.servers": bench.url, "group.id": "bench-commit", "enable.auto.commit": False})

    def ours() -> None:
        for number in range(TRANSACTIONS):
            application.begin()
            application.insert_entry()
            consumer.commit(offsets=[TopicPartition("bench-commit", 0, number)], connection=application.connection)
            application.commit()

    def by_hand() -> None:
        for _ in range(TRANSACTIONS):
            plain.begin()
            plain.insert_entry()
            # The group's row, the offset's row.
            plain.move(0)
            plain.move(1)
            plain.commit()

    what = ("row and offset in one commit: commit(connection=)", "the same rows by hand")
    yield bench.latency(what, TRANSACTIONS, bench.compare(ours, by_hand), reach=REACH)
    consumer.close()


BENCHES = (bench_enlist, bench_commit_on_connection)
