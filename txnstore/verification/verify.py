"""The verification of a store and of a cluster: all rules, in snapshots of what they compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from sqlalchemy import Connection

from txnstore.db.cluster.cluster import Cluster
from txnstore.db.row_security import check_sees_store
from txnstore.db.store import Store
from txnstore.db.url import DatabaseUrl
from txnstore.verification.branches import branch_violations
from txnstore.verification.catalogue import (
    HEAD_IDS,
    PARTITION_IDS,
    copy_violations,
    deletion_violations,
    exists,
    placement_violations,
    setting_violations,
    topic_violations,
    with_topics,
)
from txnstore.verification.indexes import index_violations
from txnstore.verification.invariants import Invariant, Place, Violation
from txnstore.verification.journal import decision_violations
from txnstore.verification.membership import group_violations
from txnstore.verification.numbers import number_violations
from txnstore.verification.open_transactions import fence_violations, open_violations, rest_violations
from txnstore.verification.outbox import Waiting, outbox_violations
from txnstore.verification.partitions import Proven, partition_violations
from txnstore.verification.progress import progress_violations
from txnstore.verification.reading import Snapshot, in_snapshots, some_of
from txnstore.verification.tables import table_violations

#: What is compared between databases: clients at work leave something else at the same place in each look.
_BETWEEN_DATABASES: Final = {
    Invariant.DECISION_STANDS,
    Invariant.OFFSETS_TOLD,
    Invariant.ALL_OR_NOTHING,
    Invariant.PARTICIPANTS_KNOWN,
    Invariant.OUTBOX_RIGHT,
    Invariant.NOTHING_HANGS,
}
#: How often a watch reads again what it has proven.
READ_AGAIN_SECONDS: Final = 86_400.0


def coordinator_violations(snapshot: Snapshot) -> Iterator[Violation]:
    """Return what is wrong with the coordinator's tables, and with what must agree with them."""
    yield from decision_violations(snapshot)
    yield from open_violations(snapshot)
    yield from group_violations(snapshot)


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
        partition_ids = PARTITION_IDS.values(connection)
    snapshot = Snapshot((connection,))
    found: list[Violation] = []
    for number in sorted(partition_ids):
        found += partition_violations(connection, number, producers_expire=producers_expire)
    found += some_of(topic_violations(connection))
    found += some_of(deletion_violations(connection))
    found += some_of(progress_violations(connection))
    found += some_of(setting_violations(connection))
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
    """Return the same, in one snapshot of the store."""
    return store.read(
        lambda connection: violations_on(
            connection, at_rest=at_rest, partition_ids=partition_ids, producers_expire=producers_expire
        )
    )


def cluster_violations(
    cluster: Cluster,
    *,
    at_rest: bool = False,
    copies: bool = True,
    producers_expire: bool = False,
    proven: dict[int, Proven] | None = None,
) -> list[Violation]:
    """Return each violation; with `at_rest` nothing may be open or half done, with `copies` they are up to date.

    The databases have no moment in common: nobody may be at work meanwhile.
    """
    members = cluster.databases

    def work(connections: Sequence[Connection]) -> list[Violation]:
        found: list[Violation] = []
        for member, connection in zip(members, connections, strict=True):
            of_member: list[Violation] = []
            for number in sorted(HEAD_IDS.values(connection)):
                of_member += partition_violations(connection, number, producers_expire=producers_expire, proven=proven)
            if at_rest:
                of_member += some_of(rest_violations(Snapshot((connection,))))
            of_member += some_of(deletion_violations(connection))
            of_member += some_of(progress_violations(connection))
            of_member += some_of(fence_violations(connection, member.database_id))
            if connection is connections[0]:
                of_member += some_of(topic_violations(connection))
                of_member += some_of(setting_violations(connection))
            if copies:
                of_member += copy_violations(connections[0], connection, member.database_id)
                of_member += some_of(placement_violations(connection))
            found += [violation.in_database(member.label) for violation in of_member]
        found += some_of(coordinator_violations(Snapshot(connections, of_several=True)))
        return with_topics(connections[0], found)

    return in_snapshots([cluster.own(member.database_id) for member in members], work)


@dataclass
class WatchState:
    """What is known from one look to the next."""

    proven: dict[int, Proven] = field(default_factory=dict)
    """Of partitions, by their ids: what lies below is not read again."""

    waiting: dict[int, Waiting] = field(default_factory=dict)
    """Of the outboxes, by the numbers of their databases."""

    sound_indexes: set[int] = field(default_factory=set)
    """The numbers of databases whose indexes were found right: to compare them reads everything once more."""

    since_seconds: float = field(default_factory=time.monotonic)
    """When the first of these looks began."""

    def forget_proofs_if_old(self, now_seconds: float) -> None:
        """Let everything be read again once a day: what was written well may not have stayed so."""
        if now_seconds - self.since_seconds >= READ_AGAIN_SECONDS:
            self.proven.clear()
            self.sound_indexes.clear()
            self.since_seconds = now_seconds


