"""One transaction: its row is locked, steps follow, `save` writes; what is decided is completed in every database.

Within one database transaction, the steps are rules of `protocol` and change nothing but a `LockedTransaction`. `save`
does what follows from all of them in the order of locks that everybody keeps: the transaction's row (locked already),
the heads of partitions, then groups. So a small transaction whose records and offsets are still in a client's buffer is
appended, decided, marked and complete in one commit:

    work = LockedTransaction.lock(connection, "transfer-1")
    work.append(producer, appends)
    work.send_offsets(producer, committer, offsets)
    work.end(producer, commit=True)
    appended = work.save("EndTxn")

What a decision has left to other databases is delivered to them, in short database transactions that leave what is
missing in the tables, so the next client goes on where the last one stopped; recovery is this same code. Delivered
twice, a decision is there once, and one that comes so late that the next transaction has begun changes nothing of that:
markers and groups' offsets carry the epoch that the decision raised. So nobody holds a lock meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Self, TypeVar

from sqlalchemy import Connection
from sqlalchemy.util import memoized_property

from txnstore.db.cluster.cluster import Cluster, several
from txnstore.db.cluster.locality import Locality
from txnstore.db.cluster.membership import read_databases
from txnstore.db.store import Store, make_durable, note_change
from txnstore.errors import (
    ConcurrentTransactions,
    InvalidProducerIdMapping,
    InvalidRequest,
    NotCoordinator,
    OutcomeUnknown,
    TransactionAbortable,
    TxnStoreError,
    UnknownTopicOrPartition,
)
from txnstore.groups.offsets import (
    add_pending_offsets,
    commit_offsets,
    finish_pending_offsets,
    journal_text,
)
from txnstore.log.append import (
    Append,
    Appended,
    check_sizes,
    place_all,
    producers_of,
)
from txnstore.log.locked_partitions import LockedPartitions, Marker
from txnstore.log.partition_rows import allocate_producer_id
from txnstore.model import ClientProcess, GroupMembership, OffsetAndMetadata, ProducerIdentity
from txnstore.transactions import branch_rows, protocol, rows
from txnstore.transactions.delivery import Delivered, PendingDelivery, deliver, tell_outrun
from txnstore.transactions.protocol import (
    DECIDED,
    EndAction,
    FenceReason,
    TransactionMetadata,
    TransactionState,
    counted_writers,
)
from txnstore.transactions.rows import NO_PARTICIPANTS, Participants, markers_of

Result = TypeVar("Result")
#: The row that keeps the commits of a transaction group apart stands among those of transactional ids, by this name.
GROUP_ROW_PREFIX: Final = "txnstore.transaction.group:"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SentOffsets:
    """Consumed offsets of one group, by partition id, for a transaction to commit."""

    committer: GroupMembership
    offsets: Mapping[int, OffsetAndMetadata]


@dataclass(frozen=True, slots=True)
class InStore:
    """What a producer knows its open transaction to have in the store already, without what further writers have."""

    partition_ids: Collection[int] = ()
    group_ids: Collection[str] = ()

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.partition_ids or self.group_ids)


NOTHING_IN_STORE: Final = InStore()


@contextmanager
def fencing_other_starts(
    connection: Connection, row: TransactionMetadata | None, producer: ProducerIdentity
) -> Iterator[None]:
    """Let the producer of another start be told that it is fenced, as it is where the producer id stays the same.

    Over several databases each start has a producer id of its own: see `InitRequest.needs_new_producer_id`.

    Raises:
        ProducerFenced: the row has the producer id of another start.
    """
    try:
        yield
    except InvalidProducerIdMapping:
        if row is None or len(read_databases(connection)) == 1:
            raise
        raise protocol.fenced(row, producer) from None


@dataclass
class LockedTransaction:
    """Steps of one transactional id; nothing is written before `save`.

    A step raises what its rule in `protocol` does, and `save` what the log and the groups refuse.
    """

    connection: Connection
    before: TransactionMetadata | None
    now_ms: int
    _steps: list[TransactionMetadata] = field(default_factory=list)
    _appends: list[Append] = field(default_factory=list)
    _sent: list[SentOffsets] = field(default_factory=list)
    #: The decision that `save` carries out in all partitions and groups.
    _finishing: TransactionMetadata | None = None
    #: The further writers whose records count if it commits.
    _counted: frozenset[int] = frozenset()
    #: What lives in the coordinator's database, and what elsewhere; None: there are no other databases.
    _locality: Locality | None = None
    #: What was added without anything being written here.
    _added_partitions: set[int] = field(default_factory=set)
    _added_groups: set[str] = field(default_factory=set)
    #: The start of a producer that `save` writes down.
    _start: rows.Start | None = None
    #: The number of the commit that `save` writes, if there is one.
    _commit_number: int | None = None
    #: The offsets that take effect with it, by group and partition id.
    _committed_offsets: dict[str, dict[int, OffsetAndMetadata]] = field(default_factory=dict)

    @classmethod
    def lock(cls, connection: Connection, transactional_id: str, locality: Locality | None = None) -> Self:
        """Lock the coordinator's row until the database transaction ends.

        Without a `locality` everything that takes part lives in this database.
        """
        locked = rows.lock_row(connection, transactional_id)
        return cls(connection, locked.row, locked.now_ms, _locality=locality)

    @property
    def row(self) -> TransactionMetadata | None:
        """The row as it is after the steps so far."""
        return self._steps[-1] if self._steps else self.before

    @property
    def known(self) -> TransactionMetadata:
        """The row, which must be there.

        Raises:
            InvalidProducerIdMapping: nobody has used the transactional id, or it has expired.
        """
        row = self.row
        if row is None:
            raise InvalidProducerIdMapping
        return row

    def allocate(self) -> int:
        """Return a new producer id."""
        return allocate_producer_id(self.connection)

    def begin(self, producer: ProducerIdentity) -> None:
        """Let the producer's transaction be open, if it is not yet."""
        self._add(producer)

    def append(self, producer: ProducerIdentity, appends: Sequence[Append]) -> None:
        """Append batches of `producer` to the transaction, which begins with the first of them (KIP-890).

        Raises:
            InvalidRequest: a batch is not transactional or comes from another producer.
            RecordTooLarge: a batch is above its topic's max.message.bytes.
            TxnStoreError: see `protocol.add_to_transaction`.
        """
        check_batches(producer, appends)
        check_sizes(appends)
        self._add(producer)
        self._appends.extend(appends)

    def send_offsets(self, producer: ProducerIdentity, sent: SentOffsets) -> None:
        """Let the transaction hold consumed offsets of a group (AddOffsetsToTxn and TxnOffsetCommit)."""
        self._add(producer)
        self._sent.append(sent)

    def add(self, producer: ProducerIdentity, partition_ids: Iterable[int], group_ids: Iterable[str]) -> None:
        """Let partitions and groups of other databases take part (AddPartitionsToTxn, AddOffsetsToTxn)."""
        self._add(producer)
        self._added_partitions.update(partition_ids)
        self._added_groups.update(group_ids)

    def follow(self, transaction_group: str | None) -> None:
        """Wait until no other transaction of the group is being committed, and let none begin before this one is.

        The lock comes after that of the own row and before those of partitions: so who waits for it keeps nobody
        else from anything, and draws the number of its commit after those that went first.  The row has no transaction
        of its own; one that nobody commits by expires as others do, and is made again.
        """
        if transaction_group is None:
            return
        name = GROUP_ROW_PREFIX + transaction_group
        while not rows.touch_row(self.connection, name, self.now_ms):
            new = TransactionMetadata(
                transactional_id=name,
                producer_id=self.allocate(),
                producer_epoch=0,
                timeout_ms=protocol.TIMEOUT_NEVER_MS,
                state=TransactionState.EMPTY,
                last_update_ms=self.now_ms,
            )
            # Of two that make it at once the second one waits for the first.
            if rows.insert_row(self.connection, new):
                # Where one has expired, the journal ends with that.
                rows.journal(self.connection, [new], reason="EndTxn")

    def end(self, producer: ProducerIdentity, *, commit: bool, writers: Collection[int] | None = None) -> None:
        """Decide and complete the transaction; `known.identity` is then who the producer is for its next one.

        `writers` are the further writers whose records count if it commits, by default all that have reported.
        A transaction that is decided already is completed first.

        Raises:
            InvalidRequest: see `protocol.counted_writers`.
            TxnStoreError: see `protocol.end_transaction`.
        """
        try:
            self._decide(producer, commit=commit, writers=writers)
        except ConcurrentTransactions:
            # Somebody decided the same and went away before it was complete.
            self.finish()
            self._decide(producer, commit=commit, writers=writers)
        self.finish()

    @memoized_property
    def participants(self) -> Participants:
        """Who wrote to what in the transaction that earlier database transactions have begun, while it is open."""
        if self.before is None or self.before.state is not TransactionState.ONGOING:
            return NO_PARTICIPANTS
        return rows.participants_of(self.connection, self.before.transactional_id)

    def lacks(self, in_store: InStore, producer: ProducerIdentity) -> InStore:
        """Return what of this is no part of the producer's transaction, as far as its coordinator knows."""
        if not in_store:
            return in_store
        before = self.before
        if before is None or before.state is not TransactionState.ONGOING or before.begin_identity != producer:
            # Nor is it where the producer has the epoch of who takes over a prepared one: that writes nothing more.
            return in_store
        groups = rows.groups_of(self.connection, before.transactional_id) if in_store.group_ids else ()
        return InStore(
            set(in_store.partition_ids) - set(self.participants.partition_ids), set(in_store.group_ids) - set(groups)
        )

    def fence_and_abort(self, reason: FenceReason, detail: str) -> None:
        """Abort the open transaction against the will of its producer, who is fenced."""
        self.step(protocol.fence_and_abort(self.known, reason, detail, now_ms=self.now_ms, allocate=self.allocate))
        self.finish()

    def finish(self, *, is_outrun: bool = False) -> None:
        """Complete the transaction if it is decided: markers in all partitions, and the offsets of all groups.

        What lives in other databases is queued, and the transaction stays decided: see `pending_delivery`.  One that
        `is_outrun` leaves a new producer id behind: see `transactions.delivery`.
        """
        row = self.row
        if row is None or row.state not in DECIDED:
            return
        assert self._finishing is None, "one database transaction completes one transaction of an id"
        self._finishing = row
        if self.pending_delivery is None:
            allocate = self.allocate if is_outrun else None
            self.step(protocol.complete(row, now_ms=self.now_ms, outrun_allocate=allocate))

    @memoized_property
    def pending_delivery(self) -> PendingDelivery | None:
        """What the transaction that ends here has to do in other databases; None if that is nothing."""
        if self._locality is None or self._finishing is None:
            return None
        elsewhere = self._locality.partitions_elsewhere(
            self.connection, {marker.partition_id for marker in self._stored_markers}
        )
        group_ids = self._locality.groups_elsewhere(self._stored_groups)
        if not elsewhere and not group_ids:
            return None
        markers = [marker for marker in self._stored_markers if marker.partition_id in elsewhere]
        return PendingDelivery(self._finishing, markers, sorted(group_ids))

    def step(self, row: TransactionMetadata) -> None:
        """Take a step that a rule of `protocol` returned; a rule that returns the very row has changed nothing."""
        if row is not self.row:
            self._steps.append(row)

    def introduce(self, client: ClientProcess | None) -> None:
        """Let the row say which process the producer is that starts here; None: it does not tell."""
        self._start = rows.Start(client)

    def save(self, reason: str) -> list[Appended]:
        """Write what the steps have changed, and return where the batches stand; `reason` goes into the journal."""
        # Readers wait for records and markers alone, not for the transaction.
        note_change(self.connection)
        left = self.pending_delivery
        away = set() if left is None else {marker.key for marker in left.markers}
        appended = self._save_partitions(marker for marker in self._stored_markers if marker.key not in away)
        self._save_groups([name for name in self._stored_groups if left is None or name not in left.group_ids])
        self._save_row(appended, reason)
        return appended

    def _decide(self, producer: ProducerIdentity, *, commit: bool, writers: Collection[int] | None) -> None:
        with fencing_other_starts(self.connection, self.row, producer):
            action, row = protocol.end_transaction(
                self.row, producer, commit=commit, now_ms=self.now_ms, allocate=self.allocate
            )
        if action is EndAction.DECIDE and commit:
            if self.known.begin_identity != producer and self.participants.has_branches:
                # A producer that keeps what an older one has prepared (KIP-939) knows nothing of the votes.
                raise TransactionAbortable(
                    f"the transaction of {self.known.transactional_id[:80]!r} has shares in other databases, and only"
                    " the producer that began it knows whether they have voted for it: abort it"
                )
            self._counted = counted_writers(self.participants.has_reported, writers)
        self.step(row)

    def _add(self, producer: ProducerIdentity) -> None:
        with fencing_other_starts(self.connection, self.row, producer):
            row = protocol.add_to_transaction(self.row, producer, now_ms=self.now_ms, holds_all=True)
        self.step(row)

    @memoized_property
    def _stored_markers(self) -> list[Marker]:
        """Return the markers of a transaction that earlier database transactions have begun, if it ends now."""
        if self.before is None or self._finishing is None:
            return []
        if self.before.state in DECIDED:
            # Markers that were delivered before are not in the outbox any more.
            return rows.queued_markers(self.connection, self.before.transactional_id)
        return markers_of(self._finishing, self.participants, self._counted)

    @memoized_property
    def _stored_groups(self) -> list[str]:
        """Return the groups of a transaction that earlier database transactions have begun."""
        if self.before is None or not (self._finishing or self._sent):
            return []
        if self.before.state in DECIDED or self.before.state is TransactionState.ONGOING:
            return rows.groups_of(self.connection, self.before.transactional_id)
        return []

    def _save_partitions(self, stored: Iterable[Marker]) -> list[Appended]:
        markers = {marker.key: marker for marker in stored}
        if self._finishing is not None:
            for item in self._appends:
                marker = rows.marker_of(self._finishing, item.partition_id)
                markers[marker.key] = marker
        if not markers and not self._appends:
            return []
        work = LockedPartitions.lock(self.connection, producers_of(self._appends), list(markers))
        appended = place_all(work, self._appends, coordinated=True)
        for key in sorted(markers):
            work.place_marker(markers[key])
        work.save()
        self._commit_number = work.commit_number
        return appended

    def _save_groups(self, stored: Iterable[str]) -> None:
        finishing = self._finishing
        sent_of: dict[str, list[SentOffsets]] = {group_id: [] for group_id in stored}
        for sent in self._sent:
            sent_of.setdefault(sent.committer.group_id, []).append(sent)
        producer = self._begin_identity()
        for group_id in sorted(sent_of):
            if finishing is None:
                for sent in sent_of[group_id]:
                    add_pending_offsets(self.connection, sent.committer, sent.offsets, producer)
                continue
            commit = finishing.state is TransactionState.PREPARE_COMMIT
            if group_id in stored:
                self._committed_offsets.update(
                    finish_pending_offsets(self.connection, [group_id], finishing.producer_id, commit=commit)
                )
            if commit:
                # What is sent and committed at once is never pending.
                for sent in sent_of[group_id]:
                    commit_offsets(self.connection, sent.committer, sent.offsets, producer=producer)
                    self._committed_offsets.setdefault(group_id, {}).update(sent.offsets)

    def _save_row(self, appended: Sequence[Appended], reason: str) -> None:
        """Write the row, the journal, and who takes part in a transaction that stays open."""
        if self.before is None:
            return
        transactional_id = self.before.transactional_id
        self._decide_branches(transactional_id)
        if self.pending_delivery is not None:
            self._save_pending_delivery(self.pending_delivery)
        elif self._finishing is not None:
            if self.before.state in DECIDED:
                rows.clear_markers(self.connection, transactional_id)
            if self.before.state in DECIDED or self.before.state is TransactionState.ONGOING:
                rows.forget_participants(self.connection, transactional_id)
            if self.before.state in DECIDED or self.participants.has_reported:
                rows.forget_writers(self.connection, transactional_id)
        else:
            self._save_participants(appended)
        if self._steps:
            rows.save_row(
                self.connection,
                self._steps,
                before=self.before,
                reason=reason,
                start=self._start,
                entry_id=self._commit_number,
                sent_offsets=journal_text(self._committed_offsets) if self._committed_offsets else None,
            )

    def _decide_branches(self, transactional_id: str) -> None:
        """Let the branches end as the transaction does, if this database transaction decides it, for any caller."""
        decided = next((row for row in self._steps if row.state in DECIDED), None)
        if decided is not None and self.participants.has_branches:
            commit = decided.state is TransactionState.PREPARE_COMMIT
            branch_rows.decide_branches(self.connection, transactional_id, decided.begin_identity, commit=commit)

    def _save_pending_delivery(self, left: PendingDelivery) -> None:
        """Leave in the tables what other databases still have to do, and nothing else."""
        transactional_id = left.decided.transactional_id
        assert self.before is not None
        if self.before.state in DECIDED:
            away = {marker.partition_id for marker in left.markers}
            done = {marker.partition_id for marker in self._stored_markers} - away
            rows.strike_off_markers(self.connection, transactional_id, done)
        else:
            # The others act on the decision: it is not to be lost with this database's last commits.
            make_durable(self.connection)
            rows.queue_markers(self.connection, {transactional_id: left.markers})
        for group_id in self._stored_groups:
            if group_id not in left.group_ids:
                rows.forget_group(self.connection, transactional_id, group_id)

    def _save_participants(self, appended: Sequence[Appended]) -> None:
        opened = {place.partition_id for place in appended if place.begins_transaction}
        if self._added_partitions:
            opened |= self._added_partitions - set(rows.partitions_of(self.connection, self.known.transactional_id))
        groups = {sent.committer.group_id for sent in self._sent} | self._added_groups
        if groups:
            groups -= set(rows.groups_of(self.connection, self.known.transactional_id))
        if not opened and not groups:
            return
        if self._added_partitions or self._added_groups:
            # What is written there would otherwise have nobody who ends it.
            make_durable(self.connection)
        rows.add_partitions(self.connection, self.known.transactional_id, opened)
        rows.add_groups(self.connection, self.known.transactional_id, groups)
        if not self._steps:
            self.step(protocol.add_to_transaction(self.row, self.known.identity, now_ms=self.now_ms, holds_all=False))

    def _begin_identity(self) -> ProducerIdentity:
        """Return the producer of the transaction that the steps have written to."""
        return next(
            (row.begin_identity for row in (*self._steps, self.before) if row is not None and row.begin_epoch >= 0),
            self.known.identity,
        )


