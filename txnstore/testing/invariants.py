"""This file is the checker of a store: reads all of it in one snapshot and names each invariant that does not hold.

It looks at tables only and asks nobody what has happened, so it may be run at any moment: while others write, after a
crash, after a recovery. It does not know what clients were told; that is for the test to compare.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from sqlalchemy import Connection, select, union

from txnstore.db.schema import partition_heads, partitions
from txnstore.db.store import Store
from txnstore.testing.log_invariants import partition_violations
from txnstore.testing.transaction_invariants import rest_violations, transaction_violations
from txnstore.testing.violations import Violation

_PARTITION_IDS: Final = union(select(partitions.c.partition_id), select(partition_heads.c.partition_id))


def assert_sound(store: Store, *, at_rest: bool = False, partition_ids: Collection[int] | None = None) -> None:
    """Return if the store is as `find_violations` wants it.

    Raises:
        AssertionError: it is not; the text names each violated invariant.
    """
    found = find_violations(store, at_rest=at_rest, partition_ids=partition_ids)
    assert not found, "\n".join(["the store breaks its invariants:", *map(str, found)])


def find_violations(
    store: Store,
    *,
    at_rest: bool = False,
    partition_ids: Collection[int] | None = None,
    producers_expire: bool = False,
) -> list[Violation]:
    """Return each violation of an invariant; none is there in a store that is in order.

    With `at_rest` nothing may be open, pending or half done either, as after a recovery when no client is at work.
    `partition_ids` are the partitions whose logs are read, all by default; the coordinator's tables are always read.
    Logs must begin at their first record: what retention or compaction took is missed.  With `producers_expire`
    a partition may have forgotten what a producer wrote before it went silent.
    """
    return store.read(
        lambda connection: violations_on(
            connection, at_rest=at_rest, partition_ids=partition_ids, producers_expire=producers_expire
        )
    )


def violations_on(
    connection: Connection,
    *,
    at_rest: bool = False,
    partition_ids: Collection[int] | None = None,
    producers_expire: bool = False,
) -> list[Violation]:
    """Return the same, as the database transaction sees it that is open on `connection`."""
    if partition_ids is None:
        partition_ids = connection.execute(_PARTITION_IDS).scalars().all()
    found = [
        violation
        for number in sorted(partition_ids)
        for violation in partition_violations(connection, number, producers_expire=producers_expire)
    ]
    found.extend(transaction_violations(connection))
    if at_rest:
        found.extend(rest_violations(connection))
    return found