def verify(
    cluster: Cluster,
    *,
    participants: Sequence[DatabaseUrl] = (),
    watch: WatchState | None = None,
    told: Callable[[int, int], None] | None = None,
) -> list[Violation]:
    """Return each violation of a store, or of a cluster, beside clients that may be at work.

    Of a store alone each partition is read in a snapshot of its own, so that none is held open for as long as all of
    them take; `told` hears how many were read, and of how many.  The databases of a cluster have no moment in common:
    what only one of two looks in a row has found, clients have done between two databases.
    The databases at `participants` are asked for branches.  With `watch`, which is kept from one look to the next, only
    what is new in partitions is read.

    Raises:
        PermissionDenied: this role lacks a right, or row-level security shows it a part of the store.
        TxnStoreError: one of the databases refused or cannot be reached.
    """
    watch = watch or WatchState()
    now_seconds = time.monotonic()
    watch.forget_proofs_if_old(now_seconds)
    for member in cluster.databases:
        _check_shown(cluster.own(member.database_id))
    if cluster.is_alone:
        found = _verify_alone(cluster.controller, watch, told)
    else:
        before = set(watch.proven)
        found = cluster_violations(cluster, producers_expire=True, proven=watch.proven)
        # What a partition shows against its proof is seen in one snapshot, and gone with the proof in the next look.
        unproven = before - watch.proven.keys()
        # It reads on from what the first one has proven, and all only where that has found something.  Not by a copy:
        # the replays in it would be ahead of the original.
        again = found and cluster_violations(cluster, producers_expire=True, proven=watch.proven)
        lasting = set(map(_name_of, again))
        found = [each for each in found if _name_of(each) in lasting or each.place.partition_id in unproven]
    for member in cluster.databases:
        store = cluster.own(member.database_id)
        waiting = watch.waiting.setdefault(member.database_id, Waiting())
        of_member = branch_violations(store, participants)
        if member.database_id not in watch.sound_indexes:
            of_indexes = index_violations(store)
            of_member += of_indexes
            if not of_indexes:
                watch.sound_indexes.add(member.database_id)
        of_member += store.read(partial(table_violations, store))
        of_member += store.read(partial(number_violations, store, is_alone=cluster.is_alone))
        of_member += store.read(lambda connection: list(outbox_violations(connection, waiting, now_seconds)))  # noqa: B023 - it runs at once
        found += of_member if cluster.is_alone else [each.in_database(member.label) for each in of_member]
    return found


def verify_store(store: Store, *, told: Callable[[int, int], None] | None = None) -> list[Violation]:
    """Return the same of a store that is known to be alone, but for what shows only in a second look.

    Raises:
        PermissionDenied: see `verify`.
        TxnStoreError: the database refused or cannot be reached.
    """
    _check_shown(store)
    found = _verify_alone(store, WatchState(), told) + branch_violations(store) + index_violations(store)
    found += store.read(partial(table_violations, store))
    return found + store.read(partial(number_violations, store))


def _check_shown(store: Store) -> None:
    """Refuse to call a store damaged, or sound, by what a part of it says."""
    store.read(lambda connection: check_sees_store(store, connection, "the store is sound"))


def _name_of(violation: Violation) -> tuple[Invariant, Place, str]:
    """Return what is the same in two looks at one violation, and at no other one."""
    is_between = violation.invariant in _BETWEEN_DATABASES
    return violation.invariant, violation.place, violation.seen if is_between else ""


def _verify_alone(store: Store, watch: WatchState, told: Callable[[int, int], None] | None) -> list[Violation]:
    partition_ids = store.read(PARTITION_IDS.values)
    for gone in watch.proven.keys() - set(partition_ids):
        del watch.proven[gone]
    found: list[Violation] = []
    for number, partition_id in enumerate(sorted(partition_ids)):
        found += store.read(partial(_verify_partition, partition_id, watch.proven))
        if told is not None:
            told(number + 1, len(partition_ids))
    return found + store.read(partial(violations_on, partition_ids=()))


def _verify_partition(partition_id: int, proven: dict[int, Proven], connection: Connection) -> list[Violation]:
    if not exists(connection, partition_id):
        # Its topic was deleted meanwhile.
        return []
    found = partition_violations(connection, partition_id, producers_expire=True, proven=proven)
    return with_topics(connection, found)
