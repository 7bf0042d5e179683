"""What partitions remember of producers: ids that nobody has had, states that survive, and those that are forgotten."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from txnstore.db.portions import Portions
from txnstore.db.store import Store
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.partition_rows import (
    _forget_in,
    allocate_producer_id,
    forget_producers,
    producers_of_partition,
    read_producer_states,
)
from txnstore.log.sequences import ProducerInPartition, RecentBatch
from txnstore.log.topics import create_topic
from txnstore.model import ProducerIdentity, Record


@pytest.fixture
def partition_ids(shared_store: Store) -> tuple[int, ...]:
    name = uuid.uuid4().hex
    return shared_store.write(lambda connection: create_topic(connection, name, partition_count=2)).partition_ids


def write(
    store: Store,
    partition_id: int,
    producer_id: int,
    first: int,
    *timestamps_ms: int,
    epoch: int = 0,
    is_transactional: bool = False,
) -> None:
    batch = encode(
        [Record(b"x", timestamp_ms=timestamp_ms) for timestamp_ms in timestamps_ms],
        producer=ProducerIdentity(producer_id, epoch),
        base_sequence=first,
        is_transactional=is_transactional,
    )
    store.write(lambda connection: append(connection, [Append(partition_id, batch)], coordinated=True))


def states(store: Store, partition_id: int) -> list[ProducerInPartition]:
    return store.read(lambda connection: producers_of_partition(connection, partition_id))


def test_producer_ids_are_never_given_out_twice_not_even_to_several_at_once(shared_store: Store) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: shared_store.write(allocate_producer_id), range(20)))
    assert len(set(found)) == 20


def test_a_producer_id_of_a_request_that_failed_is_not_lost_or_given_out_twice(shared_store: Store) -> None:
    given = []

    def fail(connection) -> None:
        given.append(allocate_producer_id(connection))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shared_store.write(fail)
    assert shared_store.write(allocate_producer_id) == given[0]


def test_a_partition_remembers_the_last_five_batches_of_each_producer(
    shared_store: Store, shared_clock, partition_ids: tuple[int, ...]
) -> None:
    one, two = (shared_store.write(allocate_producer_id) for _ in range(2))
    for number in range(7):
        write(shared_store, partition_ids[0], one, 2 * number, 10 + number, 9)
    now_ms = shared_clock.advance(1)
    write(shared_store, partition_ids[0], two, 0, 5, epoch=3, is_transactional=True)
    first, second = states(shared_store, partition_ids[0])
    assert first.recent_batches == tuple(
        RecentBatch(2 * number, 2 * number + 1, 2 * number, 2 * number + 1, 10 + number) for number in range(2, 7)
    )
    assert (first.epoch, first.last_sequence, first.transaction_first_offset) == (0, 13, None)
    assert second == ProducerInPartition(two, 3, (RecentBatch(0, 0, 14, 14, 5),), -1, now_ms, 14)
    assert states(shared_store, partition_ids[1]) == []


def test_only_the_producers_asked_for_are_read_and_those_with_open_transactions(
    shared_store: Store, partition_ids: tuple[int, ...]
) -> None:
    plain, asked, still_open = (shared_store.write(allocate_producer_id) for _ in range(3))
    for partition_id in partition_ids:
        write(shared_store, partition_id, plain, 0, 1)
        write(shared_store, partition_id, asked, 0, 1)
        write(shared_store, partition_id, still_open, 0, 1, is_transactional=True)
    one, two = partition_ids
    missing = 10**12
    with_open = {(one, asked), (one, still_open), (two, still_open)}

    def read(**options) -> set[tuple[int, int]]:
        keys = [(one, asked), (one, missing)]
        return set(shared_store.write(lambda connection: read_producer_states(connection, keys, **options)))

    assert read() == {(one, asked)}
    assert read(oldest_open=dict.fromkeys(partition_ids, 9)) == with_open
    assert read(oldest_open={two: 1}) == {(one, asked), (two, still_open)}
    assert shared_store.write(lambda connection: read_producer_states(connection, [])) == {}


def test_forgetting_takes_the_silent_ones_and_leaves_open_transactions(store: Store, clock) -> None:
    partition_id = store.write(lambda connection: create_topic(connection, "orders")).partition_ids[0]
    write(store, partition_id, 1, 0, 1)
    write(store, partition_id, 2, 0, 1, is_transactional=True)
    clock.advance(10)
    write(store, partition_id, 3, 0, 1)
    at_ms = clock.now_ms()

    def forget(before_ms: int) -> int:
        return forget_producers(store, before_ms=before_ms, rows_max=100)

    assert forget(at_ms - 11) == 0
    assert forget(at_ms - 10) == 1
    assert [state.producer_id for state in states(store, partition_id)] == [2, 3]
    assert forget(at_ms) == 1
    assert [state.producer_id for state in states(store, partition_id)] == [2]


def test_whoever_has_little_time_forgets_one_portion(store: Store, clock) -> None:
    partition_id = store.write(lambda connection: create_topic(connection, "orders")).partition_ids[0]
    for producer_id in range(5):
        write(store, partition_id, producer_id, 0, 1)
    portions = Portions(seconds=0.0)
    portions.rows = 2
    forgotten = [
        forget_producers(store, these, before_ms=clock.now_ms(), rows_max=rows_max)
        for these, rows_max in ((portions, 100), (None, 1), (None, 100))
    ]
    assert forgotten == [2, 1, 2]
    assert states(store, partition_id) == []


def test_who_returns_between_the_look_and_the_lock_is_not_forgotten(store: Store, clock) -> None:
    partition_id = store.write(lambda connection: create_topic(connection, "orders")).partition_ids[0]
    for producer_id in (1, 2, 3):
        write(store, partition_id, producer_id, 0, 1)
    before_ms = clock.now_ms()
    clock.advance(1)
    write(store, partition_id, 1, 1, 1)
    # Older than asked for by its time alone.
    clock.advance(-1)
    write(store, partition_id, 2, 1, 1, is_transactional=True)
    assert store.write(partial(_forget_in, partition_id, [1, 2, 3], before_ms)) == 1
    assert [state.producer_id for state in states(store, partition_id)] == [1, 2]


def test_silence_is_measured_with_the_stores_clock_and_not_with_the_records_timestamps(store: Store, clock) -> None:
    partition_id = store.write(lambda connection: create_topic(connection, "orders")).partition_ids[0]
    write(store, partition_id, 1, 0, 0)
    assert states(store, partition_id)[0].last_timestamp_ms == clock.now_ms()
