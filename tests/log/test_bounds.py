"""Bounds: log start, high watermark and last stable offset, and the offset at a time."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, delete, select, update

from tests.plans.measuring import measured
from tests.tools.campaigns import times
from txnstore.db.schema import partition_heads, record_batches
from txnstore.db.store import Store
from txnstore.errors import CorruptBatch, InvalidTimestamp, UnknownTopicOrPartition
from txnstore.log.append import Append, append
from txnstore.log.bounds import (
    Bounds,
    OffsetAndTimestamp,
    first_marker_reaching,
    first_reaching,
    last_stable_offset,
    offset_for_time,
    offset_of_max_timestamp,
    read_bounds,
)
from txnstore.log.codec import EncodedBatch, encode
from txnstore.log.locked_partitions import LockedPartitions, Marker, write_markers
from txnstore.log.partition_rows import allocate_producer_id
from txnstore.log.topics import create_topic
from txnstore.model import ControlType, IsolationLevel, ProducerIdentity, Record
from txnstore.testing.manual_clock import ManualClock

COMMITTED, UNCOMMITTED = IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED
LEVELS = pytest.mark.parametrize("isolation", [COMMITTED, UNCOMMITTED], ids=lambda level: level.name.lower())


class Log:
    """A partition that nobody else uses; each batch is given by the timestamps of its records."""

    def __init__(self, store: Store) -> None:
        self.store = store
        name = uuid.uuid4().hex
        topic = store.write(lambda connection: create_topic(connection, name, partition_count=2))
        self.partition_ids = topic.partition_ids
        self.id = topic.partition_ids[0]

    def plain(self, *timestamps_ms: int) -> None:
        self._append(encode([Record(b"x", timestamp_ms=timestamp_ms) for timestamp_ms in timestamps_ms]))

    def open(self, *timestamps_ms: int) -> ProducerIdentity:
        """Begin a transaction with these records."""
        producer = ProducerIdentity(self.store.write(allocate_producer_id), 0)
        records = [Record(b"x", timestamp_ms=timestamp_ms) for timestamp_ms in timestamps_ms]
        self._append(encode(records, producer=producer, base_sequence=0, is_transactional=True))
        return producer

    def _append(self, batch) -> None:
        self.store.write(lambda connection: append(connection, [Append(self.id, batch)], coordinated=True))

    def end(self, producer: ProducerIdentity, kind: ControlType) -> None:
        marker = Marker(self.id, ProducerIdentity(producer.producer_id, producer.epoch + 1), kind)
        self.store.write(lambda connection: write_markers(connection, [marker]))

    def set_head(self, **columns: int) -> None:
        statement = update(partition_heads).where(partition_heads.c.partition_id == self.id).values(columns)
        self.store.write(lambda connection: connection.execute(statement))

    @property
    def bounds(self) -> tuple[int, int, int]:
        found = self.store.read(lambda connection: read_bounds(connection, [self.id]))[self.id]
        return found.log_start_offset, found.high_watermark, found.last_stable_offset

    def at(self, timestamp_ms: int, isolation: IsolationLevel = UNCOMMITTED) -> tuple[int, int] | None:
        found = self.store.read(lambda connection: offset_for_time(connection, self.id, timestamp_ms, isolation))
        return None if found is None else (found.offset, found.timestamp_ms)

    def largest(self) -> tuple[int, int] | None:
        found = self.store.read(lambda connection: offset_of_max_timestamp(connection, self.id, UNCOMMITTED))
        return None if found is None else (found.offset, found.timestamp_ms)


@pytest.fixture
def log(shared_store: Store) -> Log:
    return Log(shared_store)


def test_an_empty_partition_is_0_everywhere(log: Log) -> None:
    assert log.bounds == (0, 0, 0)


def test_without_open_transactions_the_last_stable_offset_is_the_high_watermark(log: Log) -> None:
    log.plain(1, 2)
    assert log.bounds == (0, 2, 2)
    log.end(log.open(3), ControlType.COMMIT)
    assert log.bounds == (0, 4, 4)


@pytest.mark.parametrize("kind", list(ControlType), ids=lambda kind: kind.name.lower())
def test_the_last_stable_offset_is_where_the_oldest_open_transaction_begins(log: Log, kind: ControlType) -> None:
    log.plain(1)
    first, second, third = log.open(2, 2), log.open(3), log.open(4)
    assert log.bounds == (0, 5, 1)
    log.end(second, kind)
    assert log.bounds == (0, 6, 1)
    log.end(first, kind)
    assert log.bounds == (0, 7, 4)
    log.end(third, kind)
    assert log.bounds == (0, 8, 8)


def test_the_last_stable_offset_is_not_below_the_start_of_the_log(log: Log) -> None:
    """Not even where the first records of an open transaction are deleted."""
    log.open(10, 20)
    log.plain(30)
    log.set_head(log_start_offset=2)
    assert log.bounds == (2, 3, 2)


def test_the_end_that_a_reader_does_not_reach_depends_on_its_isolation() -> None:
    bounds = Bounds(1, 2, 9, 5)
    assert (bounds.end(COMMITTED), bounds.end(UNCOMMITTED)) == (5, 9)


def test_bounds_of_several_partitions_come_in_one_answer(log: Log) -> None:
    log.plain(1)
    found = log.store.read(lambda connection: read_bounds(connection, [*log.partition_ids, log.id]))
    assert {number: bounds.high_watermark for number, bounds in found.items()} == dict(
        zip(log.partition_ids, (1, 0), strict=True)
    )
    assert log.store.read(lambda connection: last_stable_offset(connection, log.id)) == 1
    assert log.store.read(lambda connection: read_bounds(connection, [])) == {}


def test_a_partition_that_is_not_there_is_refused(log: Log) -> None:
    with pytest.raises(UnknownTopicOrPartition):
        log.store.read(lambda connection: read_bounds(connection, [log.id, 10**12]))
    with pytest.raises(UnknownTopicOrPartition):
        log.store.read(lambda connection: offset_for_time(connection, 10**12, 0, COMMITTED))


@pytest.mark.parametrize("start", [2**31 - 1, 2**31, 2**62])
def test_bounds_have_63_bits(log: Log, start: int) -> None:
    log.set_head(next_offset=start, log_start_offset=start)
    log.plain(1)
    producer = log.open(2)
    assert log.bounds == (start, start + 2, start + 1)
    assert log.at(2) == (start + 1, 2)
    log.end(producer, ControlType.ABORT)
    assert log.bounds == (start, start + 3, start + 3)


RISING: Sequence[tuple[int, ...]] = [(10, 20), (30,), (30, 40)]
FALLING: Sequence[tuple[int, ...]] = [(50, 10), (40, 60, 20), (5,), (60, 70)]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("batches", "timestamp_ms", "expected"),
    [
        pytest.param(RISING, 0, (0, 10), id="before everything"),
        pytest.param(RISING, -5, (0, 10), id="before 1970"),
        pytest.param(RISING, -(2**70), (0, 10), id="long before 1970"),
        pytest.param(RISING, 10, (0, 10), id="the first"),
        pytest.param(RISING, 11, (1, 20), id="in the middle of a batch"),
        pytest.param(RISING, 30, (2, 30), id="the first of equal ones"),
        pytest.param(RISING, 31, (4, 40), id="the second record of the last batch"),
        pytest.param(RISING, 40, (4, 40), id="the last"),
        pytest.param(RISING, 41, None, id="after everything"),
        pytest.param(RISING, 2**63 - 1, None, id="the end of time"),
        pytest.param(FALLING, 0, (0, 50), id="out of order: the first record"),
        pytest.param(FALLING, 50, (0, 50), id="out of order: the first that is late enough"),
        pytest.param(FALLING, 51, (3, 60), id="out of order: inside the second batch"),
        pytest.param(FALLING, 60, (3, 60), id="out of order: the first of equal ones"),
        pytest.param(FALLING, 61, (7, 70), id="out of order: over a batch of earlier ones"),
        pytest.param(FALLING, 71, None, id="out of order: none"),
        pytest.param([], 0, None, id="an empty log"),
    ],
)
@LEVELS
def test_the_first_record_with_the_timestamp_or_a_later_one(
    log: Log,
    isolation: IsolationLevel,
    batches: Sequence[tuple[int, ...]],
    timestamp_ms: int,
    expected: tuple[int, int] | None,
) -> None:
    for timestamps_ms in batches:
        log.plain(*timestamps_ms)
    assert log.at(timestamp_ms, isolation) == expected


@pytest.mark.parametrize("timestamp_ms", [2**63, 1.5, True, None, "1"], ids=repr)
def test_what_is_no_time_is_refused(log: Log, timestamp_ms: object) -> None:
    with pytest.raises(InvalidTimestamp):
        log.at(timestamp_ms)  # type: ignore[arg-type]


def test_nothing_at_or_past_the_last_stable_offset_is_found_for_a_reader_of_committed_records(log: Log) -> None:
    log.plain(10)
    producer = log.open(20)
    log.plain(30)
    assert [log.at(timestamp_ms, COMMITTED) for timestamp_ms in (10, 11, 21)] == [(0, 10), None, None]
    assert [log.at(timestamp_ms) for timestamp_ms in (10, 11, 21)] == [(0, 10), (1, 20), (2, 30)]
    log.end(producer, ControlType.COMMIT)
    assert [log.at(timestamp_ms, COMMITTED) for timestamp_ms in (10, 11, 21)] == [(0, 10), (1, 20), (2, 30)]


@LEVELS
def test_aborted_records_count_as_in_kafka(log: Log, isolation: IsolationLevel) -> None:
    log.end(log.open(10, 20), ControlType.ABORT)
    log.plain(30)
    assert log.at(15, isolation) == (1, 20)


@LEVELS
def test_markers_do_not_count_and_hide_nothing_behind_them(log: Log, shared_clock, isolation: IsolationLevel) -> None:
    """A marker has the store's time, which is far ahead of these records."""
    log.end(log.open(10), ControlType.COMMIT)
    log.plain(20)
    log.end(log.open(30), ControlType.ABORT)
    log.plain(40)
    assert [log.at(timestamp_ms, isolation) for timestamp_ms in (11, 21, 31)] == [(2, 20), (3, 30), (5, 40)]
    assert log.at(41, isolation) is None
    assert log.at(shared_clock.now_ms(), isolation) is None