def check_batches(producer: ProducerIdentity, appends: Iterable[Append]) -> None:
    """Refuse a batch that is not one of the producer's transaction.

    Raises:
        InvalidRequest: it is not transactional or comes from another producer.
    """
    for item in appends:
        batch = item.batch
        if not batch.is_transactional:
            raise InvalidRequest("a batch of a transaction must be marked as transactional")
        if (batch.producer_id, batch.producer_epoch) != (producer.producer_id, producer.epoch):
            raise InvalidRequest("a batch of a transaction must carry the producer id and epoch of its producer")


# --- requests, in time ------------------------------------------------------------------------------------------------


def write_in_time(
    store: Store,
    cluster: Cluster | None,
    transactional_id: str,
    work: Callable[[Connection], Result],
    *,
    wakes_readers: bool = False,
    retry_timeout_ms: int | None = None,
) -> Result:
    """Run a request of the transactional id, as `Store.write`; if its transaction's time is up, abort that first.

    What comes after the deadline is refused, and its database transaction rolled back: so the abort is one of its
    own.  The request is then made again, and told what is true, as if somebody else had been here before.

    Raises:
        TxnStoreError: see `Store.write` and the request; or the transaction could not be aborted.
    """
    try:
        return store.write(work, wakes_readers=wakes_readers, retry_timeout_ms=retry_timeout_ms)
    except TransactionAbortable:
        abort_if_timed_out(store, transactional_id, cluster, retry_timeout_ms=retry_timeout_ms)
    return store.write(work, wakes_readers=wakes_readers, retry_timeout_ms=retry_timeout_ms)


