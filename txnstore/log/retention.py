"""The retention: the oldest batches of a partition go once they are too old, or the partition takes too much.

As in Kafka, a batch is as old as its newest record says, none goes before the one in front of it, and a limit of the
size keeps at least so much.  What Kafka asks of whole segments is asked of each batch here.  Nothing goes at or past
the last stable offset: an open transaction finds all that it has written.

A topic may keep what its groups have not read yet (`txnstore.retention.unread.ms`), for so long and no longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, and_, bindparam, func, or_, select

from txnstore.config import TOPIC_SETTINGS, settings_in_force
from txnstore.db.cluster.cluster import Cluster, LeftOut
from txnstore.db.portions import Portions
from txnstore.db.schema import (
    group_offsets,
    partition_heads,
    partition_storage,
    partitions,
    record_batches,
    topic_configs,
    topics,
)
from txnstore.db.store import LISTED_MAX, ROWS_AT_ONCE, Store, server_now_ms
from txnstore.errors import InvalidConfiguration, UnknownTopicOrPartition
from txnstore.log.bounds import FIRST_OPEN
from txnstore.log.commit_order import first_unread_offset
from txnstore.log.deleting import advance_log_start, delete_below_log_start
from txnstore.log.partition_rows import lock_heads
from txnstore.log.partition_storage import (
    STORED_BATCHES,
    PartitionStorage,
    batch_bytes,
    count_stored,
    read_storage,
)
from txnstore.log.topics import settings_error
from txnstore.model import INTERNAL_GROUP_PREFIX, OFFSET_MAX

#: No limit; also Kafka's number for it.
UNLIMITED: Final = -1
_NAMES: Final = ("cleanup.policy", "retention.bytes", "retention.ms", "txnstore.retention.unread.ms")

_NOW: Final = select(server_now_ms())
_CONFIGS: Final = select(topic_configs).where(topic_configs.c.name.in_(_NAMES))
# Which topic a partition is of, with a row for each of the settings that it has been told.
_TOLD: Final = (
    select(topics.c.topic_uuid, topic_configs.c.name, topic_configs.c.value)
    .select_from(partitions)
    .join(topics, topics.c.topic_id == partitions.c.topic_id)
    .outerjoin(topic_configs, and_(topic_configs.c.topic_id == topics.c.topic_id, topic_configs.c.name.in_(_NAMES)))
    .where(partitions.c.partition_id == bindparam("of_partition_id"))
)
_OLDEST_MS: Final = (
    select(record_batches.c.max_timestamp_ms)
    .where(record_batches.c.partition_id == partition_heads.c.partition_id)
    .where(record_batches.c.last_offset >= partition_heads.c.log_start_offset)
    .order_by(record_batches.c.last_offset)
    .limit(1)
    .correlate(partition_heads)
    .scalar_subquery()
)
# One look for each partition, at its first batch: what nothing is due of costs no statement of its own.
_PARTITIONS: Final = (
    select(
        partition_heads.c.partition_id,
        partitions.c.topic_id,
        topics.c.topic_uuid,
        partition_heads.c.log_start_offset,
        func.coalesce(FIRST_OPEN, partition_heads.c.next_offset).label("last_stable_offset"),
        partition_heads.c.next_offset,
        partition_storage.c.first_stored_offset,
        partition_storage.c.counted_offset,
        partition_storage.c.size_bytes,
        _OLDEST_MS.label("oldest_ms"),
    )
    .join(partitions, partitions.c.partition_id == partition_heads.c.partition_id)
    .outerjoin(topics, topics.c.topic_id == partitions.c.topic_id)
    .outerjoin(partition_storage, partition_storage.c.partition_id == partition_heads.c.partition_id)
    .where(partition_heads.c.partition_id > bindparam("after_partition_id"))
    .order_by(partition_heads.c.partition_id)
    .limit(LISTED_MAX)
)
_FROM_START: Final = STORED_BATCHES.add_columns(record_batches.c.max_timestamp_ms)
# No index finds what groups have committed in one partition: all are passed once, for all partitions that ask.
_COMMITTED: Final = (
    select(
        group_offsets.c.group_id,
        group_offsets.c.partition_id,
        group_offsets.c.committed_offset,
        group_offsets.c.offset_in_transaction,
    )
    .where(
        or_(
            group_offsets.c.group_id > bindparam("after_group_id"),
            and_(
                group_offsets.c.group_id == bindparam("after_group_id"),
                group_offsets.c.partition_id > bindparam("after_partition_id"),
            ),
        )
    )
    .where(func.substr(group_offsets.c.group_id, 1, len(INTERNAL_GROUP_PREFIX)) != INTERNAL_GROUP_PREFIX)
    .order_by(group_offsets.c.group_id, group_offsets.c.partition_id)
    .limit(LISTED_MAX)
)


class _ReadUpTo(NamedTuple):
    """How far all groups have read in one partition; OFFSET_MAX: none has committed in that order."""

    offset: int = OFFSET_MAX
    place: int = OFFSET_MAX
    """By those that read in commit order."""


#: By partition; None: not all groups can be asked.
_ReadOffsets = dict[int, _ReadUpTo] | None


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """What a topic keeps."""

    age_ms: int
    """How old a batch may become, in milliseconds; `UNLIMITED`: as old as it likes."""

    size_bytes: int
    """How much of a partition is kept at least; more may go. `UNLIMITED`: nothing goes for its size."""

    unread_ms: int
    """How old a batch may become that a group has yet to read; 0: groups do not matter; `UNLIMITED`: it stays."""

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> RetentionLimits | None:
        """Return the limits of a topic with these settings; None if it keeps everything."""
        settings = settings_in_force(TOPIC_SETTINGS, texts)
        limits = cls(
            max(settings["retention.ms"], UNLIMITED),
            max(settings["retention.bytes"], UNLIMITED),
            settings["txnstore.retention.unread.ms"],
        )
        deletes = "delete" in settings["cleanup.policy"].split(",")
        return limits if deletes and (limits.age_ms, limits.size_bytes) != (UNLIMITED, UNLIMITED) else None


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """What the retention asks of a batch."""

    last_offset: int
    size_bytes: int
    """As retention.bytes counts it."""

    max_timestamp_ms: int


def expired_through(
    batches: Sequence[StoredBatch],
    limits: RetentionLimits,
    *,
    now_ms: int,
    excess_bytes: int,
    read_offset: int | None,
) -> int | None:
    """Return the last offset of the last batch that goes, of a partition's first ones; None if the first one stays.

    Args:
        batches: the first batches of the partition, in order.
        limits: what the topic keeps.
        now_ms: the time in milliseconds since 1970.
        excess_bytes: by how much the partition takes more than `limits.size_bytes`.
        read_offset: the offset below which every group has read everything; None: no group has committed there.
    """
    last_offset: int | None = None
    for batch in batches:
        age_ms = now_ms - batch.max_timestamp_ms
        is_too_old = limits.age_ms != UNLIMITED and age_ms > limits.age_ms
        is_too_much = limits.size_bytes != UNLIMITED and batch.size_bytes <= excess_bytes
        if not is_too_old and not is_too_much:
            break
        is_unread = read_offset is not None and batch.last_offset >= read_offset
        if is_unread and (limits.unread_ms == UNLIMITED or age_ms <= limits.unread_ms):
            break
        excess_bytes -= batch.size_bytes
        last_offset = batch.last_offset
    return last_offset


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A partition of which something may have to go."""

    partition_id: int
    topic_uuid: str | None
    """Whose partition it was when this was found."""

    oldest_ms: int
    last_stable_offset: int
    limits: RetentionLimits | None
    """What its topic keeps; None: everything."""

    has_leftovers: bool
    """Whether a deletion was interrupted before it had deleted what lies below the log start."""