def test_records_before_the_start_of_the_log_do_not_count(log: Log) -> None:
    log.plain(10, 50, 20)
    log.plain(30)
    log.set_head(log_start_offset=2)
    assert [log.at(timestamp_ms) for timestamp_ms in (0, 20, 21, 31)] == [(2, 20), (2, 20), (3, 30), None]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("seed", range(4))
def test_the_first_batch_that_reaches_a_time_is_found_wherever_batches_are_gone(log: Log, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(chance.randrange(12, 20)):
        times_ms = [chance.randrange(40) for _ in range(chance.choice((1, 1, 2, 7)))]
        if chance.random() < 0.3:
            log.end(log.open(*times_ms), chance.choice(list(ControlType)))
        else:
            log.plain(*times_ms)
    of_partition = record_batches.c.partition_id == log.id
    rows = select(record_batches.c.last_offset, record_batches.c.running_max_timestamp_ms).where(of_partition)
    last_offsets = log.store.read(lambda connection: connection.execute(rows).scalars().all())
    gone = record_batches.c.last_offset.in_(chance.sample(last_offsets, len(last_offsets) // 3))
    log.store.write(lambda connection: connection.execute(delete(record_batches).where(of_partition, gone)))
    left = sorted(tuple(row) for row in log.store.read(lambda connection: connection.execute(rows).all()))
    for start in (0, chance.randrange(log.bounds[1]), log.bounds[1]):
        log.set_head(log_start_offset=start)
        bounds = log.store.read(lambda connection: read_bounds(connection, [log.id]))[log.id]
        for at_ms in range(42):
            expected = next((offset for offset, max_ms in left if offset >= start and max_ms >= at_ms), None)
            found = log.store.read(lambda connection, at_ms=at_ms, of=bounds: first_reaching(connection, of, at_ms))
            assert found == expected, (start, at_ms, left)


def test_what_is_appended_at_once_has_one_largest_time_and_each_record_its_own(log: Log) -> None:
    log.plain(30)
    together = [Append(log.id, encode([Record(b"x", timestamp_ms=ms)])) for ms in (20, 70, 40)]
    log.store.write(lambda connection: append(connection, together))
    log.plain(60)
    of_partition = record_batches.c.partition_id == log.id
    running = (
        select(record_batches.c.running_max_timestamp_ms).where(of_partition).order_by(record_batches.c.last_offset)
    )
    assert log.store.read(lambda connection: list(connection.execute(running).scalars())) == [30, 70, 70, 70, 70]
    assert [log.at(at_ms) for at_ms in (20, 31, 70, 71)] == [(0, 30), (2, 70), (2, 70), None]
    assert log.largest() == (2, 70)


#: One after the other, by one of three producers, or by nobody in particular: what is written and when it is said to
#: be from, or how a transaction ends.
_WROTE = st.lists(st.integers(1, 12), min_size=1, max_size=3)
_STEPS = st.lists(
    st.tuples(st.sampled_from([None, "A", "B", "C"]), _WROTE | st.sampled_from(ControlType) | st.none()), max_size=20
)


class RandomLog:
    """A log that comes to be in one database transaction, and where its records are."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        topic = create_topic(connection, uuid.uuid4().hex, partition_count=1)
        (self.id,) = topic.partition_ids
        #: Offset and timestamp of each record.
        self.records: list[tuple[int, int]] = []
        self.next_offset = 0
        #: By name; the sequence number is None outside transactions.
        self._producers: dict[str, tuple[ProducerIdentity, int]] = {}
        self._opened: dict[str, int] = {}

    def take(self, name: str | None, what: list[int] | ControlType | None) -> None:
        """Let a producer write, end its transaction by a marker alone, or write and commit at once (None)."""
        if name is None:
            if isinstance(what, list):
                append(self.connection, [Append(self.id, self._batch(what))])
        elif isinstance(what, list):
            append(self.connection, [Append(self.id, self._of(name, what))], coordinated=True)
        elif name in self._opened and what is not None:
            write_markers(self.connection, [self._marker(name, what)])
        elif what is None:
            self.commit(name, [5])

    def commit(self, name: str, times_ms: list[int]) -> None:
        """Write, and have the marker placed with it, which is written otherwise than one that comes alone."""
        batch = self._of(name, times_ms)
        end = self._marker(name, ControlType.COMMIT)
        work = LockedPartitions.lock(self.connection, [end.key], [end.key])
        work.place(self.id, batch)
        work.place_marker(end)
        work.save()

    def _batch(self, times_ms: list[int], **of: Any) -> EncodedBatch:
        self.records += [(self.next_offset + number, ms) for number, ms in enumerate(times_ms)]
        self.next_offset += len(times_ms)
        return encode([Record(b"x", timestamp_ms=ms) for ms in times_ms], **of)

    def _of(self, name: str, times_ms: list[int]) -> EncodedBatch:
        if name not in self._producers:
            self._producers[name] = ProducerIdentity(allocate_producer_id(self.connection), 0), 0
        producer, sequence = self._producers[name]
        self._opened.setdefault(name, self.next_offset)
        self._producers[name] = producer, sequence + len(times_ms)
        return self._batch(times_ms, producer=producer, base_sequence=sequence, is_transactional=True)

    def _marker(self, name: str, kind: ControlType) -> Marker:
        producer, _ = self._producers[name]
        following = ProducerIdentity(producer.producer_id, producer.epoch + 1)
        self._producers[name] = following, 0
        del self._opened[name]
        self.next_offset += 1
        return Marker(self.id, following, kind)

    def end(self, isolation: IsolationLevel) -> int:
        return min(self._opened.values(), default=self.next_offset) if isolation is COMMITTED else self.next_offset


@pytest.mark.slow
@LEVELS
@pytest.mark.campaign
def test_a_time_is_found_as_by_looking_at_each_record(
    shared_store: Store, shared_clock: ManualClock, isolation: IsolationLevel
) -> None:
    # PostgreSQL takes longer for the same statements.
    @settings(max_examples=times(100 if shared_store.backend.name == "sqlite" else 30))
    @given(steps=_STEPS, start=st.integers(0, 40), is_late=st.lists(st.booleans(), min_size=20, max_size=20))
    def histories(steps: list[Any], start: int, is_late: list[bool]) -> None:
        now_ms = shared_clock.now_ms()

        def live(connection: Connection) -> None:
            log = RandomLog(connection)
            for (name, what), late in zip(steps, is_late, strict=False):
                # Some records are from 1970, others from about now.
                log.take(name, [ms + late * now_ms for ms in what] if isinstance(what, list) else what)
            first = min(start, log.end(COMMITTED))
            connection.execute(
                update(partition_heads).where(partition_heads.c.partition_id == log.id).values(log_start_offset=first)
            )
            readable = [place for place in log.records if first <= place[0] < log.end(isolation)]
            for at_ms in (0, 1, 5, 6, 12, 13, *(now_ms + ms for ms in (-1, 1, 5, 12, 13))):
                expected = next((OffsetAndTimestamp(*place) for place in readable if place[1] >= at_ms), None)
                assert offset_for_time(connection, log.id, at_ms, isolation) == expected, at_ms
            largest = min(readable, key=lambda place: (-place[1], place[0]), default=None)
            found = offset_of_max_timestamp(connection, log.id, isolation)
            assert found == (None if largest is None else OffsetAndTimestamp(*largest))
            rows = select(record_batches.c.running_max_timestamp_ms, record_batches.c.last_offset)
            for running_ms, last_offset in connection.execute(rows.where(record_batches.c.partition_id == log.id)):
                assert running_ms == max((ms for offset, ms in log.records if offset <= last_offset), default=-1)

        shared_store.write(live)

    histories()


@pytest.mark.slow
def test_markers_that_are_far_ahead_of_their_records_make_no_look_longer(
    shared_store: Store, shared_clock: ManualClock
) -> None:
    """As with records that were loaded, or have the times of events."""
    count, database = 300, shared_store.backend.name

    def write(connection: Connection) -> RandomLog:
        log = RandomLog(connection)
        for number in range(1, count + 1):
            log.commit("A", [number])
            shared_clock.advance(1)
        return log

    begun_ms = shared_clock.now_ms()
    log = shared_store.write(write)

    def look(connection: Connection) -> None:
        for at_ms in (1, count // 2, count):
            found = offset_for_time(connection, log.id, at_ms, COMMITTED)
            assert found == OffsetAndTimestamp(2 * at_ms - 2, at_ms)
        assert offset_for_time(connection, log.id, count + 1, COMMITTED) is None
        assert offset_of_max_timestamp(connection, log.id, COMMITTED) == OffsetAndTimestamp(2 * count - 2, count)
        bounds = read_bounds(connection, [log.id])[log.id]
        for number in (0, 1, count // 2, count - 1):
            marker = first_marker_reaching(connection, bounds, begun_ms + number, from_offset=0)
            assert marker == 2 * number + 1
            assert first_marker_reaching(connection, bounds, begun_ms, from_offset=2 * number + 1) == 2 * number + 1
        assert first_marker_reaching(connection, bounds, begun_ms + count, from_offset=0) is None

    with measured(database) as found:
        shared_store.read(look)
    # A look for each binary digit of the log's length, into each segment; there are twice as many batches as `count`.
    most = 400 if database == "postgresql" else 1_500
    assert not [str(touched) for touched in found if touched.count > most]


@pytest.mark.parametrize(
    ("batches", "start", "largest"),
    [
        # A running maximum is above the later ones by no more than that.
        ([(11,), (10,)], 0, (0, 11)),
        # What is left of the first batch is below those behind it, however large it was, and also if it was the same.
        ([(90, 5), (50,)], 1, (2, 50)),
        ([(50, 5), (50, 7)], 1, (2, 50)),
        ([(90, 60), (50,)], 1, (1, 60)),
        ([(90,), (50,)], 2, None),
    ],
)
def test_the_record_with_the_largest_timestamp(
    log: Log, batches: Sequence[Sequence[int]], start: int, largest: tuple[int, int] | None
) -> None:
    for timestamps_ms in batches:
        log.plain(*timestamps_ms)
    log.set_head(log_start_offset=start)
    assert log.largest() == largest


def test_with_log_append_time_the_stores_time_counts(shared_store: Store, shared_clock) -> None:
    name = uuid.uuid4().hex
    topic = shared_store.write(
        lambda connection: create_topic(connection, name, config={"message.timestamp.type": "LogAppendTime"})
    )
    times = []
    for _ in range(3):
        times.append(shared_clock.advance(10))
        item = Append(topic.partition_ids[0], encode([Record(b"x", timestamp_ms=1)]), topic.settings)
        shared_store.write(lambda connection, item=item: append(connection, [item]))
    for offset, time_ms in enumerate(times):
        for asked_ms in (time_ms - 9, time_ms):
            found = shared_store.read(
                lambda connection, asked_ms=asked_ms: offset_for_time(
                    connection, topic.partition_ids[0], asked_ms, COMMITTED
                )
            )
            assert found == OffsetAndTimestamp(offset, time_ms)


def test_a_damaged_batch_is_not_searched(log: Log) -> None:
    log.plain(10)
    damaged = update(record_batches).where(record_batches.c.partition_id == log.id).values(value_data=b"y")
    log.store.write(lambda connection: connection.execute(damaged))
    with pytest.raises(CorruptBatch):
        log.at(10)
