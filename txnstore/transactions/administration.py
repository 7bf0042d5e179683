"""The calls of an administrator: they end what is open in a partition or holds a group's offsets, coordinated or not.

An administrator aborts what holds up the readers of a partition.  Kafka's tool writes an ABORT marker into the one
partition, whatever the coordinator knows: that is meant for transactions that hang, and tears apart one that does not.
Here a transaction that the coordinator knows is aborted as a whole, in all its partitions and groups; only what it does
not know gets a marker of its own.

A producer that its coordinator does not know is known to nobody any more, and will not be: a producer id is given out
once, its row is there before anything is written with it, and what the row knew went with an older state of that
database, or with a start that has ended the last transaction of it.  So who has seen what a producer wrote, and only
then finds that nobody knows it, may take it for lost whatever happens meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from sqlalchemy import BindParameter, Connection, bindparam, select, union_all

from txnstore.db.cluster.cluster import Cluster, LeftOut, several
from txnstore.db.cluster.locality import Locality
from txnstore.db.cluster.membership import coordinator_of_producer
from txnstore.db.identity import check_not_standby
from txnstore.db.portions import FOUND_MAX, Portions
from txnstore.db.row_security import check_sees_all
from txnstore.db.schema import transaction_log, transaction_writers, transactions
from txnstore.db.statements import HotStatement, is_listed
from txnstore.db.store import Store, chunks
from txnstore.errors import (
    InvalidProducerEpoch,
    InvalidTransactionState,
    OutcomeUnknown,
    StoreBusy,
    StoreUnavailable,
    TransactionCoordinatorFenced,
    TxnStoreError,
    WriteConflict,
)
from txnstore.groups.offsets_from_elsewhere import drop_offsets_of_lost, groups_held_for
from txnstore.log.locked_partitions import Marker, write_markers
from txnstore.log.partition_rows import ProducerKey, lock_heads, read_marked_producers
from txnstore.log.sequences import MarkedProducer
from txnstore.model import ControlType, ProducerIdentity
from txnstore.transactions import protocol, rows
from txnstore.transactions.outcome import only_owner
from txnstore.transactions.protocol import DECIDED, FenceReason, TransactionMetadata, TransactionState
from txnstore.transactions.recovery import (
    ABORTED_FIRST,
    ABORTED_MAX,
    ABORTED_MIN,
    HELD_SECONDS,
    abort_by_administrator,
    complete_each_if_possible,
    log_aborted,
    next_portion,
)
from txnstore.transactions.together import AbortedTogether, abort_shown_together, shares_of
from txnstore.transactions.transaction import LockedTransaction, complete_if_possible

#: How often many aborts wait in vain for somebody at work, or for the database, before the rest is left.
WAITS_MAX: Final = 3
_OWNER_OF_PRODUCER: Final = union_all(
    select(transactions.c.transactional_id).where(transactions.c.producer_id == bindparam("of_producer_id")),
    select(transaction_writers.c.transactional_id).where(
        transaction_writers.c.writer_producer_id == bindparam("of_producer_id")
    ),
)
#: So many producers are named in a message.
_NAMED_MAX: Final = 5
_IS_PRODUCER: Final = is_listed("of_producer_ids", transactions.c.producer_id)
_KNOWN_PRODUCERS: Final = HotStatement(
    union_all(
        select(transactions.c.producer_id).where(_IS_PRODUCER),
        select(transaction_writers.c.writer_producer_id).where(
            is_listed("of_producer_ids", transaction_writers.c.writer_producer_id)
        ),
    )
)
_IS_OF_PRODUCER: Final = is_listed("of_producer_ids", transaction_log.c.producer_id)
_BY_HAND: Final = HotStatement(
    select(transaction_log.c.transactional_id, transaction_log.c.transaction_number).where(
        _IS_OF_PRODUCER, transaction_log.c.reason == "administrator"
    )
)
# As numbers in the statement's text: SQLite takes no partial index for parameters.
_DECIDED_STATES: Final[BindParameter[Any]] = bindparam(
    "states", sorted(int(state) for state in DECIDED), expanding=True, literal_execute=True
)
# What nobody has yet, and somebody is about to get.
_NEXT_PRODUCERS: Final = (
    select(transactions.c.next_producer_id)
    .where(transactions.c.state.in_(_DECIDED_STATES))
    .where(transactions.c.next_producer_id.in_(bindparam("producer_ids", expanding=True)))
)


#: What says nothing of the transactions that meet it.
_OF_NONE: Final = (StoreUnavailable, StoreBusy, WriteConflict, OutcomeUnknown)


@dataclass(frozen=True, slots=True)
class OpenInPartition:
    """A transaction as a partition knows it: DescribeProducers shows these numbers."""

    partition_id: int
    producer: ProducerIdentity
    """The producer and the epoch of its records."""

    coordinator_epoch: int = 0


def abort_open_transaction(
    store: Store, target: OpenInPartition, cluster: Cluster | None = None, *, retry_timeout_ms: int | None = None
) -> None:
    """Abort the transaction that is open in a partition; its producer learns of it with its next request.

    Raises:
        UnknownTopicOrPartition: the partition is not in this database.
        InvalidTransactionState: the producer has no transaction open there, or it is decided to commit.
        InvalidProducerEpoch: the open transaction is of another epoch.
        TransactionCoordinatorFenced: the partition has a marker of a newer coordinator.
        PermissionDenied: the role lacks a right, or it sees no transaction of the producer and might not be shown it.
        StoreDamaged: several transactional ids say that they have the producer; nothing was changed.
        TxnStoreError: the database that coordinates the transaction cannot be reached or refuses.
    """
    others = several(cluster)
    coordinator = store if others is None else others.coordinator_of_producer(target.producer.producer_id)
    if coordinator is store:
        owner = store.write(
            # As it is then: it may hear of other databases in between.
            lambda connection: _abort_owner(store, target, Locality.of(store, cluster), connection),
            wakes_readers=True,
            retry_timeout_ms=retry_timeout_ms,
        )
    else:
        owner = _abort_elsewhere(store, coordinator, Locality.of(coordinator, cluster), target, retry_timeout_ms)
    if owner is not None:
        complete_if_possible(coordinator, cluster, owner)


def abort_open_transactions(store: Store, targets: Sequence[OpenInPartition], cluster: Cluster | None = None) -> int:
    """Abort many that are open in partitions of this database; return how many: those that are over are left out.

    Those that no coordinator knows get their markers by a few database transactions.

    Raises:
        TxnStoreError: as `abort_open_transaction`, of one of them; those before it are aborted.
    """
    portions = Portions(rows_max=ABORTED_MAX, held_seconds=HELD_SECONDS)
    count = 0
    left = targets
    while left:
        size = max(ABORTED_MIN, portions.rows)
        some, left = left[:size], left[size:]
        unknown = _unknown_to_coordinators(store, some, cluster)
        ended: Collection[OpenInPartition] = ()
        if unknown:
            work = partial(_end_in_partitions, unknown)
            ended = portions.write(store, work, wakes_readers=True, is_awaited=True)
        count += len(ended)
        for target in some:
            if target in ended:
                continue
            try:
                abort_open_transaction(store, target, cluster)
            except InvalidTransactionState:
                # Somebody else has ended it.
                continue
            count += 1
    return count


@dataclass(slots=True)
class AbortedAsShown:
    """What became of open transactions that somebody was shown, and wanted to be aborted."""

    aborted: int = 0
    left: int = 0
    """How many may be open all the same; the others had ended meanwhile."""

    error: TxnStoreError | AssertionError | None = None
    """Why one of them was left."""


def abort_shown_transactions(
    store: Store, shown: Sequence[TransactionMetadata], cluster: Cluster | None = None
) -> AbortedAsShown:
    """Abort many open transactions that somebody was shown, coordinated by this database.

    Their producers are told and may go on.  Those that have ended since are left as they are, and what their ids have
    begun after them.  A few database transactions do it, which hold their locks as briefly as for those that time out.
    What cannot be done now is repeated after the others, WAITS_MAX times in all.

    Raises:
        TxnStoreError: the database cannot be read; nothing was changed.
    """
    aborts = _ShownAborts(store, cluster, {row.transactional_id: row for row in shown})
    aborts.abort_each(aborts.abort_together())
    aborts.recognise()
    failed = aborts.failed
    return AbortedAsShown(len(aborts.aborted), len(failed), next(iter(failed.values()), None))


@dataclass(slots=True)
class _ShownAborts:
    """The aborts of many that were shown, and what becomes of each."""

    store: Store
    cluster: Cluster | None
    shown: Mapping[str, TransactionMetadata]
    aborted: set[str] = field(default_factory=set)
    failed: dict[str, TxnStoreError | AssertionError] = field(default_factory=dict)
    unsure: set[str] = field(default_factory=set)
    """The answers to their aborts were lost."""

    waits_left: int = WAITS_MAX

    def abort_together(self) -> list[str]:
        """Abort them in portions; return those that are to be aborted by themselves."""
        portions = Portions(rows_max=ABORTED_MAX, held_seconds=HELD_SECONDS)
        portions.rows = ABORTED_FIRST
        left: Sequence[str] = list(self.shown)
        shares = {
            name: share for page in chunks(left, FOUND_MAX) for name, share in shares_of(self.store, page).items()
        }
        alone: list[str] = []
        while left:
            some, left = next_portion(left, shares, max(ABORTED_MIN, portions.rows))
            try:
                work = partial(self._abort_some, some)
                done = portions.write(self.store, work, wakes_readers=True, is_awaited=True)
            except _OF_NONE as error:
                # Nothing of them is damaged, so one by one would wait as long for each.
                left = [*left, *some]
                if not self._may_go_on(some, error):
                    self.failed |= dict.fromkeys([*left, *alone], error)
                    return []
                continue
            except (TxnStoreError, AssertionError):
                # One of them is damaged: which, they tell one by one.
                done = AbortedTogether((), unusual=some)
            log_aborted(self.store, protocol.ADMINISTRATOR_DETAIL, *done.aborted)
            complete_each_if_possible(self.store, self.cluster, done.pending)
            self.aborted.update(done.aborted)
            alone += (*done.busy, *done.unusual)
        return alone

    def _abort_some(self, some: Sequence[str], connection: Connection) -> AbortedTogether:
        # As it is then: it may hear of other databases in between.
        locality = Locality.of(self.store, self.cluster)
        return abort_shown_together({name: self.shown[name] for name in some}, locality, connection)

    def abort_each(self, names: Sequence[str]) -> None:
        """Abort them one by one, each of which may wait for somebody at work on it."""
        for number, name in enumerate(names):
            try:
                if abort_by_administrator(self.store, name, cluster=self.cluster, shown=self.shown[name]):
                    self.aborted.add(name)
            except _OF_NONE as error:
                self.failed[name] = error
                if not self._may_go_on([name], error):
                    self.failed |= dict.fromkeys(names[number:], error)
                    return
            except (TxnStoreError, AssertionError) as error:
                self.failed[name] = error

    def _may_go_on(self, names: Sequence[str], error: TxnStoreError) -> bool:
        if isinstance(error, OutcomeUnknown):
            self.unsure.update(names)
        self.waits_left -= 1
        return self.waits_left > 0 and not isinstance(error, StoreUnavailable)

    def recognise(self) -> None:
        """Take those for aborted of which the journal says so where no answer did."""
        unsure = [self.shown[name] for name in sorted(self.unsure - self.aborted)]
        by_hand: set[tuple[str, int]] = set()
        # If it cannot be read, what became of them is as unknown as it was.
        with contextlib.suppress(TxnStoreError):
            for some in chunks(unsure, FOUND_MAX):
                of = _IS_OF_PRODUCER.parameters({row.producer_id for row in some})
                by_hand.update(map(tuple, self.store.read(partial(_BY_HAND.rows, parameters=of))))
        found = [row.transactional_id for row in unsure if (row.transactional_id, row.transaction_number) in by_hand]
        log_aborted(self.store, protocol.ADMINISTRATOR_DETAIL, *found)
        for name in found:
            complete_if_possible(self.store, self.cluster, name)
            self.failed.pop(name, None)
        self.aborted.update(found)


@dataclass(frozen=True, slots=True)
class LostOffsets:
    """What a producer holds of the offsets of groups that live in another database than its coordinator."""

    producer_id: int
    database_id: int
    """The database of the groups."""

    group_ids: tuple[str, ...]


def offsets_held_elsewhere(cluster: Cluster, producer_ids: Collection[int], left_out: LeftOut) -> list[LostOffsets]:
    """Return what transactions of these producers hold in groups, whether anybody will ever end them or not.

    Groups in the database of the coordinator are left out: what it knows of them is as old as they are.
    """
    if cluster.is_alone:
        return []
    found = [
        LostOffsets(producer_id, store.database_id, tuple(sorted(group_ids)))
        for store, held in cluster.read_all(partial(groups_held_for, producer_ids=producer_ids), left_out)
        for producer_id, group_ids in held.items()
    ]
    return [one for one in found if coordinator_of_producer(one.producer_id) != one.database_id]


def drop_lost_offsets(cluster: Cluster, held: Iterable[LostOffsets]) -> list[LostOffsets]:
    """Drop what producers hold of groups' offsets that no coordinator knows; return that: the rest is left as it is.

    What was found must be there before this is called, or it may be of a producer that has started since.

    Raises:
        StoreReadOnly: a coordinator is a standby, which may not have heard of the producer yet.
        PermissionDenied: the role lacks a right, or might not be shown the transaction of a producer.
        TxnStoreError: a database cannot be reached or refuses; what was dropped before stays so.
    """
    by_coordinator: dict[int, list[LostOffsets]] = {}
    for one in held:
        by_coordinator.setdefault(coordinator_of_producer(one.producer_id), []).append(one)
    lost: list[LostOffsets] = []
    for number, some in by_coordinator.items():
        coordinator = cluster.own(number)
        producer_ids = {one.producer_id for one in some}
        unknown = coordinator.read(partial(_producers_of_nobody, coordinator, producer_ids))
        lost += [one for one in some if one.producer_id in unknown]
    by_database: dict[int, list[LostOffsets]] = {}
    for one in lost:
        by_database.setdefault(one.database_id, []).append(one)
    for number, some in by_database.items():
        for first in range(0, len(some), ABORTED_MAX):
            groups_of = {one.producer_id: one.group_ids for one in some[first : first + ABORTED_MAX]}
            cluster.write_at(number, partial(drop_offsets_of_lost, held=groups_of), wakes_readers=True)
    return lost


def _unknown_to_coordinators(
    store: Store, targets: Sequence[OpenInPartition], cluster: Cluster | None
) -> list[OpenInPartition]:
    """Return those whose producers no transactional id has or will ever have."""
    others = several(cluster)
    by_coordinator: dict[int, list[OpenInPartition]] = {}
    for target in targets:
        number = store.database_id if others is None else coordinator_of_producer(target.producer.producer_id)
        by_coordinator.setdefault(number, []).append(target)
    unknown: list[OpenInPartition] = []
    for number, some in by_coordinator.items():
        coordinator = store if others is None else others.own(number)
        producer_ids = {target.producer.producer_id for target in some}
        of_nobody = coordinator.read(partial(_producers_of_nobody, coordinator, producer_ids))
        unknown += [target for target in some if target.producer.producer_id in of_nobody]
    return unknown


def _producers_of_nobody(coordinator: Store, producer_ids: Collection[int], connection: Connection) -> set[int]:
    """Return the producers that no transactional id of their coordinator has or will ever have.

    The one that a transactional id had before it got a new producer id is nobody's: see the head of this file.
    """
    unknown = set(producer_ids) - set(_KNOWN_PRODUCERS.values(connection, _IS_PRODUCER.parameters(producer_ids)))
    if unknown:
        check_not_standby(coordinator, connection)
        _check_of_nobody(coordinator, connection, unknown)
        unknown -= set(connection.execute(_NEXT_PRODUCERS, {"producer_ids": sorted(unknown)}).scalars())
    return unknown


def _end_in_partitions(targets: Sequence[OpenInPartition], connection: Connection) -> set[OpenInPartition]:
    """Write the markers that no coordinator will write; return for which: the others are looked at by themselves."""
    lock_heads(connection, {target.partition_id for target in targets})
    states = read_marked_producers(connection, [_key_of(target) for target in targets])
    ended: dict[ProducerKey, OpenInPartition] = {}
    for target in targets:
        try:
            _check_state(states.get(_key_of(target)), target)
        except TxnStoreError:
            continue
        ended[_key_of(target)] = target
    write_markers(connection, [_marker_of(target) for target in ended.values()])
    return set(ended.values())


def _abort_elsewhere(
    store: Store,
    coordinator: Store,
    locality: Locality | None,
    target: OpenInPartition,
    retry_timeout_ms: int | None,
) -> str | None:
    """Do the same where the partition lives in another database than the transaction; return the transactional id."""
    store.read(lambda connection: _check_open(connection, target), retry_timeout_ms=retry_timeout_ms)
    work = partial(_abort_owner, coordinator, target, locality)
    owner = coordinator.write(work, wakes_readers=True, retry_timeout_ms=retry_timeout_ms)
    if owner is None:
        store.write(
            lambda connection: _end_in_partition(connection, target),
            wakes_readers=True,
            retry_timeout_ms=retry_timeout_ms,
        )
    return owner


def _abort_owner(
    coordinator: Store, target: OpenInPartition, locality: Locality | None, connection: Connection
) -> str | None:
    """Abort the transaction at its coordinator, if it has one; return its transactional id.

    A partition of this database without one gets its marker here.
    """
    is_here = locality is None or not locality.partitions_elsewhere(connection, [target.partition_id])
    work = _lock_owner(coordinator, connection, target.producer.producer_id, locality)
    row = None if work is None else work.row

    def end_here() -> None:
        if is_here:
            _end_in_partition(connection, target)

    if work is None or row is None or row.begin_epoch != target.producer.epoch:
        end_here()
        return None
    participants = rows.participants_of(connection, row.transactional_id)
    is_own = row.producer_id == target.producer.producer_id
    partition_ids = participants.partition_ids if is_own else participants.writers.get(target.producer.producer_id, ())
    is_listed = target.partition_id in partition_ids
    if not is_own and not is_listed:
        # Damage: of a writer, nobody but this knows.
        end_here()
        return None
    # The lock of the transaction's row keeps its producer away; the heads are locked later, all in their order.
    if is_here:
        _check_open(connection, target)
    if row.state is TransactionState.ONGOING:
        if not is_listed:
            # Damage: it is aborted here as everywhere else.
            rows.add_partitions(connection, row.transactional_id, [target.partition_id])
        work.fence_and_abort(FenceReason.ADMIN, protocol.ADMINISTRATOR_DETAIL)
    elif not is_listed:
        end_here()
        return None
    elif row.state is TransactionState.PREPARE_COMMIT:
        raise InvalidTransactionState(
            f"the transaction of {row.transactional_id[:80]!r} is decided to commit; recovery will complete it"
        )
    else:
        work.finish()
    work.save("administrator")
    return row.transactional_id


def _lock_owner(
    coordinator: Store, connection: Connection, producer_id: int, locality: Locality | None
) -> LockedTransaction | None:
    """Lock the transaction of the producer, as whatever writer of it; None: nobody has it.

    StoreDamaged if several say that they have: with the wrong one, the right one would be ended in one partition alone.
    """
    owner = only_owner(connection.execute(_OWNER_OF_PRODUCER, {"of_producer_id": producer_id}).scalars(), producer_id)
    work = None if owner is None else LockedTransaction.lock(connection, owner, locality)
    if work is not None and work.row is not None:
        return work
    _check_of_nobody(coordinator, connection, [producer_id])
    return None


def _end_in_partition(connection: Connection, target: OpenInPartition) -> None:
    """Write the marker that no coordinator will write."""
    lock_heads(connection, [target.partition_id])
    _check_open(connection, target)
    write_markers(connection, [_marker_of(target)])


def _check_of_nobody(coordinator: Store, connection: Connection, producer_ids: Collection[int]) -> None:
    """Refuse to take the producers for unknown where the transaction of one may be hidden from this role."""
    some = ", ".join(map(str, sorted(producer_ids)[:_NAMED_MAX]))
    judgement = f"the transaction of producer {some} is owned by a transactional id, which will end it"
    check_sees_all(coordinator, connection, (transactions, transaction_writers), judgement, when_locking=True)


def _marker_of(target: OpenInPartition) -> Marker:
    # Above the epoch of the records, as every marker.
    identity = ProducerIdentity(target.producer.producer_id, target.producer.epoch + 1)
    return Marker(target.partition_id, identity, ControlType.ABORT, target.coordinator_epoch)


def _key_of(target: OpenInPartition) -> ProducerKey:
    return target.partition_id, target.producer.producer_id


def _check_open(connection: Connection, target: OpenInPartition) -> None:
    key = _key_of(target)
    _check_state(read_marked_producers(connection, [key]).get(key), target)


def _check_state(state: MarkedProducer | None, target: OpenInPartition) -> None:
    if state is None or state.transaction_first_offset is None:
        raise InvalidTransactionState(
            f"producer {target.producer.producer_id} has no open transaction in this partition;"
            " `txnstore transactions describe-producers` shows who has"
        )
    if state.epoch != target.producer.epoch:
        raise InvalidProducerEpoch(
            f"the open transaction of producer {target.producer.producer_id} is of epoch {state.epoch}, not"
            f" {target.producer.epoch}"
        )
    if target.coordinator_epoch < state.coordinator_epoch:
        raise TransactionCoordinatorFenced(
            f"the partition has a marker of coordinator epoch {state.coordinator_epoch}, newer than"
            f" {target.coordinator_epoch}"
        )
