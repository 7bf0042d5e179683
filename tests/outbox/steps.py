"""Steps of the outbox's tests: what callers insert, and what readers find."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from txnstore.db.schema import outbox
from txnstore.db.store import Store
from txnstore.log.fetch import fetch
from txnstore.log.topics import find_topics
from txnstore.model import StoredRecord


@dataclass
class Caller:
    """Somebody with a database transaction of his own, who knows nothing of txnstore but its table."""

    connection: Any

    def insert(self, *values: bytes | None, topic: str = "t", **columns: Any) -> Caller:
        for value in values:
            self.insert_row(topic=topic, value=value, **columns)
        return self

    def insert_row(self, **columns: Any) -> None:
        is_sqlite = isinstance(self.connection, sqlite3.Connection)
        marks = ", ".join(["?" if is_sqlite else "%s"] * len(columns))
        table = "txnstore_outbox" if is_sqlite else "txnstore.outbox"
        self.connection.execute(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})", tuple(columns.values()))

    def commit(self) -> None:
        self.connection.commit()

    def rollback(self) -> None:
        self.connection.rollback()


def records(store: Store, *topics: str) -> list[list[StoredRecord]]:
    """Return what each partition of the topics (by default of "t") holds, all in one snapshot."""

    def work(connection: Connection) -> list[list[StoredRecord]]:
        found = find_topics(connection, topics or ("t",))
        if not found:
            return []
        positions = {partition_id: 0 for topic in found for partition_id in topic.partition_ids}
        held: dict[int, list[StoredRecord]] = {partition_id: [] for partition_id in positions}
        while True:
            pages = fetch(connection, positions)
            for partition_id, page in pages.items():
                for batch in page.batches:
                    held[partition_id].extend(batch.records(positions[partition_id]))
            moved = {partition_id: page.next_offset for partition_id, page in pages.items()}
            if moved == positions:
                return list(held.values())
            positions = moved

    return store.read(work)


def values(store: Store, topic: str = "t") -> list[bytes | None]:
    """Return the values of all partitions of the topic, one partition behind the other."""
    return [record.value for partition in records(store, topic) for record in partition]


def waiting(store: Store) -> int:
    """Return how many rows wait in the outbox."""
    return store.read(
        lambda c: c.execute(select(func.count()).select_from(outbox).where(outbox.c.refusal.is_(None))).scalar_one()
    )


def refusals(store: Store) -> dict[bytes | None, str]:
    """Return why rows cannot become records, by their values."""
    return store.read(
        lambda c: {
            row.value: row.refusal
            for row in c.execute(select(outbox.c.value, outbox.c.refusal).where(outbox.c.refusal.is_not(None)))
        }
    )
