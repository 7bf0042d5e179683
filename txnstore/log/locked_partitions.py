"""Locked partitions: batches and markers get their offsets there, and become rows.

The heads of the partitions are locked once (`LockedPartitions`); batches, then markers, are placed in memory while the
locks are held, and written together: one INSERT, one UPDATE of the heads, one of the producers.

A decision that comes with a transaction's last batches has its markers written with them.  Of those that come by
themselves (`write_markers`) thousands may end at once: what all have in common stands in the statements, and of a
producer only that is read which a marker asks for.

A marker's epoch is above that of the records it ends (KIP-890, KIP-1228): whatever their producer sends late is old
by then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop
from types import MappingProxyType
from typing import Any, Final, Self

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    bindparam,
    insert,
    literal_column,
    null,
    select,
    true,
    update,
)

from txnstore.db.ddl import Int16, Int32, Int64
from txnstore.db.schema import finished_transactions, producer_states, record_batches
from txnstore.db.statements import HotStatement
from txnstore.db.store import must_hit_each
from txnstore.errors import InvalidProducerEpoch, TransactionCoordinatorFenced
from txnstore.log.codec import MARKER, EncodedBatch, marker_checksum
from txnstore.log.partition_rows import (
    Head,
    ProducerKey,
    draw_commit_numbers,
    insert_batches,
    lock_heads,
    read_marked_producers,
    read_producer_states,
    save_heads,
    save_producer_states,
)
from txnstore.log.sequences import MarkedProducer, ProducerInPartition, RecentBatch, last_sequence_of, remember
from txnstore.model import NO_PRODUCER_ID, NO_SEQUENCE, ControlType, ProducerIdentity

#: Of the state of a producer that no marker has touched.
_NO_COORDINATOR_EPOCH: Final = -1
# What is said of one marker: each of the statements takes its share.
_PARTITION_ID: Final = bindparam("of_partition_id", type_=Int64)
_PRODUCER_ID: Final = bindparam("of_producer_id", type_=Int64)
_OFFSET: Final = bindparam("at_offset", type_=Int64)
_EPOCH: Final = bindparam("new_epoch", type_=Int32)
_COORDINATOR_EPOCH: Final = bindparam("new_coordinator_epoch", type_=Int32)
_NOW_MS: Final = bindparam("new_now_ms", type_=Int64)
_ZERO: Final[ColumnElement[Any]] = literal_column("0")
#: A marker's columns but for those that are NULL.
_COLUMNS: Final[Mapping[str, Any]] = {
    "partition_id": _PARTITION_ID,
    "last_offset": _OFFSET,
    "base_offset": _OFFSET,
    "base_timestamp_ms": _NOW_MS,
    "max_timestamp_ms": _NOW_MS,
    "running_max_timestamp_ms": bindparam("new_running_max_timestamp_ms", type_=Int64),
    "producer_id": _PRODUCER_ID,
    "crc": bindparam("new_crc", type_=Int64),
    "record_count": literal_column("1"),
    "producer_epoch": _EPOCH,
    "base_sequence": literal_column(str(NO_SEQUENCE)),
    "coordinator_epoch": _COORDINATOR_EPOCH,
    "size_bytes": _ZERO,
    "timestamp_type": _ZERO,
    "control_type": bindparam("of_control_type", type_=Int16),
    "codec": _ZERO,
    "segment": bindparam("of_segment", type_=Int16),
    "is_transactional": true(),
}
#: The names of the values, by that of the column.
_NAMES: Final = {column: value.key for column, value in _COLUMNS.items() if isinstance(value, BindParameter)}
# Of what takes little room.
_INSERT_MARKERS: Final = HotStatement(
    insert(record_batches).from_select(list(_COLUMNS), select(*_COLUMNS.values())), may_be_listed=True
)
_INSERT_FINISHED: Final = HotStatement(insert(finished_transactions), may_be_listed=True)
# The epoch is new, so the producer's sequence numbers begin at 0 again (KIP-890).
_END: Final = HotStatement(
    update(producer_states)
    .where(producer_states.c.partition_id == _PARTITION_ID, producer_states.c.producer_id == _PRODUCER_ID)
    .values(
        producer_epoch=_EPOCH,
        recent_batches=literal_column("'[]'"),
        coordinator_epoch=_COORDINATOR_EPOCH,
        last_timestamp_ms=_NOW_MS,
        transaction_first_offset=null(),
    ),
    may_be_listed=True,
)


@dataclass(frozen=True, slots=True)
class Marker:
    """The end of one producer's transaction in one partition."""

    partition_id: int
    producer: ProducerIdentity
    """The producer, with the marker's own epoch."""

    control_type: ControlType
    coordinator_epoch: int = 0

    @property
    def key(self) -> ProducerKey:
        """The producer in the partition."""
        return (self.partition_id, self.producer.producer_id)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a batch will stand."""

    base_offset: int
    last_offset: int
    begins_transaction: bool = False


@dataclass
class LockedPartitions:
    """Changes of some partitions, batches before markers; nothing is written before `save`."""

    connection: Connection
    heads: Mapping[int, Head]
    now_ms: int
    producers: dict[ProducerKey, ProducerInPartition | MarkedProducer]
    """What the partitions know of them, with the changes so far."""

    commit_number: int | None = None
    """That of the last transaction whose commit was written, or of what was placed outside any; None: nothing was."""

    #: Who has a row already, and what batches have made of producers since.
    _known: Collection[ProducerKey] = ()
    _written: dict[ProducerKey, ProducerInPartition] = field(default_factory=dict)
    _batches: list[dict[str, Any]] = field(default_factory=list)
    _markers: list[dict[str, Any]] = field(default_factory=list)
    _finished: list[dict[str, Any]] = field(default_factory=list)
    #: Those of `_finished` that commit, by the transaction of which they are parts.
    _commits: defaultdict[ProducerIdentity | None, list[dict[str, Any]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    #: By partition: where transactions begin that were open at the first marker, the oldest first, and whose they are.
    _open: defaultdict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def lock(
        cls,
        connection: Connection,
        writers: Iterable[ProducerKey],
        ends: Sequence[ProducerKey] = (),
        *,
        only_ends: bool = False,
    ) -> Self:
        """Lock the heads of partitions, at least one, and read what they know of producers.

        These are the writers of batches, and those whose markers come after them: for these it also reads what is open
        there besides.  If there are `only_ends`, no more of them is read than markers ask for.

        Raises:
            UnknownTopicOrPartition: a partition is not in this database.
        """
        keys = {*writers, *ends}
        locked = lock_heads(connection, (partition_id for partition_id, _ in keys))
        # Of those that are open the oldest will do: one of them is left when so many have ended.
        oldest_open = {number: ended + 1 for number, ended in Counter(number for number, _ in ends).items()}
        keys = {key for key in keys if key[1] != NO_PRODUCER_ID}
        producers: dict[ProducerKey, ProducerInPartition | MarkedProducer] = {}
        if only_ends:
            producers.update(read_marked_producers(connection, keys, oldest_open=oldest_open))
        else:
            producers.update(read_producer_states(connection, keys, oldest_open=oldest_open))
        return cls(connection, locked.heads, locked.now_ms, producers, _known=frozenset(producers))

    def writer(self, key: ProducerKey) -> ProducerInPartition | None:
        """Return what the partition knows of the producer, before any marker is placed."""
        state = self.producers.get(key)
        assert not isinstance(state, MarkedProducer), "what batches ask for was not read"
        return state

    def place(self, partition_id: int, batch: EncodedBatch) -> Placed:
        """Give the batch the partition's next offsets, and remember it for its producer."""
        assert not self._markers, "what is open was looked up at the first marker"
        row = self.heads[partition_id].place(batch.columns())
        self._batches.append(row)
        if batch.producer_id == NO_PRODUCER_ID:
            return Placed(row["base_offset"], row["last_offset"])
        recent = RecentBatch(
            batch.base_sequence,
            last_sequence_of(batch.base_sequence, batch.record_count),
            row["base_offset"],
            row["last_offset"],
            batch.max_timestamp_ms,
        )
        state = self._state_after(partition_id, batch, recent)
        return Placed(recent.base_offset, recent.last_offset, state.transaction_first_offset == recent.base_offset)

    def place_marker(self, marker: Marker, transaction: ProducerIdentity | None = None) -> None:
        """Place a marker if it is not there yet: the open transaction of its producer is over in the partition.

        If there may be markers of several transactions, `transaction` says what this one belongs to: who began it.

        Raises:
            InvalidProducerEpoch: the partition has seen a newer epoch of the producer.
            TransactionCoordinatorFenced: the partition has a marker of a newer coordinator.
        """
        key = partition_id, producer_id = marker.key
        state = self.producers.get(key)
        if state is not None and _is_there_already(marker, state):
            return
        if not self._markers:
            self._note_open()
        head = self.heads[partition_id]
        offset = head.next_offset
        head.next_offset = offset + 1
        epoch, coordinator_epoch = marker.producer.epoch, marker.coordinator_epoch
        self.producers[key] = MarkedProducer(epoch, coordinator_epoch, None)
        self._markers.append(
            {
                "of_partition_id": partition_id,
                "of_producer_id": producer_id,
                "at_offset": offset,
                "of_segment": head.segment,
                "of_control_type": int(marker.control_type),
                "new_epoch": epoch,
                "new_coordinator_epoch": coordinator_epoch,
                "new_now_ms": self.now_ms,
                "new_running_max_timestamp_ms": head.running_max_timestamp_ms,
                "new_crc": marker_checksum(marker.control_type, coordinator_epoch, marker.producer, self.now_ms),
            }
        )
        if state is not None and state.transaction_first_offset is not None:
            row = {
                "partition_id": partition_id,
                "marker_offset": offset,
                "producer_id": producer_id,
                "producer_epoch": state.epoch,
                "first_offset": state.transaction_first_offset,
                "outcome": int(marker.control_type),
                "last_stable_offset": self._oldest_open(partition_id, otherwise=offset + 1),
                "commit_number": None,
            }
            self._finished.append(row)
            if marker.control_type is ControlType.COMMIT:
                self._commits[transaction].append(row)

    def announce(self, producer: ProducerIdentity) -> None:
        """Write down at once that the producer may append where it was not known.

        Nothing is saved here afterwards: what was found stays as it was, so `save` would insert the producer once more.
        """
        state = ProducerInPartition(producer.producer_id, producer.epoch, (), _NO_COORDINATOR_EPOCH, self.now_ms, None)
        keys = {(partition_id, producer.producer_id) for partition_id in self.heads}
        save_producer_states(self.connection, dict.fromkeys(keys.difference(self._known), state), self._known)

    def save(self) -> None:
        """Write what was placed."""
        plain = [row for row in self._batches if not row["is_transactional"]]
        commits = [commit for commit in (plain, *self._commits.values()) if commit]
        if commits:
            # One each: a reader of whole transactions takes those with one number for one.
            numbers = draw_commit_numbers(self.connection, len(commits))
            for commit, number in zip(commits, numbers, strict=True):
                for row in commit:
                    row["commit_number"] = number
            self.commit_number = numbers[-1]
        for row in self._batches:
            row["running_max_timestamp_ms"] = self.heads[row["partition_id"]].running_max_timestamp_ms
        if self._batches:
            insert_batches(self.connection, [*self._batches, *map(_as_batch, self._markers)])
        elif self._markers:
            _INSERT_MARKERS.run_each(self.connection, self._markers)
        else:
            return
        moved = {row["partition_id"] for row in self._batches} | {row["of_partition_id"] for row in self._markers}
        save_heads(self.connection, [self.heads[partition_id] for partition_id in sorted(moved)])
        self._save_producers()
        if self._finished:
            _INSERT_FINISHED.run_each(self.connection, self._finished)

    def _state_after(self, partition_id: int, batch: EncodedBatch, recent: RecentBatch) -> ProducerInPartition:
        assert batch.base_sequence != NO_SEQUENCE, "a batch of an idempotent producer needs a sequence number"
        key = (partition_id, batch.producer_id)
        state = self.writer(key)
        if state is None:
            state = ProducerInPartition(
                batch.producer_id, batch.producer_epoch, (), _NO_COORDINATOR_EPOCH, self.now_ms, None
            )
        first_offset = state.transaction_first_offset
        if batch.is_transactional and first_offset is None:
            # Where the open transaction begins in this partition: no reader of committed records goes past it.
            first_offset = recent.base_offset
        same_epoch = batch.producer_epoch == state.epoch
        self._written[key] = self.producers[key] = replace(
            state,
            epoch=batch.producer_epoch,
            recent_batches=remember(state.recent_batches if same_epoch else (), recent),
            last_timestamp_ms=self.now_ms,
            transaction_first_offset=first_offset,
        )
        return self._written[key]

    def _save_producers(self) -> None:
        states, ended = dict(self._written), {}
        for row in self._markers:
            key = row["of_partition_id"], row["of_producer_id"]
            states.pop(key, None)
            if key in self._known:
                ended[key] = row
            else:
                states[key] = ProducerInPartition(
                    key[1], row["new_epoch"], (), row["new_coordinator_epoch"], row["new_now_ms"], None
                )
        save_producer_states(self.connection, states, self._known)
        if ended:
            # One that is missed would hide its transaction: nothing would hold the last stable offset or tell its end.
            must_hit_each(self.connection, _END, list(ended.values()))

    def _note_open(self) -> None:
        for (partition_id, producer_id), state in self.producers.items():
            if state.transaction_first_offset is not None:
                self._open[partition_id].append((state.transaction_first_offset, producer_id))
        for found in self._open.values():
            heapify(found)

    def _oldest_open(self, partition_id: int, *, otherwise: int) -> int:
        """Return where the oldest transaction begins that is still open in the partition."""
        found = self._open[partition_id]
        while found:
            first_offset, producer_id = found[0]
            if self.producers[partition_id, producer_id].transaction_first_offset == first_offset:
                return first_offset
            # It has ended meanwhile.
            heappop(found)
        return otherwise


