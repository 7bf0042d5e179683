"""A coordinator as it was some time ago: what it knows of its transactional ids is put back, and the rest goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from sqlalchemy import Connection, delete, insert, select

from tests.cluster.conftest import Bench
from txnstore.db.schema import (
    pending_markers,
    transaction_groups,
    transaction_log,
    transaction_partitions,
    transactions,
)
from txnstore.db.store import Store
from txnstore.errors import OutcomeUnknown
from txnstore.model import ProducerIdentity
from txnstore.transactions.administration import (
    OpenInPartition,
    abort_open_transactions,
    drop_lost_offsets,
    offsets_held_elsewhere,
)
from txnstore.transactions.listing import HANGING_MARGIN_MS, hanging_in_cluster
from txnstore.transactions.open_transactions import each_held
from txnstore.transactions.recovery import recover
from txnstore.transactions.transaction import complete_decided

#: What a coordinator knows of its transactional ids, the tables that others refer to first.
TABLES: Final = (transactions, transaction_partitions, transaction_groups, transaction_log, pending_markers)


def backup_of(store: Store) -> Callable[[], None]:
    """Return what lets the store be as it is now again; only its producer ids go on, as they do by its age."""

    def read(connection: Connection) -> list[list[dict[str, Any]]]:
        return [
            [
                dict(row._mapping)
                for row in connection.execute(select(*(column for column in table.c if column.computed is None)))
            ]
            for table in TABLES
        ]

    kept = store.read(read)

    def put_back(connection: Connection) -> None:
        for table in reversed(TABLES):
            connection.execute(delete(table))
        for table, found in zip(TABLES, kept, strict=True):
            if found:
                connection.execute(insert(table), found)

    return lambda: store.write(put_back)


class Survivor:
    """A producer at work in the transaction after the one that its coordinator has gone back to."""

    def __init__(
        self, bench: Bench, *, in_same_partition: bool, is_decided: bool = False, everywhere: bool = False
    ) -> None:
        self.bench = bench
        self.producer = bench.producer_at(1)
        self.name = self.producer.transactional_id
        self.old, self.other = bench.partition_at(2), bench.partition_at(2, 1)
        self.open = self.old if in_same_partition else self.other
        self.group_id = bench.name_at(2, "group")
        self.producer.send(self.old, b"old")
        if is_decided:
            with bench.down(2), pytest.raises(OutcomeUnknown):
                self.producer.twin().end(commit=True)
            restore = backup_of(bench.cluster.own(1))
            self.producer.become(complete_decided(bench.cluster.own(1), self.name, bench.cluster))
        else:
            restore = backup_of(bench.cluster.own(1))
            self.producer.end(commit=True)
        self.producer.send(self.open, b"lost")
        if everywhere:
            self.producer.send(self.other, b"lost")
            self.producer.send_offsets(self.group_id, {self.old: 7})
        restore()

    def time_out(self) -> None:
        self.bench.clock.advance(60_001)
        recover(self.bench.cluster.own(1), self.bench.cluster)

    def read(self) -> list[bytes]:
        return [value for number in (self.old, self.other) for value in self.bench.read(number) if value is not None]


def end_what_hangs(bench: Bench) -> None:
    """As `txnstore transactions find-hanging --abort` does."""
    bench.clock.advance(1_000 + HANGING_MARGIN_MS)
    targets = [
        OpenInPartition(
            bench.topic.partition_ids[one.partition.partition], ProducerIdentity(one.producer_id, one.producer_epoch)
        )
        for one in hanging_in_cluster(bench.cluster, {}, 900)
    ]
    assert abort_open_transactions(bench.cluster.own(2), targets, bench.cluster) == len(targets)
    held = {one.producer_id for one in each_held(bench.cluster, {}) if one.is_hanging}
    drop_lost_offsets(bench.cluster, offsets_held_elsewhere(bench.cluster, held, {}))
