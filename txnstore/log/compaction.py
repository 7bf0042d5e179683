"""The compaction: of the records with one key only the newest stays, where a topic's cleanup.policy has `compact`.

A pass over a partition reads what has come since the last one, remembers the newest offset of each key, and then goes
over the whole log: a record with a newer one after it goes, an aborted one goes whatever follows it, and never
makes another go.  One without a key stays, for nothing replaces it.  What is left of a batch takes the batch's place,
with its offsets, so nobody's position changes; a batch of which nothing is left is deleted.  Nothing at or past the
last stable offset is touched.

A tombstone (a record without a value) goes once it has been the newest of its key for `delete.retention.ms` after a
pass, so that readers who are late still learn of it, and so does a marker, if its transaction has no record left by
then.  A batch needs no empty remainder, as Kafka leaves one: what producers did last is in `producer_states`.

A pass may stop anywhere.  What it did is right at any moment; how far the partition is compacted is written at its end.
How far an unfinished pass has come is written too, so that whatever continues it reads its keys again and nothing else.
A turn with no time for so many keys takes fewer: the pass then ends sooner, and the next one takes the rest.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any, Final
from weakref import WeakKeyDictionary, proxy

from sqlalchemy import Connection, and_, bindparam, delete, func, select, update

from txnstore.config import TOPIC_SETTINGS, Settings, is_compacted, settings_in_force
from txnstore.db.portions import Portions
from txnstore.db.schema import (
    finished_transactions,
    partition_heads,
    partition_storage,
    partitions,
    record_batches,
    topic_configs,
    topics,
)
from txnstore.db.statements import HotStatement
from txnstore.db.store import LISTED_MAX, Store, server_now_ms
from txnstore.errors import InvalidConfiguration, TxnStoreError, UnknownTopicOrPartition
from txnstore.log.bounds import Bounds, first_marker_reaching, first_reaching, read_bounds
from txnstore.log.codec import EncodedBatch, RecordBatch, RecordColumns, decode, encode_columns
from txnstore.log.columns import unpack_integers
from txnstore.log.fetch import IS_COMMITTED
from txnstore.log.partition_storage import (
    STORED_BATCHES,
    PartitionStorage,
    batch_bytes,
    bytes_behind,
    count_stored,
    last_that_fits,
    lock_storage,
    next_horizons,
    read_horizons,
    read_storage,
    save_storage,
)
from txnstore.log.topics import settings_error
from txnstore.model import ControlType

#: How many keys a pass remembers: about 30 MiB.  Where more have come it stops before them, and the next pass goes on.
KEYS_MAX: Final = 200_000
#: A longer key is remembered by its hash.
_KEY_BYTES_MAX: Final = 16
#: Times at which tombstones go are no nearer to each other than this part of `delete.retention.ms`.
_HORIZONS_IN_RETENTION: Final = 24
_NAMES: Final = (
    "cleanup.policy",
    "delete.retention.ms",
    "max.compaction.lag.ms",
    "min.cleanable.dirty.ratio",
    "min.compaction.lag.ms",
)

_NOW: Final = select(server_now_ms())
_CONFIGS: Final = select(topic_configs).where(topic_configs.c.name.in_(_NAMES))
_PARTITIONS: Final = (
    select(
        partitions.c.partition_id,
        partitions.c.topic_id,
        (func.coalesce(partition_storage.c.counted_offset, -1) == partition_heads.c.next_offset).label("is_counted"),
    )
    # Only those that live in this database have a head.
    .join(partition_heads, partition_heads.c.partition_id == partitions.c.partition_id)
    .outerjoin(partition_storage, partition_storage.c.partition_id == partitions.c.partition_id)
    .where(partitions.c.topic_id.in_(bindparam("topic_ids", expanding=True)))
    .order_by(partitions.c.partition_id)
)
_MAY_HAVE_GAPS: Final = HotStatement(
    select(partitions.c.partition_id)
    .outerjoin(partition_storage, partition_storage.c.partition_id == partitions.c.partition_id)
    .outerjoin(topic_configs, topic_configs.c.topic_id == partitions.c.topic_id)
    .where(partitions.c.partition_id == bindparam("of_partition_id"))
    .where(
        (partition_storage.c.compacted_offset > 0)
        | partition_storage.c.unfinished_pass.is_not(None)
        | and_(topic_configs.c.name == "cleanup.policy", topic_configs.c.value.contains("compact"))
    )
)
_CONFIGS_OF_PARTITION: Final = _CONFIGS.join(partitions, partitions.c.topic_id == topic_configs.c.topic_id).where(
    partitions.c.partition_id == bindparam("of_partition_id")
)
_TOPIC_OF_PARTITION: Final = (
    select(topics.c.topic_uuid)
    .join(partitions, partitions.c.topic_id == topics.c.topic_id)
    .where(partitions.c.partition_id == bindparam("of_partition_id"))
)
_OF_PARTITION: Final = record_batches.c.partition_id == bindparam("of_partition_id")
_FROM: Final = record_batches.c.last_offset >= bindparam("from_offset")
_FIRST_YOUNG: Final = (
    select(record_batches.c.base_offset)
    .where(_OF_PARTITION, _FROM, record_batches.c.max_timestamp_ms > bindparam("after_ms"))
    .order_by(record_batches.c.last_offset)
    .limit(1)
)
_FIRST_MS: Final = (
    select(record_batches.c.max_timestamp_ms)
    .where(_OF_PARTITION, _FROM)
    .order_by(record_batches.c.last_offset)
    .limit(1)
)
_COUNT_AND_BYTES: Final = select(func.count(), func.coalesce(func.sum(record_batches.c.size_bytes), 0)).where(
    _OF_PARTITION, _FROM
)
_THROUGH: Final = record_batches.c.last_offset <= bindparam("through_offset")
_COMMITTED: Final = (
    select(record_batches)
    .where(_OF_PARTITION, _FROM, _THROUGH, record_batches.c.control_type.is_(None), IS_COMMITTED)
    .order_by(record_batches.c.last_offset)
    .execution_options(binary_rows=True)
)
_BATCHES: Final = (
    select(
        record_batches,
        # Of records: how their transaction ended.  Of a marker: the epoch of the records that it ended.
        select(finished_transactions.c.outcome)
        .where(finished_transactions.c.partition_id == record_batches.c.partition_id)
        .where(finished_transactions.c.producer_id == record_batches.c.producer_id)
        .where(finished_transactions.c.producer_epoch == record_batches.c.producer_epoch)
        .correlate(record_batches)
        .scalar_subquery()
        .label("outcome"),
        select(finished_transactions.c.producer_epoch)
        .where(finished_transactions.c.partition_id == record_batches.c.partition_id)
        .where(finished_transactions.c.marker_offset == record_batches.c.last_offset)
        .correlate(record_batches)
        .scalar_subquery()
        .label("ended_epoch"),
        select(finished_transactions.c.first_offset)
        .where(finished_transactions.c.partition_id == record_batches.c.partition_id)
        .where(finished_transactions.c.marker_offset == record_batches.c.last_offset)
        .correlate(record_batches)
        .scalar_subquery()
        .label("ended_first_offset"),
    )
    .where(_OF_PARTITION, _FROM, _THROUGH)
    .order_by(record_batches.c.last_offset)
    .execution_options(binary_rows=True)
)
_OF_TRANSACTION: Final = (
    select(record_batches.c.last_offset)
    .where(_OF_PARTITION, _FROM, _THROUGH, record_batches.c.control_type.is_(None))
    .where(record_batches.c.producer_id == bindparam("of_producer_id"))
    .where(record_batches.c.producer_epoch == bindparam("of_producer_epoch"))
    .limit(1)
)
# A batch that somebody else has rewritten or deleted since it was read is not hit.
_THIS_BATCH: Final = and_(
    _OF_PARTITION,
    record_batches.c.last_offset == bindparam("of_last_offset"),
    record_batches.c.record_count == bindparam("of_record_count"),
    record_batches.c.crc == bindparam("of_crc"),
)
_DELETE: Final = delete(record_batches).where(_THIS_BATCH)
#: What stays of a batch whatever is left in it.
_KEPT: Final = {"producer_id", "producer_epoch", "base_sequence", "is_transactional", "timestamp_type"}
_REWRITTEN: Final = [
    name for name in EncodedBatch.__dataclass_fields__ if name not in {*_KEPT, "control_type", "coordinator_epoch"}
]
_REWRITE: Final = (
    update(record_batches).where(_THIS_BATCH).values({name: bindparam(f"new_{name}") for name in _REWRITTEN})
)
_DELETE_FINISHED: Final = delete(finished_transactions).where(
    finished_transactions.c.partition_id == bindparam("of_partition_id"),
    finished_transactions.c.marker_offset == bindparam("of_last_offset"),
)


# Named like what others use: at the interpreter's end private names go first, while a pass may still be waiting.
class ToldOtherwise(Exception):
    """The topic has been told since its pass was begun to keep other records, or for longer; or it is another one."""


@dataclass(frozen=True, slots=True)
class _Due:
    """A partition that is to be compacted."""

    partition_id: int
    topic_uuid: str | None
    """Whose partition it was when this was found."""

    settings: Settings
    dirty_ratio: float
    start_offset: int
    """Where the stored batches begin."""

    dirty_offset: int
    """Where that begins which no pass has seen."""

    end_offset: int
    """Where this pass ends."""

    deletable_offset: int
    """Tombstones and markers below it go."""

    compacted_offset: int
    """How far the partition was compacted when this was found."""

    going_on: _PassProgress | None
    """How far somebody has come with this pass; None: nobody has begun it."""


@dataclass(frozen=True, slots=True)
class _PassProgress:
    """How far a pass has come: `partition_storage.unfinished_pass`, a JSON array in this order."""

    compacted_offset: int
    """How far the partition was compacted before it: once that has changed, the pass is of no use any more."""

    end_offset: int
    swept_offset: int
    """Below it the pass has done its work."""

    deletable_offset: int
    leaves_horizon: int
    """Whether something stays there that goes at a later time."""


@dataclass(frozen=True, slots=True)
class _Progress:
    """What a portion of a pass has done."""

    of: _Pass
    batches_passed: int
    batches_changed: int = 0


#: Passes of those who have time, which are not finished: they go on where they stopped, and know their keys.
_unfinished: Final[WeakKeyDictionary[Store, Iterator[_Progress]]] = WeakKeyDictionary()


def compact_partitions(store: Store) -> int:
    """Compact the partitions of this database that are due, the one with the most to gain first.

    Returns:
        How many batches were rewritten or deleted.

    Raises:
        TxnStoreError: the database refused, a batch is damaged, or the settings of a topic cannot be read; the other
            partitions were compacted.
    """
    return sum(progress.batches_changed for progress in _passes(store, Portions()))


def compact_portion(store: Store, portions: Portions | None = None, *, batches_max: int) -> int:
    """Go on where the last call stopped, or begin; return how many batches were passed.

    At least `batches_max`, or all that there are, or what there is time for: each is passed once for its keys and once
    to be thinned.  Who has time remembers the keys until the next call in this process, however long that is; what has
    come meanwhile is for the next pass.
    """
    portions = portions or Portions()
    known = None if portions.is_bounded else _unfinished.pop(store, None)
    # A pass that waits for the next call, with its keys, keeps no store alive that nobody uses any more.
    steps = known or _passes(proxy(store), portions)
    passed = 0
    for progress in steps:
        passed += progress.batches_passed
        if portions.is_over:
            progress.of.note()
            break
        if passed >= batches_max:
            if portions.is_bounded:
                progress.of.note()
            else:
                _unfinished[store] = steps
            break
    return passed


def _passes(store: Store, portions: Portions) -> Iterator[_Progress]:
    """Compact what is due, and yield after every portion."""
    failure: TxnStoreError | None
    now_ms, settings_of, failure = store.read(_read_settings)
    due = [found for found in _due_partitions(store, settings_of, now_ms, portions) if found is not None]
    for each in sorted(due, key=lambda partition: -partition.dirty_ratio):
        try:
            yield from _Pass(store, each, portions).steps()
        except (UnknownTopicOrPartition, ToldOtherwise):
            # The topic was deleted meanwhile; or the next look goes on, by what it has been told.
            continue
        except TxnStoreError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def may_have_gaps(connection: Connection, partition_id: int) -> bool:
    """Return whether offsets of the partition may be missing: it is compacted, or was once."""
    return bool(_MAY_HAVE_GAPS.rows(connection, {"of_partition_id": partition_id}))


def _read_settings(connection: Connection) -> tuple[int, dict[int, Settings], InvalidConfiguration | None]:
    """Return the time, the settings of the topics that are compacted, and why those of one cannot be read."""
    texts: dict[int, dict[str, str]] = {}
    for row in connection.execute(_CONFIGS):
        texts.setdefault(row.topic_id, {})[row.name] = row.value
    compacted: dict[int, Settings] = {}
    refusal: InvalidConfiguration | None = None
    for topic_id, of in texts.items():
        try:
            settings = settings_in_force(TOPIC_SETTINGS, of)
        except InvalidConfiguration as error:
            refusal = refusal or settings_error(connection, topic_id, error)
        else:
            if is_compacted(settings):
                compacted[topic_id] = settings
    return connection.execute(_NOW).scalar_one(), compacted, refusal


def _due_partitions(
    store: Store, settings_of: Mapping[int, Settings], now_ms: int, portions: Portions
) -> Iterator[_Due | None]:
    topic_ids = list(settings_of)
    for start in range(0, len(topic_ids), LISTED_MAX):
        some = {"topic_ids": topic_ids[start : start + LISTED_MAX]}
        found = store.read(lambda connection, some=some: connection.execute(_PARTITIONS, some).all())  # type: ignore[misc]
        for partition_id, topic_id, is_counted in found:
            try:
                if not is_counted and not count_stored(store, partition_id, portions):
                    return
                yield store.read(partial(_due, partition_id, settings_of[topic_id], now_ms))
            except UnknownTopicOrPartition:
                # The topic was deleted meanwhile.
                continue


def _due(partition_id: int, settings: Settings, now_ms: int, connection: Connection) -> _Due | None:
    """Return what is to be done in the partition; None: nothing yet."""
    storage = read_storage(connection, partition_id)
    bounds = read_bounds(connection, [partition_id])[partition_id]
    dirty_offset = max(storage.compacted_offset, bounds.log_start_offset)
    allowed_offset = end_offset = max(dirty_offset, _end_offset(connection, bounds, settings, now_ms, dirty_offset))
    horizons = read_horizons(storage)
    deletable_offset = max((offset for offset, from_ms in horizons if from_ms <= now_ms), default=0)
    has_new_horizon = any(0 < from_ms <= now_ms for _, from_ms in horizons)
    dirty_ratio = 0.0
    if end_offset > dirty_offset:
        size_bytes = max(0, storage.size_bytes - bytes_behind(connection, storage, end_offset))
        dirty_ratio = (size_bytes - storage.compacted_bytes) / max(1, size_bytes)
        since = {"of_partition_id": partition_id, "from_offset": dirty_offset}
        since_ms = connection.execute(_FIRST_MS, since).scalar()
        is_old = since_ms is not None and now_ms - since_ms > settings["max.compaction.lag.ms"]
        if dirty_ratio < settings["min.cleanable.dirty.ratio"] and not is_old:
            end_offset = dirty_offset
    if end_offset == dirty_offset and not has_new_horizon:
        return None
    going_on = None if storage.unfinished_pass is None else _PassProgress(*json.loads(storage.unfinished_pass))
    if going_on is not None and going_on.compacted_offset != storage.compacted_offset:
        going_on = None
    if going_on is not None:
        # Since it began, the topic may have been told to leave alone for longer what is young.
        end_offset = max(dirty_offset, min(going_on.end_offset, allowed_offset))
        deletable_offset = going_on.deletable_offset
    return _Due(
        partition_id,
        connection.execute(_TOPIC_OF_PARTITION, {"of_partition_id": partition_id}).scalar(),
        settings,
        dirty_ratio,
        storage.first_stored_offset,
        dirty_offset,
        end_offset,
        deletable_offset,
        storage.compacted_offset,
        going_on,
    )


def _end_offset(connection: Connection, bounds: Bounds, settings: Settings, now_ms: int, dirty_offset: int) -> int:
    """Return the first offset that is not to be compacted yet."""
    if settings["min.compaction.lag.ms"] == 0:
        return bounds.last_stable_offset
    after_ms = now_ms - settings["min.compaction.lag.ms"]
    first_marker = first_marker_reaching(connection, bounds, after_ms + 1, from_offset=dirty_offset)
    ends = [bounds.last_stable_offset, first_marker]
    # None is so young below the first one whose running maximum is: what is old is not passed.
    first_running_young = first_reaching(connection, bounds, after_ms + 1)
    if first_running_young is not None:
        from_offset = max(dirty_offset, first_running_young)
        young = {"of_partition_id": bounds.partition_id, "after_ms": after_ms, "from_offset": from_offset}
        ends.append(connection.execute(_FIRST_YOUNG, young).scalar())
    return min(end for end in ends if end is not None)


@dataclass(frozen=True, slots=True)
class _BatchChange:
    """A batch that is deleted, or rewritten with fewer records."""

    batch: Any
    rewritten: EncodedBatch | None = None

    @property
    def size_bytes(self) -> int:
        """How much less the batch takes, as `batch_bytes` counts it."""
        before = batch_bytes(self.batch.size_bytes)
        return before if self.rewritten is None else before - batch_bytes(self.rewritten.size_bytes)


@dataclass(slots=True)
class _Pass:
    """One pass over a partition."""

    store: Store
    due: _Due
    portions: Portions = field(default_factory=Portions)
    #: The newest offset of each key, of what no pass has seen before.
    _newest: dict[bytes, int] = field(default_factory=dict)
    #: So that nobody can choose keys with one hash.
    _hash_key: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    #: Where the first batch begins whose keys were too many.
    _forgotten_offset: int = 0
    #: Transactions of which a record stays, until their marker comes: producer id and epoch.
    _alive: set[tuple[int, int]] = field(default_factory=set)
    #: What is left of that which no pass had seen.
    _dirty_bytes: int = 0
    #: Whether something stays that goes at a later time.
    _leaves_horizon: bool = False
    _end_offset: int = 0
    #: Below it somebody else did the work of this pass, or nothing is stored.
    _resumed_offset: int = 0
    #: Below it all is done; and how far that is written down.
    _swept_offset: int = 0
    _noted_offset: int = 0

    def steps(self) -> Iterator[_Progress]:
        """Compact the partition, and yield after every portion."""
        self._end_offset = self.due.end_offset
        self._resumed_offset = self.due.start_offset
        if self.due.going_on is not None:
            standing = self.due.going_on
            self._resumed_offset = max(self._resumed_offset, standing.swept_offset)
            self._leaves_horizon = bool(standing.leaves_horizon)
        self._swept_offset = self._noted_offset = self._resumed_offset
        yield from self._remember_all()
        for rows, passed, behind_offset in self._pages(_BATCHES, self._swept_offset, self._end_offset):
            changes = [change for row in rows if (change := self._change(row)) is not None]
            changed = self._carry_out(changes, behind_offset)
            self._swept_offset = behind_offset
            yield _Progress(self, passed, changed)
        if self.due.going_on is not None:
            self._dirty_bytes = self.store.read(self._count_dirty)
        self.portions.write(self.store, self._finish)

    def note(self) -> None:
        """Write down how far the pass has come, for its continuation."""
        if self._swept_offset > self._noted_offset:
            self.portions.write(self.store, self._note)

    def _count_dirty(self, connection: Connection) -> int:
        """Return what is left of that which no pass had seen, where others have gone over some of it."""
        range_ = {
            "of_partition_id": self.due.partition_id,
            "from_offset": self.due.dirty_offset,
            "through_offset": self._end_offset - 1,
        }
        count, payload_bytes = connection.execute(_COUNT_AND_BYTES.where(_THROUGH), range_).one()
        return int(payload_bytes + count * batch_bytes(0))

    def _remember_all(self) -> Iterator[_Progress]:
        """Remember the newest offset of each key, of so many batches as there is room and time for."""
        # Half of the time is for what is done with them.
        until_seconds = self.portions.left_seconds / 2
        for rows, passed, behind_offset in self._pages(_COMMITTED, self.due.dirty_offset, self._end_offset):
            if not self._remember(rows):
                self._end_offset = self._forgotten_offset
                return
            if not self.portions.is_bounded:
                yield _Progress(self, passed)
            elif self.portions.left_seconds <= until_seconds:
                self._end_offset = behind_offset
                return

    def _carry_out(self, changes: Sequence[_BatchChange], behind_offset: int) -> int:
        """Carry out all of the changes, which lie below this offset; return how many.

        Who has rewritten one of the batches meanwhile may have left in it what this pass has seen a newer record of.
        Were that left behind, it would be there again once the newer one, a tombstone, has gone.
        """
        changed = 0
        while changes:
            missed = self.portions.write(self.store, partial(self._apply, changes, behind_offset))
            changed += len(changes) - len(missed)
            rows = [row for offset in missed for row in self.store.read(partial(self._batch, offset))]
            changes = [change for row in rows if (change := self._change_of(row)) is not None]
        return changed

    def _remember(self, rows: Sequence[Any]) -> bool:
        """Remember the newest offset of each key; return whether all of them could be."""
        for row in rows:
            if len(self._newest) >= KEYS_MAX:
                self._forgotten_offset = row.base_offset
                return False
            # A damaged batch raises here, and makes no record go.
            batch = decode(row)
            for offset, key in zip(batch.offsets(), batch.keys().cells(), strict=False):
                if key is not None:
                    self._newest[self._remembered(key)] = offset
        return True

    def _remembered(self, key: bytes) -> bytes:
        if len(key) <= _KEY_BYTES_MAX:
            return key
        # One byte longer than any key that is remembered as it is.
        return hashlib.blake2b(key, digest_size=_KEY_BYTES_MAX + 1, key=self._hash_key).digest()

    def _pages(self, statement: Any, from_offset: int, end_offset: int) -> Iterator[tuple[Sequence[Any], int, int]]:
        """Yield the rows of a range, about as many at once as one portion changes, how many batches, and their end."""
        while from_offset < end_offset:
            rows, passed, from_offset = self.store.read(partial(self._page, statement, from_offset, end_offset))
            yield rows, passed, from_offset

    def _page(
        self, statement: Any, from_offset: int, end_offset: int, connection: Connection
    ) -> tuple[Sequence[Any], int, int]:
        range_ = {"of_partition_id": self.due.partition_id, "from_offset": from_offset}
        found = connection.execute(
            STORED_BATCHES, {**range_, "end_offset": end_offset, "batches_max": self.portions.rows}
        ).all()
        if not found:
            return (), 0, end_offset
        through_offset = last_that_fits(found, self.portions.size_bytes)
        rows = connection.execute(statement, {**range_, "through_offset": through_offset}).all()
        passed = sum(row.last_offset <= through_offset for row in found)
        return rows, passed, through_offset + 1

    def _batch(self, last_offset: int, connection: Connection) -> Sequence[Any]:
        """Return the batch that ends there as it is now, if it is there."""
        range_ = {"from_offset": last_offset, "through_offset": last_offset}
        return connection.execute(_BATCHES, {"of_partition_id": self.due.partition_id, **range_}).all()

    def _change(self, row: Any) -> _BatchChange | None:
        """Return what becomes of a batch that is read for the first time; None: it stays as it is."""
        change = self._change_of(row)
        if row.last_offset >= self.due.dirty_offset:
            self._dirty_bytes += batch_bytes(row.size_bytes) - (0 if change is None else change.size_bytes)
        return change

    def _change_of(self, row: Any) -> _BatchChange | None:
        return self._change_of_marker(row) if row.control_type is not None else self._change_of_records(row)

    def _change_of_marker(self, row: Any) -> _BatchChange | None:
        transaction = (row.producer_id, row.ended_epoch)
        is_alive = transaction in self._alive
        self._alive.discard(transaction)
        if row.last_offset < self.due.deletable_offset and not is_alive and not self._was_alive(row):
            return _BatchChange(row)
        self._leaves_horizon = True
        return None

    def _was_alive(self, row: Any) -> bool:
        """Return whether the part of this pass that somebody else did has left a record of the marker's transaction."""
        if row.ended_first_offset is None or row.ended_first_offset >= self._resumed_offset:
            return False
        of = {
            "of_partition_id": row.partition_id,
            "from_offset": row.ended_first_offset,
            "through_offset": self._resumed_offset - 1,
            "of_producer_id": row.producer_id,
            "of_producer_epoch": row.ended_epoch,
        }
        return bool(self.store.read(lambda connection: connection.execute(_OF_TRANSACTION, of).all()))

    def _change_of_records(self, row: Any) -> _BatchChange | None:
        if row.is_transactional and row.outcome == int(ControlType.ABORT):
            return _BatchChange(row)
        batch = decode(row)
        stays = self._stays(batch)
        if not any(stays):
            return _BatchChange(row)
        if row.is_transactional:
            self._alive.add((row.producer_id, row.producer_epoch))
        return None if all(stays) else _BatchChange(row, _thinned(batch, stays))

    def _stays(self, batch: RecordBatch) -> list[bool]:
        """Return of each record whether it stays."""
        row = batch.row
        are_tombstones: Any = range(batch.record_count) if row.value_positions is None else ()
        if row.null_values is not None:
            are_tombstones = set(unpack_integers(row.null_values, "null_values"))
        stays = []
        for index, (offset, key) in enumerate(zip(batch.offsets(), batch.keys().cells(), strict=False)):
            if key is None:
                # Acknowledged before its producer had learned that the topic is compacted; nothing has replaced it.
                stays.append(True)
                continue
            is_newest = self._newest.get(self._remembered(key), -1) <= offset
            if is_newest and index in are_tombstones:
                is_newest = offset >= self.due.deletable_offset
                self._leaves_horizon |= is_newest
            stays.append(is_newest)
        return stays

    def _apply(self, changes: Sequence[_BatchChange], behind_offset: int, connection: Connection) -> list[int]:
        """Carry out changes of batches that are still what they were; return where the others end."""
        storage = lock_storage(connection, self.due.partition_id)
        if storage is None:
            raise UnknownTopicOrPartition(f"the topic of partition id {self.due.partition_id} was deleted meanwhile")
        self._check_settings(connection)
        missed: list[int] = []
        for change in changes:
            batch = change.batch
            if missed and batch.control_type is not None:
                # Something may be left of its transaction.
                missed.append(batch.last_offset)
                continue
            this = {
                "of_partition_id": batch.partition_id,
                "of_last_offset": batch.last_offset,
                "of_record_count": batch.record_count,
                "of_crc": batch.crc,
            }
            if change.rewritten is None:
                is_hit = connection.execute(_DELETE, this).rowcount == 1
                if is_hit and batch.control_type is not None:
                    connection.execute(_DELETE_FINISHED, this)
            else:
                columns = change.rewritten.columns()
                new = {f"new_{name}": columns[name] for name in _REWRITTEN}
                is_hit = connection.execute(_REWRITE, {**this, **new}).rowcount == 1
            if not is_hit:
                missed.append(batch.last_offset)
            else:
                is_counted = batch.last_offset < storage.counted_offset
                is_compacted = batch.last_offset < storage.compacted_offset
                storage = replace(
                    storage,
                    size_bytes=storage.size_bytes - change.size_bytes * is_counted,
                    compacted_bytes=max(0, storage.compacted_bytes - change.size_bytes * is_compacted),
                )
        # What was missed is looked at again: until then the pass has not come further.
        save_storage(connection, storage if missed else self._noted(storage, behind_offset))
        return missed

    def _check_settings(self, connection: Connection) -> None:
        """Go no further by what held when the pass was begun."""
        configs = connection.execute(_CONFIGS_OF_PARTITION, {"of_partition_id": self.due.partition_id})
        told = settings_in_force(TOPIC_SETTINGS, {row.name: row.value for row in configs})
        if told != self.due.settings or not self._is_of_its_topic(connection):
            raise ToldOtherwise

    def _is_of_its_topic(self, connection: Connection) -> bool:
        """Return whether no other topic has the partition's number: a restored controller may give it out again."""
        of_partition = {"of_partition_id": self.due.partition_id}
        return bool(connection.execute(_TOPIC_OF_PARTITION, of_partition).scalar() == self.due.topic_uuid)

    def _note(self, connection: Connection) -> None:
        storage = lock_storage(connection, self.due.partition_id)
        if storage is not None and self._is_of_its_topic(connection):
            save_storage(connection, self._noted(storage, self._swept_offset))

    def _noted(self, storage: PartitionStorage, swept_offset: int) -> PartitionStorage:
        """Return the row with how far the pass has come, unless somebody else has finished one meanwhile."""
        if storage.compacted_offset != self.due.compacted_offset:
            return storage
        self._noted_offset = swept_offset
        standing = _PassProgress(
            self.due.compacted_offset,
            self._end_offset,
            swept_offset,
            self.due.deletable_offset,
            int(self._leaves_horizon),
        )
        return replace(storage, unfinished_pass=json.dumps(astuple(standing)))

    def _finish(self, connection: Connection) -> None:
        """Write how far the partition is compacted."""
        storage = lock_storage(connection, self.due.partition_id)
        end_offset = self._end_offset
        if storage is None or storage.compacted_offset > max(end_offset, self.due.dirty_offset):
            # The topic is gone, or somebody else was faster and further.
            return
        if self.due.going_on is not None and storage.compacted_offset != self.due.compacted_offset:
            # The keys were read again, and somebody else may have taken some of them away meanwhile.
            return
        self._check_settings(connection)
        retention_ms = self.due.settings["delete.retention.ms"]
        new = None
        if self._leaves_horizon:
            new = (end_offset, connection.execute(_NOW).scalar_one() + retention_ms)
        horizons = next_horizons(
            read_horizons(storage), self.due.deletable_offset, new, apart_ms=retention_ms // _HORIZONS_IN_RETENTION
        )
        is_first = storage.compacted_offset < end_offset
        save_storage(
            connection,
            replace(
                storage,
                compacted_offset=max(storage.compacted_offset, end_offset),
                compacted_bytes=min(storage.size_bytes, storage.compacted_bytes + self._dirty_bytes * is_first),
                horizons=json.dumps(horizons),
                unfinished_pass=None,
            ),
        )


def _thinned(batch: RecordBatch, stays: Sequence[bool]) -> EncodedBatch:
    """Return the batch with only the records that stay, at their offsets."""
    offsets, timestamps_ms, keys, values, headers = zip(*compress(batch.rows(), stays), strict=True)
    encoded = encode_columns(
        RecordColumns(keys, values, timestamps_ms, headers),
        codec=batch.codec,
        producer=batch.producer,
        base_sequence=batch.base_sequence,
        is_transactional=batch.is_transactional,
        offset_deltas=[offset - batch.base_offset for offset in offsets],
    )
    return replace(encoded, timestamp_type=batch.timestamp_type)