def _is_there_already(marker: Marker, state: ProducerInPartition | MarkedProducer) -> bool:
    """Return whether a repetition brings the marker; refuse one that comes from the past."""
    if marker.coordinator_epoch < state.coordinator_epoch:
        raise TransactionCoordinatorFenced(
            f"a marker of coordinator epoch {marker.coordinator_epoch} came after one of {state.coordinator_epoch}"
        )
    if marker.producer.epoch > state.epoch:
        return False
    if marker.producer.epoch == state.epoch and state.transaction_first_offset is None:
        return True
    raise InvalidProducerEpoch(
        f"the marker of producer {marker.producer} is not newer than epoch {state.epoch} of its records"
    )


def _as_batch(marker: Mapping[str, Any]) -> dict[str, Any]:
    """Return all columns of a marker, for the statement that writes batches."""
    return {**MARKER, **{column: marker[name] for column, name in _NAMES.items()}, "commit_number": None}


# --- markers that come by themselves ----------------------------------------------------------------------------------

_NOTHING_KNOWN: Final[Mapping[ProducerKey, ProducerIdentity]] = MappingProxyType({})
# The first batch of an open transaction.
_BEGAN_WITH_EPOCH: Final = HotStatement(
    select(record_batches.c.producer_epoch)
    .where(record_batches.c.partition_id == _PARTITION_ID, record_batches.c.producer_id == _PRODUCER_ID)
    .where(record_batches.c.last_offset >= bindparam("from_offset"))
    .order_by(record_batches.c.last_offset)
    .limit(1)
)


