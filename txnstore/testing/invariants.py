"""The checker of a store, and of a cluster: reads all of it and names each invariant that does not hold.

It looks at tables only and asks nobody what has happened, so a store may be checked at any moment: while others write,
after a crash, after a recovery. A cluster is read one database after the other, so nobody may be at work meanwhile;
what is half done may be. What clients were told is not known here; that is for the test to compare.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from typing import Final

from sqlalchemy import Connection, select, union

from txnstore.db.cluster.catalogue import read_catalogue
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.schema import partition_heads, partitions
from txnstore.db.store import Store
from txnstore.testing.log_invariants import partition_violations
from txnstore.testing.transaction_invariants import rest_violations, transaction_violations, violations_of_several
from txnstore.testing.violations import Invariant, Violation

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
    """Return each violation of an invariant; a store that is in order has no violations.

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


_OWN: Final = select(partitions.c.partition_id, partitions.c.leader_database_id)
_HEADS: Final = select(partition_heads.c.partition_id)


def assert_cluster_sound(
    cluster: Cluster, *, at_rest: bool = False, copies: bool = True, producers_expire: bool = False
) -> None:
    """Return if the cluster is as `cluster_violations` wants it.

    Raises:
        AssertionError: it is not; the text names each violated invariant.
    """
    found = cluster_violations(cluster, at_rest=at_rest, copies=copies, producers_expire=producers_expire)
    assert not found, "\n".join(["the cluster breaks its invariants:", *map(str, found)])


def cluster_violations(
    cluster: Cluster, *, at_rest: bool = False, copies: bool = True, producers_expire: bool = False
) -> list[Violation]:
    """Return each violation; with `at_rest` nothing may be open or half done, with `copies` they are up to date.

    With `producers_expire` a partition may have forgotten what a producer wrote before it went silent.
    """
    found: list[Violation] = []
    stores = [cluster.own(member.database_id) for member in cluster.databases]
    with ExitStack() as stack:
        connections = [stack.enter_context(store.engine.connect()) for store in stores]
        for store, connection in zip(stores, connections, strict=True):
            for partition_id in connection.execute(_HEADS).scalars().all():
                found += partition_violations(connection, partition_id, producers_expire=producers_expire)
            if at_rest:
                found += rest_violations(connection)
            if copies:
                found += _copy_violations(cluster, store.database_id)
        found += violations_of_several(connections)
    return found


def _copy_violations(cluster: Cluster, database_id: int) -> list[Violation]:
    store, label = cluster.own(database_id), cluster.label_of(database_id)
    wanted = cluster.controller.read(read_catalogue)
    present = store.read(read_catalogue)
    found = [
        Violation(Invariant.COPIES_CURRENT, f"the database {label!r} has other {name} than the controller")
        for name, rows in wanted.rows.items()
        if present.rows[name] != rows
    ]
    own = {row[0] for row in store.read(lambda connection: connection.execute(_OWN).all()) if row[1] == database_id}
    heads = set(store.read(lambda connection: connection.execute(_HEADS).scalars().all()))
    if own != heads:
        found.append(
            Violation(Invariant.COPIES_CURRENT, f"the database {label!r} has the heads {heads}, and {own} live there")
        )
    return found