def delete_expired_batches(
    store: Store, cluster: Cluster | None = None, portions: Portions | None = None, *, batches_max: int
) -> int:
    """Delete what the retention of the topics does not keep; return how many batches.

    At least `batches_max`, or all that there are, or what there is time for: those first whose partition has the
    oldest, a portion of each in turn.  Where a topic keeps what its groups have not read, the groups of all databases
    of the cluster are asked; while one of them is away or refuses, such a topic keeps what it would keep for a group
    that has read nothing.

    Raises:
        InvalidConfiguration: the settings of a topic cannot be read; it keeps everything, and what the others do not
            keep was deleted.
        TxnStoreError: the database refused; what was deleted before stays so.
    """
    portions = portions or Portions()
    now_ms, limits_of, refusal = store.read(_read_limits)
    candidates = sorted(_candidates(store, limits_of, now_ms), key=lambda candidate: candidate.oldest_ms)
    read_offsets: _ReadOffsets = {}
    if any(candidate.limits is not None and candidate.limits.unread_ms != 0 for candidate in candidates):
        read_offsets = _offsets_read_by_all(store, cluster)
    deleted = 0
    while candidates:
        unfinished: list[_Candidate] = []
        for candidate in candidates:
            # A topic that is deleted meanwhile has nothing left to be kept or not.
            with suppress(UnknownTopicOrPartition):
                portion, may_have_more = _expire(store, candidate, now_ms, read_offsets, portions)
                deleted += portion
                if may_have_more:
                    unfinished.append(candidate)
            if deleted >= batches_max or portions.is_over:
                return deleted
        candidates = unfinished
    if refusal is not None:
        raise refusal
    return deleted


