"""Appends: offsets in order, repetitions recognised, all or nothing, and what a topic lets in."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import event, select, update

from txnstore.db.schema import partition_heads, record_batches
from txnstore.db.store import Store
from txnstore.errors import (
    InvalidTimestamp,
    InvalidTransactionState,
    OutOfOrderSequence,
    RecordTooLarge,
    UnknownTopicOrPartition,
)
from txnstore.log.append import Append, Appended, append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import EncodedBatch, RecordBatch, encode
from txnstore.log.columns import Codec
from txnstore.log.fetch import fetch
from txnstore.log.topics import Topic, create_topic
from txnstore.model import IsolationLevel, ProducerIdentity, Record, StoredRecord, TimestampType
from txnstore.transactions.coordinator import TransactionCoordinator


def make(store: Store, partition_count: int = 1, **config: str) -> Topic:
    """Make a topic; in the names of its settings the dots are underscores."""
    settings = {name.replace("_", "."): value for name, value in config.items()}
    return store.write(
        lambda connection: create_topic(connection, uuid.uuid4().hex, partition_count=partition_count, config=settings)
    )


def write(store: Store, topic: Topic, *records: Record, **options: Any) -> Appended:
    item = Append(topic.partition_ids[0], encode(records, **options), topic.settings)
    return store.write(lambda connection: append(connection, [item], coordinated=True))[0]


def batches(store: Store, partition_id: int) -> Sequence[RecordBatch]:
    pages = store.read(
        lambda connection: fetch(connection, {partition_id: 0}, isolation=IsolationLevel.READ_UNCOMMITTED)
    )
    return pages[partition_id].batches


def stored(store: Store, topic: Topic) -> list[StoredRecord]:
    return [record for batch in batches(store, topic.partition_ids[0]) for record in batch.records()]


def test_offsets_of_a_partition_follow_each_other_without_a_gap(shared_store: Store) -> None:
    topic = make(shared_store)
    for expected in (0, 2, 4):
        appended = write(shared_store, topic, Record(b"a"), Record(b"b"))
        assert (appended.base_offset, appended.last_offset) == (expected, expected + 1)
        assert appended.log_start_offset == 0
    assert [record.offset for record in stored(shared_store, topic)] == list(range(6))


def test_a_batch_that_comes_again_is_recognised_and_answered_with_its_first_offsets(shared_store: Store) -> None:
    topic = make(shared_store)
    options = {"producer": ProducerIdentity(7, 0), "base_sequence": 0}
    first = write(shared_store, topic, Record(b"a"), Record(b"b"), **options)
    again = write(shared_store, topic, Record(b"a"), Record(b"b"), **options)
    assert (first.is_duplicate, again.is_duplicate) == (False, True)
    assert again.base_offset == first.base_offset
    assert len(stored(shared_store, topic)) == 2


def test_a_batch_without_a_producer_is_appended_as_often_as_it_comes(shared_store: Store) -> None:
    topic = make(shared_store)
    for expected in range(3):
        assert write(shared_store, topic, Record(b"a")).base_offset == expected


def test_several_partitions_are_appended_to_at_once_and_answered_in_the_order_asked(shared_store: Store) -> None:
    topic = make(shared_store, 3)
    one, two, three = topic.partition_ids
    items = [
        Append(partition_id, encode([Record(value)] * count))
        for partition_id, value, count in ((three, b"a", 2), (one, b"b", 1), (three, b"c", 1), (two, b"d", 1))
    ]
    answers = shared_store.write(lambda connection: append(connection, items))
    assert [(answer.partition_id, answer.base_offset) for answer in answers] == [
        (three, 0),
        (one, 0),
        (three, 2),
        (two, 0),
    ]
    values = {
        partition_id: [record.value for batch in batches(shared_store, partition_id) for record in batch.records()]
        for partition_id in topic.partition_ids
    }
    assert values == {one: [b"b"], two: [b"d"], three: [b"a", b"a", b"c"]}


@pytest.mark.parametrize("bad", ["missing partition", "gap in sequence", "too large", "timestamp in the future"])
def test_if_one_batch_is_refused_none_is_appended(shared_store: Store, shared_clock, bad: str) -> None:
    topic = make(shared_store, 2, max_message_bytes="200")
    first, second = topic.partition_ids
    identity = ProducerIdentity(7, 0)
    refused, error = {
        "missing partition": (Append(10**12, encode([Record(b"a")])), UnknownTopicOrPartition),
        "gap in sequence": (
            Append(first, encode([Record(b"a")], producer=identity, base_sequence=5)),
            OutOfOrderSequence,
        ),
        "too large": (Append(second, encode([Record(b"x" * 300)]), topic.settings), RecordTooLarge),
        "timestamp in the future": (
            Append(second, encode([Record(b"a", timestamp_ms=shared_clock.now_ms() + 4_000_000)])),
            InvalidTimestamp,
        ),
    }[bad]
    good = Append(first, encode([Record(b"a")], producer=identity, base_sequence=0), topic.settings)
    with pytest.raises(error):
        shared_store.write(lambda connection: append(connection, [good, refused]))
    assert stored(shared_store, topic) == []
    # Nothing was remembered of the producer either.
    assert not shared_store.write(lambda connection: append(connection, [good]))[0].is_duplicate


def test_an_append_is_there_once_its_database_transaction_commits_and_not_before(shared_store: Store) -> None:
    topic = make(shared_store)

    class Died(Exception):
        pass

    def work(connection) -> None:
        append(connection, [Append(topic.partition_ids[0], encode([Record(b"a")]))])
        raise Died

    with pytest.raises(Died):
        shared_store.write(work)
    assert stored(shared_store, topic) == []
    assert write(shared_store, topic, Record(b"b")).base_offset == 0


EVERYTHING = [
    Record(b"value", b"key", 1_000),
    Record(None, None, 1_000),
    Record(b"", b"", 1_001),
    Record(None, b"", 999),
    Record(b"", None, 0),
    Record(bytes(range(256)), b"\0\xff", 1_000),
    Record(b"v", b"k", 5, [("h", b"1"), ("h", b"2"), ("a", None), ("", b""), ("h", b"1")]),
    Record(b"v", b"k", 6, [("n\0ul", b"\0"), ("utf", "ä😀".encode()), ("bytes", b"\xff\xfe"), ("quote", b'"\\\n')]),
    Record(b"%s {} $1 :name ? '; DROP TABLE topics; --", b"\\.", 7, [("%s", b":name"), ("$1", b"?")]),
    Record(b"\x00\x00\x00\x00\x00\x00", b"\x00\x00\x00\x01", 8),
    Record("ä😀\u202e".encode(), b"x" * 1_000, 9),
]


@pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.label)
def test_whatever_a_record_holds_comes_back_from_the_database_as_it_was(shared_store: Store, codec: Codec) -> None:
    topic = make(shared_store)
    write(shared_store, topic, *EVERYTHING, codec=codec)
    assert stored(shared_store, topic) == [
        StoredRecord(offset, record.timestamp_ms, record.key, record.value, tuple(record.headers))
        for offset, record in enumerate(EVERYTHING)
    ]
    (batch,) = batches(shared_store, topic.partition_ids[0])
    assert batch.codec is codec


@pytest.mark.slow_but_first
@pytest.mark.parametrize("record", EVERYTHING, ids=itertools.count())
def test_a_record_alone_in_its_batch_comes_back_as_well(shared_store: Store, record: Record) -> None:
    topic = make(shared_store)
    write(shared_store, topic, record)
    (found,) = stored(shared_store, topic)
    assert (found.value, found.key, found.timestamp_ms, list(found.headers)) == (
        record.value,
        record.key,
        record.timestamp_ms,
        list(record.headers),
    )


@pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.label)
def test_a_compressed_batch_takes_less_room_and_its_size_is_what_is_stored(shared_store: Store, codec: Codec) -> None:
    topic = make(shared_store)
    write(shared_store, topic, *[Record(b"abcdefgh" * 100, b"key" * 10)] * 20, codec=codec)
    statement = select(record_batches.c.size_bytes, record_batches.c.key_data, record_batches.c.value_data).where(
        record_batches.c.partition_id == topic.partition_ids[0]
    )
    size_bytes, key_data, value_data = shared_store.read(lambda connection: connection.execute(statement).one())
    if codec is Codec.NONE:
        assert (len(key_data), len(value_data)) == (600, 16_000)
    else:
        assert len(key_data) + len(value_data) < 5_000
    assert size_bytes > len(key_data) + len(value_data)


@pytest.mark.parametrize(("room", "fits"), [(-1, False), (0, True), (1, True)], ids=["limit+1", "limit", "limit-1"])
def test_a_batch_is_as_large_as_max_message_bytes_at_most(shared_store: Store, room: int, fits: bool) -> None:
    batch = encode([Record(b"x" * 500, b"key", 1, [("h", b"1")]), Record(b"y")])
    topic = make(shared_store, max_message_bytes=str(batch.size_bytes + room))
    item = Append(topic.partition_ids[0], batch, topic.settings)
    if fits:
        shared_store.write(lambda connection: append(connection, [item]))
        assert len(stored(shared_store, topic)) == 2
        return
    with pytest.raises(RecordTooLarge, match=rf"{batch.size_bytes} bytes.*max.message.bytes of {batch.size_bytes - 1}"):
        shared_store.write(lambda connection: append(connection, [item]))
    assert stored(shared_store, topic) == []


def test_a_batch_that_is_too_large_is_refused_before_anything_is_locked(shared_store: Store) -> None:
    topic = make(shared_store, max_message_bytes="10")
    statements: list[str] = []

    def note(connection, cursor, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen(shared_store.engine, "before_cursor_execute", note)
    try:
        with pytest.raises(RecordTooLarge):
            write(shared_store, topic, Record(b"x" * 100))
    finally:
        event.remove(shared_store.engine, "before_cursor_execute", note)
    assert not any("partition_heads" in statement for statement in statements)


def test_with_log_append_time_the_store_stamps_every_record(shared_store: Store, shared_clock) -> None:
    topic = make(shared_store, message_timestamp_type="LogAppendTime")
    now_ms = shared_clock.advance(1)
    appended = write(shared_store, topic, Record(b"a", timestamp_ms=5), Record(b"b", timestamp_ms=2**62))
    assert appended.log_append_time_ms == now_ms
    assert [record.timestamp_ms for record in stored(shared_store, topic)] == [now_ms, now_ms]
    (batch,) = batches(shared_store, topic.partition_ids[0])
    assert (batch.timestamp_type, batch.max_timestamp_ms) == (TimestampType.LOG_APPEND_TIME, now_ms)


def test_with_create_time_the_producers_timestamps_stay_and_the_answer_has_none(shared_store: Store) -> None:
    topic = make(shared_store)
    assert (
        write(shared_store, topic, Record(b"a", timestamp_ms=5), Record(b"b", timestamp_ms=3)).log_append_time_ms == -1
    )
    assert [record.timestamp_ms for record in stored(shared_store, topic)] == [5, 3]
    (batch,) = batches(shared_store, topic.partition_ids[0])
    assert (batch.timestamp_type, batch.base_timestamp_ms, batch.max_timestamp_ms) == (TimestampType.CREATE_TIME, 5, 5)


def test_a_repetition_is_answered_with_the_time_of_the_first_append(shared_store: Store, shared_clock) -> None:
    topic = make(shared_store, message_timestamp_type="LogAppendTime")
    options = {"producer": ProducerIdentity(7, 0), "base_sequence": 0}
    first = write(shared_store, topic, Record(b"a"), **options)
    shared_clock.advance(1_000)
    again = write(shared_store, topic, Record(b"a"), **options)
    assert again.is_duplicate
    assert again.log_append_time_ms == first.log_append_time_ms


TIMESTAMPS = [
    pytest.param({"message_timestamp_after_max_ms": "1000"}, 999, True, id="after: limit-1"),
    pytest.param({"message_timestamp_after_max_ms": "1000"}, 1_000, True, id="after: limit"),
    pytest.param({"message_timestamp_after_max_ms": "1000"}, 1_001, False, id="after: limit+1"),
    pytest.param({"message_timestamp_before_max_ms": "1000"}, -999, True, id="before: limit-1"),
    pytest.param({"message_timestamp_before_max_ms": "1000"}, -1_000, True, id="before: limit"),
    pytest.param({"message_timestamp_before_max_ms": "1000"}, -1_001, False, id="before: limit+1"),
    pytest.param({"message_timestamp_before_max_ms": "0"}, 0, True, id="before 0: now"),
    pytest.param({"message_timestamp_before_max_ms": "0"}, -1, False, id="before 0: a moment ago"),
    pytest.param({}, 3_600_000, True, id="default: an hour after"),
    pytest.param({}, 3_600_001, False, id="default: more than an hour after"),
    pytest.param({}, -1_700_000_000_000, True, id="default: long before"),
]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("others", [0, 2], ids=["alone", "beside good ones"])
@pytest.mark.parametrize(("config", "distance_ms", "fits"), TIMESTAMPS)
def test_a_timestamp_may_lie_so_far_from_the_stores_time(
    shared_store: Store, shared_clock, config: dict[str, str], distance_ms: int, fits: bool, others: int
) -> None:
    topic = make(shared_store, 1, **config)
    now_ms = shared_clock.now_ms()
    records = [*[Record(b"good", timestamp_ms=now_ms)] * others, Record(b"a", timestamp_ms=now_ms + distance_ms)]
    if fits:
        write(shared_store, topic, *records)
        assert len(stored(shared_store, topic)) == others + 1
        return
    with pytest.raises(InvalidTimestamp):
        write(shared_store, topic, *records)
    assert stored(shared_store, topic) == []


def test_the_smallest_timestamp_is_looked_for_only_for_a_limit_that_it_could_break(
    shared_store: Store, shared_clock, monkeypatch
) -> None:
    now_ms = shared_clock.now_ms()
    asked: list[EncodedBatch] = []

    def smallest(batch: EncodedBatch) -> int:
        asked.append(batch)
        return 0

    monkeypatch.setattr(EncodedBatch, "min_timestamp_ms", property(smallest))
    records = Record(b"a", timestamp_ms=5), Record(b"b", timestamp_ms=0)
    for config in ({}, {"message_timestamp_before_max_ms": str(now_ms)}):
        write(shared_store, make(shared_store, 1, **config), *records)
    assert asked == []
    with pytest.raises(InvalidTimestamp):
        write(shared_store, make(shared_store, 1, message_timestamp_before_max_ms=str(now_ms - 1)), *records)
    assert len(asked) == 1


def test_a_repetition_is_recognised_when_its_timestamps_are_too_old_by_now(shared_store: Store, shared_clock) -> None:
    topic = make(shared_store, message_timestamp_before_max_ms="1000")
    record = Record(b"a", timestamp_ms=shared_clock.now_ms())
    options = {"producer": ProducerIdentity(7, 0), "base_sequence": 0}
    write(shared_store, topic, record, **options)
    shared_clock.advance(5_000)
    assert write(shared_store, topic, record, **options).is_duplicate


@pytest.mark.parametrize(
    "head", [2**31 - 2, 2**31, 2**53, 2**62, 2**63 - 3], ids=["2**31-2", "2**31", "2**53", "2**62", "2**63-3"]
)
def test_offsets_have_63_bits(shared_store: Store, head: int) -> None:
    topic = make(shared_store)
    (partition_id,) = topic.partition_ids
    moved = (
        update(partition_heads)
        .where(partition_heads.c.partition_id == partition_id)
        .values(next_offset=head, log_start_offset=head)
    )
    shared_store.write(lambda connection: connection.execute(moved))
    options = {"producer": ProducerIdentity(7, 0), "base_sequence": 0}
    for _ in range(2):
        appended = write(shared_store, topic, Record(b"a"), Record(b"b"), **options)
        assert (appended.base_offset, appended.last_offset, appended.log_start_offset) == (head, head + 1, head)
    page = shared_store.read(lambda connection: fetch(connection, {partition_id: head + 1}))[partition_id]
    assert [record.offset for batch in page.batches for record in batch.records(head + 1)] == [head + 1]
    assert page.next_offset == page.bounds.high_watermark == head + 2


def test_a_transaction_of_big_offsets_is_committed_and_read(shared_store: Store) -> None:
    topic = make(shared_store)
    (partition_id,) = topic.partition_ids
    head = 2**62
    moved = update(partition_heads).where(partition_heads.c.partition_id == partition_id).values(next_offset=head)
    shared_store.write(lambda connection: connection.execute(moved))
    coordinator, name = TransactionCoordinator(shared_store), uuid.uuid4().hex
    identity = coordinator.init_producer_id(name).identity
    batch = encode([Record(b"a")], producer=identity, base_sequence=0, is_transactional=True)
    coordinator.append(name, identity, [Append(partition_id, batch)])
    read = shared_store.read(lambda connection: fetch(connection, {partition_id: 0}))[partition_id]
    assert (read.batches, read.next_offset, read.bounds.last_stable_offset) == ((), head, head)
    coordinator.end_transaction(name, identity, commit=True)
    read = shared_store.read(lambda connection: fetch(connection, {partition_id: 0}))[partition_id]
    assert [record.offset for found in read.batches for record in found.records()] == [head]
    assert read.next_offset == head + 2


def test_a_transactional_batch_without_its_coordinator_begins_no_transaction(shared_store: Store) -> None:
    topic = make(shared_store)
    batch = encode([Record(b"a")], producer=ProducerIdentity(70_001, 0), base_sequence=0, is_transactional=True)
    item = Append(topic.partition_ids[0], batch)
    with pytest.raises(InvalidTransactionState, match="through the transaction coordinator"):
        shared_store.write(lambda connection: append(connection, [item]))
    bounds = shared_store.read(lambda connection: read_bounds(connection, topic.partition_ids))
    assert bounds[topic.partition_ids[0]].high_watermark == 0
