"""The committed offsets of a consumer: written and read on its worker, in the name of its membership."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Condition
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection

from txnstore.clients.connection import StoreConnection, repeat, write_repeatable
from txnstore.clients.consumer.arguments import ConsumerOptions
from txnstore.clients.consumer.assigned_partition import AssignedPartition
from txnstore.clients.consumer.subscription import Subscription
from txnstore.clients.model.errors import KafkaError, kafka_error_of
from txnstore.clients.model.topic_partition import TopicPartition, with_committed
from txnstore.clients.topic_directory import TopicDirectory
from txnstore.clients.worker import Worker
from txnstore.db.store import Store
from txnstore.errors import FencedInstance, InvalidRequest, TxnStoreError, UnknownMember, UnknownTopicOrPartition
from txnstore.groups.coordinator import expire_members
from txnstore.groups.offsets import (
    CommittedOffsets,
    check_partitions,
    commit_offsets,
    commit_offsets_at_once,
    read_offsets,
    read_stable_offsets,
)
from txnstore.model import NO_GENERATION, GroupMembership, IsolationLevel, OffsetAndMetadata, PartitionName

if TYPE_CHECKING:
    # Brings psycopg along, which a consumer of SQLite never needs.
    from txnstore.db.callers.connections import CallersConnection


_Place = tuple[str, int]

#: The id of no partition: it stands for one that was deleted, and of which nothing else is known.
_DELETED: Final = -1


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of a commit."""

    error: KafkaError | None
    """The first thing that went wrong, if anything did."""

    partitions: Sequence[TopicPartition]
    """What was to be committed, each with its own error."""