def _read_limits(
    connection: Connection,
) -> tuple[int, Mapping[int, RetentionLimits | None], InvalidConfiguration | None]:
    """Return the time, what each topic keeps, and why one keeps everything: nobody can read its settings."""
    texts: dict[int, dict[str, str]] = {}
    for row in connection.execute(_CONFIGS):
        texts.setdefault(row.topic_id, {})[row.name] = row.value
    limits: dict[int, RetentionLimits | None] = {}
    refusal: InvalidConfiguration | None = None
    for topic_id, texts_of_topic in texts.items():
        try:
            limits[topic_id] = RetentionLimits.of(texts_of_topic)
        except InvalidConfiguration as error:
            limits[topic_id] = None
            refusal = refusal or settings_error(connection, topic_id, error)
    return connection.execute(_NOW).scalar_one(), defaultdict(lambda: RetentionLimits.of({}), limits), refusal


def _candidates(store: Store, limits_of: Mapping[int, RetentionLimits | None], now_ms: int) -> Iterator[_Candidate]:
    """Yield the partitions with something that is too old, or that may take too much."""
    rows: Sequence[Any] = ()
    after_partition_id = -1
    while len(rows) == LISTED_MAX or after_partition_id < 0:
        after = {"after_partition_id": after_partition_id}
        rows = store.read(lambda connection, after=after: connection.execute(_PARTITIONS, after).all())  # type: ignore[misc]
        for row in rows:
            start, end = row.log_start_offset, row.last_stable_offset
            limits = limits_of[row.topic_id] if row.oldest_ms is not None and start < end else None
            has_leftovers = row.first_stored_offset is not None and row.first_stored_offset < start
            if has_leftovers or (limits is not None and _may_exceed(row, limits, now_ms)):
                yield _Candidate(row.partition_id, row.topic_uuid, row.oldest_ms or 0, end, limits, has_leftovers)
        after_partition_id = rows[-1].partition_id if rows else 0


def _may_exceed(row: Any, limits: RetentionLimits, now_ms: int) -> bool:
    """Return whether a partition's first batch is too old, or its size too large or not known."""
    if limits.age_ms != UNLIMITED and now_ms - row.oldest_ms > limits.age_ms:
        return True
    is_counted = row.counted_offset == row.next_offset and row.size_bytes <= limits.size_bytes
    return limits.size_bytes != UNLIMITED and not is_counted


def _offsets_read_by_all(store: Store, cluster: Cluster | None) -> _ReadOffsets:
    """Return below which offset all groups have read, by partition; None: not all groups can be asked."""
    read_offsets: dict[int, _ReadUpTo] = {}
    if cluster is None:
        _note_committed(store, read_offsets)
        return read_offsets
    # Groups may live in a database that has joined since.
    cluster.has_learned_of_others()
    left_out: LeftOut = {}
    for one in cluster.stores(left_out):
        with cluster.leaving_out(one.database_id, left_out):
            _note_committed(one, read_offsets)
    cluster.warn_of(left_out)
    return None if left_out else read_offsets


def _note_committed(store: Store, read_offsets: dict[int, _ReadUpTo]) -> None:
    for row in _committed(store):
        offset, place = read_offsets.get(row.partition_id, _ReadUpTo())
        if row.offset_in_transaction is None:
            offset = min(offset, row.committed_offset)
        else:
            place = min(place, row.committed_offset)
        read_offsets[row.partition_id] = _ReadUpTo(offset, place)