def abort_if_timed_out(
    store: Store,
    transactional_id: str,
    cluster: Cluster | None = None,
    *,
    waits: bool = True,
    retry_timeout_ms: int | None = None,
) -> bool:
    """Abort the open transaction if its time is up; its producer is told so and may begin a new one.

    Returns False if its time is not up or, unless it `waits`, if somebody else is at work on it.
    """

    def work(connection: Connection) -> bool:
        if not waits and not rows.try_lock(connection, transactional_id):
            return False
        transaction = LockedTransaction.lock(connection, transactional_id, Locality.of(store, cluster))
        row = transaction.row
        if row is None or not protocol.has_timed_out(row, transaction.now_ms):
            return False
        transaction.fence_and_abort(FenceReason.TIMEOUT, protocol.timeout_detail(row, transaction.now_ms))
        transaction.save("timeout")
        return True

    aborted = store.write(work, wakes_readers=True, retry_timeout_ms=retry_timeout_ms)
    if aborted:
        log_timed_out(store, transactional_id)
        complete_if_possible(store, cluster, transactional_id)
    return aborted


def log_timed_out(store: Store, *transactional_ids: str) -> None:
    """Tell people that the transactions were aborted for their age."""
    if not _log.isEnabledFor(logging.INFO):
        return
    url = str(store.url)
    for transactional_id in transactional_ids:
        fields = {"event": "transaction_timed_out", "store": url, "transactional_id": transactional_id}
        _log.info(
            "the transaction of %.80r was open for longer than its timeout: aborted", transactional_id, extra=fields
        )