def write_markers(
    connection: Connection,
    markers: Sequence[Marker],
    begun_by: Mapping[ProducerKey, ProducerIdentity] = _NOTHING_KNOWN,
) -> dict[ProducerKey, bool]:
    """Write markers; each transaction is then over in its partition, in the order given.

    A marker that is there already is not written again (KAFKA-19999).  `begun_by` tells of some who has begun the
    transaction, and with which epoch.  Of these none is written where the producer has gone on with a newer one: they
    are returned, with whether that has something open there, which is no part of the transaction.  Each of these
    transactions is a commit of its own, if it commits, in the order of their first markers; of the others all that
    commit are one.

    Raises:
        UnknownTopicOrPartition: a partition is not in this database.
        InvalidProducerEpoch: the partition has seen a newer epoch of a producer that is not one of `begun_by`.
        TransactionCoordinatorFenced: the partition has a marker of a newer coordinator.
    """
    outrun: dict[ProducerKey, bool] = {}
    if not markers:
        return outrun
    work = LockedPartitions.lock(connection, (), [marker.key for marker in markers], only_ends=True)
    for marker in markers:
        state = work.producers.get(marker.key)
        transaction = begun_by.get(marker.key)
        if state is not None and transaction is not None and _is_outrun(connection, marker, state, transaction.epoch):
            outrun[marker.key] = state.transaction_first_offset is not None
        else:
            work.place_marker(marker, transaction)
    work.save()
    return outrun


def _is_outrun(
    connection: Connection, marker: Marker, state: ProducerInPartition | MarkedProducer, begun_with: int
) -> bool:
    """Return whether the producer has gone on here after the transaction that the marker is to end."""
    if state.epoch <= begun_with or marker.coordinator_epoch < state.coordinator_epoch:
        return False
    if state.transaction_first_offset is None:
        return state.epoch > marker.producer.epoch
    of = {
        "of_partition_id": marker.partition_id,
        "of_producer_id": marker.producer.producer_id,
        "from_offset": state.transaction_first_offset,
    }
    epoch = _BEGAN_WITH_EPOCH.value(connection, of)
    # Else it is damage: what is open is what the marker is to end, or the log does not tell.
    return epoch is not None and epoch > begun_with