def _read_offset(store: Store, partition_id: int, read_offsets: _ReadOffsets) -> int | None:
    """Return below which offset all groups have read everything; None: no group has committed there."""
    if read_offsets is None:
        return 0
    up_to = read_offsets.get(partition_id)
    if up_to is None:
        return None
    if up_to.place == OFFSET_MAX:
        return up_to.offset
    # What is committed after the place may have begun long before it.
    return min(up_to.offset, store.read(lambda connection: first_unread_offset(connection, partition_id, up_to.place)))


def _committed(store: Store) -> Iterator[Any]:
    """Yield everything that groups have committed in a database."""
    after: tuple[str, int] | None = ("", -1)
    while after is not None:
        of = {"after_group_id": after[0], "after_partition_id": after[1]}
        rows = store.read(lambda connection, of=of: connection.execute(_COMMITTED, of).all())  # type: ignore[misc]
        yield from rows
        after = (rows[-1].group_id, rows[-1].partition_id) if len(rows) == LISTED_MAX else None


def _expire(
    store: Store, candidate: _Candidate, now_ms: int, read_offsets: _ReadOffsets, portions: Portions
) -> tuple[int, bool]:
    """Delete what goes of the partition's first batches; return how many, and whether more may have to go.

    UnknownTopicOrPartition if the topic has been deleted meanwhile.
    """
    partition_id, limits = candidate.partition_id, candidate.limits
    left = delete_below_log_start(store, partition_id, portions) if candidate.has_leftovers else 0
    if limits is None or (left and portions.is_over):
        return left, False
    if limits.size_bytes != UNLIMITED and not count_stored(store, partition_id, portions):
        return left, False
    found = store.read(partial(_first_batches, candidate))
    if found is None:
        return left, False
    storage, batches = found
    read_offset = None
    if limits.unread_ms != 0:
        read_offset = _read_offset(store, partition_id, read_offsets)
    through = expired_through(
        batches,
        limits,
        now_ms=now_ms,
        excess_bytes=storage.size_bytes - limits.size_bytes,
        read_offset=read_offset,
    )
    if through is None:
        return left, False
    if not portions.write(store, partial(_move_log_start, candidate, storage, through + 1)):
        return left, False
    deleted = delete_below_log_start(store, partition_id, portions)
    return left + deleted, through == batches[-1].last_offset and len(batches) == ROWS_AT_ONCE


def _first_batches(
    candidate: _Candidate, connection: Connection
) -> tuple[PartitionStorage, Sequence[StoredBatch]] | None:
    """Return the first stored batches of a partition, and in the same snapshot what it takes with them.

    None: its topic has been told meanwhile to keep something else, or is newer than what was read of all settings.
    The next deletion knows what it keeps.
    """
    if not _still_holds(candidate, connection):
        return None
    storage = read_storage(connection, candidate.partition_id)
    page = {
        "of_partition_id": candidate.partition_id,
        "from_offset": storage.first_stored_offset,
        "end_offset": candidate.last_stable_offset,
        "batches_max": ROWS_AT_ONCE,
    }
    rows = connection.execute(_FROM_START, page)
    batches = [StoredBatch(row.last_offset, batch_bytes(row.size_bytes), row.max_timestamp_ms) for row in rows]
    return storage, batches


def _move_log_start(candidate: _Candidate, storage: PartitionStorage, offset: int, connection: Connection) -> bool:
    """Move the log start to the offset; False: something else is to be kept by now than what that follows from."""
    # Somebody may have held the head's lock for long. What a topic is told until it is had holds.
    lock_heads(connection, [candidate.partition_id])
    limits = candidate.limits
    if limits is None or not _still_holds(candidate, connection):
        return False
    if limits.size_bytes != UNLIMITED:
        # Who has compacted or deleted some of it meanwhile has left less that is too much.
        standing = read_storage(connection, candidate.partition_id)
        if standing.size_bytes < storage.size_bytes:
            return False
    advance_log_start(connection, candidate.partition_id, offset)
    return True


def _still_holds(candidate: _Candidate, connection: Connection) -> bool:
    """Return whether the partition's topic keeps what it was found to keep, and no other one has its number by now."""
    told = connection.execute(_TOLD, {"of_partition_id": candidate.partition_id}).all()
    if (told[0].topic_uuid if told else None) != candidate.topic_uuid:
        return False
    return RetentionLimits.of({row.name: row.value for row in told if row.name is not None}) == candidate.limits
