"""This file is the checker of a cluster: each database by itself, their coordinators together, and the copies.

It reads one database after the other, so nobody may be at work meanwhile; what is half done may be.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from sqlalchemy import select

from txnstore.db.cluster.catalogue import read_catalogue
from txnstore.db.cluster.cluster import Cluster
from txnstore.db.schema import partition_heads, partitions
from txnstore.testing.log_invariants import partition_violations
from txnstore.testing.transaction_invariants import rest_violations, violations_of_several
from txnstore.testing.violations import Invariant, Violation

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