# --- the completion of what is decided --------------------------------------------------------------------------------


def complete_decided(store: Store, transactional_id: str, cluster: Cluster | None = None) -> ProducerIdentity:
    """Deliver the markers of a decided transaction and complete it; return who its producer is then.

    Nothing happens if there is nothing decided.  May be called by anyone, twice, and by two at once.

    Raises:
        InvalidProducerIdMapping: nobody has used the transactional id, or it has expired.
        TxnStoreError: another database that takes part cannot be reached or refuses; all others have their markers.
    """
    others = several(cluster)
    if others is not None:
        left = store.read(lambda connection: _read_pending_delivery(connection, transactional_id))
        if isinstance(left, PendingDelivery):
            return complete_delivered(store, others, left)
        return left

    def complete(connection: Connection) -> ProducerIdentity:
        # Others may have been here too: the row's lock decides.
        work = LockedTransaction.lock(connection, transactional_id)
        work.finish()
        work.save("completion")
        return work.known.identity

    try:
        return store.write(complete, wakes_readers=True)
    except (UnknownTopicOrPartition, NotCoordinator):
        if several(cluster) is None:
            raise
    # Other databases have joined, and it has heard of them just now.
    return complete_decided(store, transactional_id, cluster)


def complete_if_possible(store: Store, cluster: Cluster | None, transactional_id: str) -> None:
    """Complete what is decided, unless a database that takes part is away: then recovery does it, once it is back."""
    error = None if several(cluster) is None else try_to_complete(store, cluster, transactional_id)
    if error is not None:
        log_put_off(transactional_id, error)


