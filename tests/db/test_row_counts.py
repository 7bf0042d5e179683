"""Writes that must hit their rows: one that misses is an error, and nothing of its database transaction stays."""

from __future__ import annotations

import pytest
from sqlalchemy import delete, func, select

from txnstore.db.schema import partition_heads, producer_states, record_batches
from txnstore.db.store import RowsMissedError, Store
from txnstore.log.append import Append, place_all, producers_of
from txnstore.log.codec import encode
from txnstore.log.locked_partitions import LockedPartitions
from txnstore.log.partition_rows import Head, save_heads
from txnstore.log.topics import create_topic
from txnstore.model import ProducerIdentity, Record


def batches(partition_ids, first):
    return [
        Append(
            partition_id,
            encode([Record(b"a")], producer=ProducerIdentity(7, 0), base_sequence=first, is_transactional=True),
        )
        for partition_id in partition_ids
    ]


def test_an_append_whose_producer_is_gone_under_it_is_an_error_and_not_a_hidden_transaction(store: Store) -> None:
    partition_ids = store.write(lambda c: create_topic(c, "orders", partition_count=3)).partition_ids

    def append_and_lose(connection, first, lost) -> None:
        appends = batches(partition_ids, first)
        work = LockedPartitions.lock(connection, producers_of(appends))
        place_all(work, appends, coordinated=True)
        connection.execute(delete(producer_states).where(producer_states.c.partition_id == lost))
        work.save()

    count = select(func.count()).select_from(record_batches)
    store.write(lambda connection: append_and_lose(connection, 0, -1))
    # Of several rows that one statement writes, whichever is the one.
    for lost in partition_ids:
        with pytest.raises(RowsMissedError, match=r"producer_states hit 2 rows where 3 were to be hit"):
            store.write(lambda connection, lost=lost: append_and_lose(connection, 1, lost))
    assert store.read(lambda connection: connection.execute(count).scalar_one()) == 3
    store.write(lambda connection: append_and_lose(connection, 1, -1))


def test_a_head_that_is_gone_is_an_error(store: Store) -> None:
    (partition_id,) = store.write(lambda c: create_topic(c, "orders")).partition_ids

    def lose(connection) -> None:
        connection.execute(delete(partition_heads))
        save_heads(connection, [Head(partition_id, 0, 1, 1, 1)])

    with pytest.raises(RowsMissedError, match="partition_heads hit 0 rows"):
        store.write(lose)