class OffsetCommits:
    """The commits of one consumer."""

    def __init__(
        self,
        *,
        lock: Condition,
        subscription: Subscription,
        worker: Worker,
        connection: StoreConnection,
        directory: TopicDirectory,
        options: ConsumerOptions,
        membership: Callable[[Sequence[TopicPartition]], GroupMembership],
        membership_now: Callable[[GroupMembership, Iterable[PartitionName]], GroupMembership],
        on_error: Callable[[TxnStoreError, GroupMembership], None],
    ) -> None:
        """Commit in the name of what `membership` returns at the call, after a wait in that of `membership_now`.

        It is asked with what is to be committed.
        """
        self._lock = lock
        self._subscription = subscription
        self._worker = worker
        self._connection = connection
        self._directory = directory
        self._options = options
        self._membership = membership
        self._membership_now = membership_now
        self._on_error = on_error
        self._last: Future[CommitResult] | None = None

    @property
    def under_way(self) -> Future[CommitResult] | None:
        """The last commit, which is done after all others; None: all are done."""
        return None if self._last is None or self._last.done() else self._last

    def stored(self, partitions: Sequence[AssignedPartition] | None = None) -> list[TopicPartition]:
        """Return the stored offsets of the partitions, by default of all; OFFSET_INVALID: nothing to commit."""
        with self._lock:
            return [
                self._options.positions.partition(partition.topic, partition.number, partition.uncommitted)
                for partition in (self._subscription if partitions is None else partitions)
            ]

    def submit(
        self, offsets: Sequence[TopicPartition], removed: Sequence[AssignedPartition] = ()
    ) -> Future[CommitResult]:
        """Commit the offsets later, on the worker; negative ones are left out.

        `removed`: those of their partitions that are not assigned any more.

        Raises:
            RuntimeError: the worker has been closed.
        """
        membership, read_ids = self._membership(offsets), self._read_ids(offsets, removed)
        with self._lock:
            self._last = future = self._worker.submit(lambda: self._commit(membership, offsets, read_ids))
        return future

    def commit_on(self, callers: CallersConnection, offsets: Sequence[TopicPartition]) -> list[TopicPartition]:
        """Commit the offsets in the caller's database transaction, on the caller's thread; negative ones are left out.

        What is stored still counts as not committed: the consumer does not learn whether the caller commits.

        Raises:
            TxnStoreError: the group, the connection or the database refuses; the caller has to roll back.
        """
        from txnstore.db.callers.enlisted import will_be_prepared
        from txnstore.db.callers.on_caller_connection import run_joined
        from txnstore.db.postgresql.branches import note_offsets

        if will_be_prepared(callers):
            # The lock of the group's row would be the prepared transaction's: no member's heartbeat comes by it.
            raise InvalidRequest(
                "this connection is enlisted in a producer's transaction, for which its database votes, and would keep"
                " the group locked until that is decided: hand the offsets to send_offsets_to_transaction() of a"
                " producer of the group's own store"
            )
        membership = self._membership(offsets)
        wanted, _, errors = self._wanted(offsets, self._read_ids(offsets))
        if errors:
            missing = next(iter(errors))
            raise UnknownTopicOrPartition(
                f"there is no partition {missing.topic[:80]!r} [{missing.partition}] to commit an offset for"
            )
        try:
            cluster = self._connection.cluster()
            store = cluster.coordinator_of(membership.group_id)
            if callers.keeps_prepared:
                # A producer of another store may be asked to enlist the connection later on.
                note_offsets(getattr(callers.driver, "driver_connection", callers.driver), store.schema)
            group = f"group {membership.group_id[:80]!r}"
            why_there = "" if cluster.is_alone else f", where {group} lives: its name decides in which database"
            run_joined(store, callers, partial(_commit_for_caller, membership, wanted), why_there=why_there)
        except TxnStoreError as error:
            if isinstance(error, UnknownTopicOrPartition):
                self._directory.forget_all()
            self._on_error(error, membership)
            raise
        return list(offsets)

    def read(self, partitions: Sequence[TopicPartition]) -> Future[list[TopicPartition]]:
        """Read what the group has committed; the answer is an UnstableOffsetCommit while that may still change."""
        return self._worker.submit(lambda: self._read(partitions))

    # --- on the worker -----------------------------------------------------------------------------------------------

    def _commit(
        self, membership: GroupMembership, offsets: Sequence[TopicPartition], read_ids: Mapping[_Place, int]
    ) -> CommitResult:
        named = (PartitionName(partition.topic, partition.partition) for partition in offsets if partition.offset >= 0)
        membership = self._membership_now(membership, named)

        def write() -> tuple[dict[int, TopicPartition], dict[TopicPartition, KafkaError]]:
            wanted, ids, errors = self._wanted(offsets, read_ids)
            if wanted:
                self._write(membership, wanted)
            return ids, errors

        try:
            ids, errors = self._directory.again_if_unknown({partition.topic for partition in offsets}, write)
        except TxnStoreError as error:
            self._on_error(error, membership)
            kafka_error = kafka_error_of(error)
            return CommitResult(kafka_error, [partition.with_error(kafka_error) for partition in offsets])
        with self._lock:
            for partition_id, partition in ids.items():
                assigned = self._subscription.find(partition.topic, partition.partition)
                if assigned is not None and assigned.partition_id in (None, partition_id):
                    assigned.committed = self._options.positions.of(partition)
        answered = [partition.with_error(errors.get(partition)) for partition in offsets]
        return CommitResult(next(iter(errors.values()), None), answered)

    def _read_ids(
        self, offsets: Sequence[TopicPartition], removed: Sequence[AssignedPartition] = ()
    ) -> dict[_Place, int]:
        """Return the ids of the partitions that were read under these names, where it is known."""
        ids: dict[_Place, int] = {}
        with self._lock:
            known = {(partition.topic, partition.number): partition for partition in removed}
            for partition in offsets:
                place = (partition.topic, partition.partition)
                read = known.get(place) or self._subscription.find(*place)
                if read is not None and read.is_unread:
                    ids[place] = _DELETED
                elif read is not None and read.partition_id is not None:
                    ids[place] = read.partition_id
        return ids

    def _wanted(
        self, offsets: Sequence[TopicPartition], read_ids: Mapping[_Place, int]
    ) -> tuple[dict[int, OffsetAndMetadata], dict[int, TopicPartition], dict[TopicPartition, KafkaError]]:
        """Return the offsets to commit by partition id, their partitions, and the errors of the other partitions."""
        ids, errors = self._ids([partition for partition in offsets if partition.offset >= 0])
        for partition_id, partition in list(ids.items()):
            if read_ids.get((partition.topic, partition.partition), partition_id) != partition_id:
                # The offset is about the topic that was read, not about the one that was recreated under its name.
                errors[ids.pop(partition_id)] = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
        wanted = {
            partition_id: OffsetAndMetadata(
                partition.offset,
                -1 if partition.leader_epoch is None else partition.leader_epoch,
                partition.metadata,
                partition.offset_in_transaction,
            )
            for partition_id, partition in ids.items()
        }
        return wanted, ids, errors

    def _write(self, membership: GroupMembership, offsets: Mapping[int, OffsetAndMetadata]) -> None:
        def work(connection: Connection) -> None:
            commit_offsets(connection, membership, offsets)

        def after_expiry(connection: Connection) -> None:
            expire_members(connection, membership.group_id)
            work(connection)

        def write_once(store: Store, retry_timeout_ms: int) -> None:
            if not commit_offsets_at_once(store, membership, offsets, retry_timeout_ms=retry_timeout_ms):
                store.write(work, retry_timeout_ms=retry_timeout_ms)

        def write(store: Store) -> None:
            timeout_seconds = self._options.request_timeout_seconds
            try:
                repeat(partial(write_once, store), timeout_seconds=timeout_seconds)
            except (UnknownMember, FencedInstance):
                if membership.generation != NO_GENERATION:
                    raise
                # A crashed member must not keep consumers that manage their partitions themselves from committing,
                # nor the place of a static one that has left.
                write_repeatable(store, after_expiry, timeout_seconds=timeout_seconds)

        self._connection.cluster().at_coordinator(membership.group_id, write)

    def _read(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        is_stable = self._options.isolation is IsolationLevel.READ_COMMITTED
        read = read_stable_offsets if is_stable else read_offsets
        timeout_ms = int(self._options.request_timeout_seconds * 1000)
        ids: dict[int, TopicPartition] = {}
        errors: dict[TopicPartition, KafkaError] = {}
        found: CommittedOffsets | None = None

        def work(connection: Connection) -> CommittedOffsets:
            found = read(connection, self._options.group_id, ids)
            # In a partition that was deleted nothing is committed, also if its topic was recreated: the rows of its
            # offsets outlive it for a while.
            check_partitions(connection, ids.keys())
            return found

        def ask() -> None:
            nonlocal ids, errors, found
            ids, errors = self._ids(partitions)
            if ids:
                cluster, group_id = self._connection.cluster(), self._options.group_id
                read_there = partial(Store.read, work=work, retry_timeout_ms=timeout_ms)
                asked_id = cluster.coordinator_id_of(group_id)
                found = cluster.at_coordinator(group_id, read_there)
                if not found.offsets.keys() >= ids.keys():
                    cluster.has_learned_of_others(retry_timeout_ms=timeout_ms)
                    if cluster.coordinator_id_of(group_id) != asked_id:
                        found = cluster.at_coordinator(group_id, read_there)

        self._directory.again_if_unknown({partition.topic for partition in partitions}, ask)
        committed = {partition: found.offsets.get(key) for key, partition in ids.items()} if found else {}
        return [
            with_committed(partition, committed.get(partition)).with_error(errors.get(partition))
            for partition in partitions
        ]

    def _ids(
        self, partitions: Sequence[TopicPartition]
    ) -> tuple[dict[int, TopicPartition], dict[TopicPartition, KafkaError]]:
        """Return the partitions by id, and the errors of those that do not exist."""
        topics = self._directory.find({partition.topic for partition in partitions})
        grown = {
            partition.topic
            for partition in partitions
            if partition.topic in topics and partition.partition >= len(topics[partition.topic].partition_ids)
        }
        topics = {**topics, **self._directory.refresh(grown)}
        ids: dict[int, TopicPartition] = {}
        errors: dict[TopicPartition, KafkaError] = {}
        for partition in partitions:
            partition_ids = topics[partition.topic].partition_ids if partition.topic in topics else ()
            if 0 <= partition.partition < len(partition_ids):
                ids[partition_ids[partition.partition]] = partition
            else:
                errors[partition] = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
        return ids, errors


def _commit_for_caller(
    membership: GroupMembership, offsets: Mapping[int, OffsetAndMetadata], connection: Connection
) -> None:
    try:
        commit_offsets(connection, membership, offsets)
    except (UnknownMember, FencedInstance):
        if membership.generation != NO_GENERATION:
            raise
        # As in a plain commit: a crashed member must not keep others from committing.
        expire_members(connection, membership.group_id)
        commit_offsets(connection, membership, offsets)