def try_to_complete(
    store: Store, cluster: Cluster | None, transactional_id: str
) -> TxnStoreError | AssertionError | None:
    """Complete what is decided; return why that was not possible, if it was not."""
    try:
        complete_decided(store, transactional_id, cluster)
    except InvalidProducerIdMapping:
        # It was forgotten meanwhile: there is nothing left to do.
        return None
    except (TxnStoreError, AssertionError) as error:
        return error
    return None


def log_put_off(transactional_id: str, error: TxnStoreError | AssertionError) -> None:
    """Tell people that a decided transaction waits for a database that takes part."""
    _log.warning(
        "the transaction of %.80r is decided; recovery will complete it: %s",
        transactional_id,
        error,
        extra={"event": "completion_put_off", "transactional_id": transactional_id},
    )


def complete_delivered(store: Store, cluster: Cluster, left: PendingDelivery) -> ProducerIdentity:
    """Deliver what a decision has left to other databases, and complete it: one database transaction at its own.

    Raises:
        TxnStoreError: one of them cannot be reached or refuses; what was delivered is struck off.
    """
    (delivered,) = deliver(cluster, store.database_id, [left])
    if delivered.error is not None and not delivered.is_news:
        # There is nothing to strike off: what waits for a database that is away costs no write at each look.
        row = store.read(lambda connection: rows.read_row(connection, left.decided.transactional_id)).row
        if is_left(row, left):
            raise delivered.error
        return left.decided.next_identity if row is None else row.identity
    strike_off = partial(_strike_off, Locality.of(store, cluster), left, delivered)
    try:
        identity, is_completed = store.write(strike_off, wakes_readers=True)
    except OutcomeUnknown:
        # If it stands nobody finds it again: told twice is better than never.
        tell_outrun(left, delivered)
        raise
    if is_completed:
        tell_outrun(left, delivered)
    if identity is None:
        assert delivered.error is not None, "something is left although no delivery failed"
        raise delivered.error
    return identity


