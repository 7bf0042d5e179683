"""The verification of a store and of a cluster: all rules, in snapshots of what they compare."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from sqlalchemy import Connection

from txnstore.db.cluster.cluster import Cluster
from txnstore.db.store import Store
from txnstore.verification.catalogue import HEAD_IDS, PARTITION_IDS, copy_violations, exists, with_topics
from txnstore.verification.invariants import Violation
from txnstore.verification.journal import decision_violations
from txnstore.verification.open_transactions import open_violations, rest_violations
from txnstore.verification.partitions import partition_violations
from txnstore.verification.reading import Snapshot, in_snapshots, some_of


def coordinator_violations(snapshot: Snapshot) -> Iterator[Violation]:
    """Return what is wrong with the coordinator's tables, and with what must agree with them."""
    yield from decision_violations(snapshot)
    yield from open_violations(snapshot)


def violations_on(
    connection: Connection,
    *,
    at_rest: bool = False,
    partition_ids: Collection[int] | None = None,
    producers_expire: bool = False,
) -> list[Violation]:
    """Return each violation in one store, as the database transaction sees it that is open on `connection`.

    With `at_rest` nothing may be open, pending or half done either, as after a recovery when no client is at work.
    `partition_ids` are the partitions whose logs are read, all by default; the coordinator's tables are always read.
    With `producers_expire` a partition may have forgotten what a producer wrote before it went silent.
    """
    if partition_ids is None:
        partition_ids = connection.execute(PARTITION_IDS).scalars().all()
    snapshot = Snapshot((connection,))
    found: list[Violation] = []
    for number in sorted(partition_ids):
        found += partition_violations(connection, number, producers_expire=producers_expire)
    found += some_of(coordinator_violations(snapshot))
    if at_rest:
        found += some_of(rest_violations(snapshot))
    return with_topics(connection, found)


def find_violations(
    store: Store,
    *,
    at_rest: bool = False,
    partition_ids: Collection[int] | None = None,
    producers_expire: bool = False,
) -> list[Violation]:
    """Return the same, in one snapshot of the store.

    Raises:
        TxnStoreError: the database refused or cannot be reached.
    """
    return store.read(
        lambda connection: violations_on(
            connection, at_rest=at_rest, partition_ids=partition_ids, producers_expire=producers_expire
        )
    )


def cluster_violations(
    cluster: Cluster, *, at_rest: bool = False, copies: bool = True, producers_expire: bool = False
) -> list[Violation]:
    """Return each violation; with `at_rest` nothing may be open or half done, with `copies` they are up to date.

    The databases have no moment in common: nobody may be at work meanwhile.

    Raises:
        TxnStoreError: one of the databases refused or cannot be reached.
    """
    members = cluster.databases

    def work(connections: Sequence[Connection]) -> list[Violation]:
        found: list[Violation] = []
        for member, connection in zip(members, connections, strict=True):
            of_member: list[Violation] = []
            for number in sorted(connection.execute(HEAD_IDS).scalars()):
                of_member += partition_violations(connection, number, producers_expire=producers_expire)
            if at_rest:
                of_member += some_of(rest_violations(Snapshot((connection,))))
            if copies:
                of_member += copy_violations(connections[0], connection, member.database_id)
            found += [violation.in_database(member.label) for violation in of_member]
        found += some_of(coordinator_violations(Snapshot(connections, of_several=True)))
        return with_topics(connections[0], found)

    return in_snapshots([cluster.own(member.database_id) for member in members], work)


def verify(cluster: Cluster, *, told: Callable[[int, int], None] | None = None) -> list[Violation]:
    """Return each violation of a store, or of a cluster, beside clients that may be at work.

    Of a store alone each partition is read in a snapshot of its own, so that none is held open for as long as all of
    them take; `told` hears how many were read, and of how many.  The databases of a cluster have no moment in common:
    what only one of two looks in a row has found, clients have done between two databases.

    Raises:
        TxnStoreError: one of the databases refused or cannot be reached.
    """
    if cluster.is_alone:
        return _verify_alone(cluster.controller, told)
    found = cluster_violations(cluster, producers_expire=True)
    again = found and cluster_violations(cluster, producers_expire=True)
    lasting = {(violation.invariant, violation.place) for violation in again}
    return [violation for violation in found if (violation.invariant, violation.place) in lasting]


def _verify_alone(store: Store, told: Callable[[int, int], None] | None) -> list[Violation]:
    partition_ids = store.read(lambda connection: connection.execute(PARTITION_IDS).scalars().all())
    found: list[Violation] = []
    for number, partition_id in enumerate(sorted(partition_ids)):
        found += store.read(partial(_verify_partition, partition_id))
        if told is not None:
            told(number + 1, len(partition_ids))
    return found + store.read(partial(violations_on, partition_ids=()))


def _verify_partition(partition_id: int, connection: Connection) -> list[Violation]:
    if not exists(connection, partition_id):
        # Its topic was deleted meanwhile.
        return []
    return with_topics(connection, partition_violations(connection, partition_id, producers_expire=True))