def _read_pending_delivery(connection: Connection, transactional_id: str) -> PendingDelivery | ProducerIdentity:
    row = rows.read_row(connection, transactional_id).row
    if row is None:
        raise InvalidProducerIdMapping
    if row.state not in DECIDED:
        return row.identity
    markers = rows.queued_markers(connection, transactional_id)
    return PendingDelivery(row, markers, rows.groups_of(connection, transactional_id))


def is_left(row: TransactionMetadata | None, left: PendingDelivery) -> bool:
    """Return whether the transaction is decided and not complete, as it was when `left` was read."""
    return row is not None and row.state in DECIDED and row.identity == left.decided.identity


def _strike_off(
    locality: Locality | None, left: PendingDelivery, delivered: Delivered, connection: Connection
) -> tuple[ProducerIdentity | None, bool]:
    """Take note of what was delivered, and complete the transaction if that was all.

    Returns who its producer is then, None if that was not all; and whether it was completed here.
    """
    transactional_id = left.decided.transactional_id
    work = LockedTransaction.lock(connection, transactional_id, locality)
    row = work.row
    if not is_left(row, left):
        # Somebody else has completed it, and it may have gone on since: nothing here is about what comes after.
        return (left.decided.next_identity if row is None else row.identity), False
    rows.strike_off_markers(connection, transactional_id, delivered.partition_ids)
    for group_id in delivered.group_ids:
        rows.forget_group(connection, transactional_id, group_id)
    work.finish(is_outrun=delivered.is_outrun)
    work.save("completion")
    return (work.known.identity, True) if work.pending_delivery is None else (None, False)
