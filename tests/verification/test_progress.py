"""The rules of progress: queries and relays that stand beyond the log, and what is known of runs and batches."""

from __future__ import annotations

import uuid

import pytest
from sqlalchemy import delete, select, update

from tests.moving.histories import sink_batch
from txnstore.db.schema import relay_positions, sink_batches, sink_inputs, sink_positions, sink_runs
from txnstore.log.append import Append, append
from txnstore.log.bounds import read_bounds
from txnstore.log.codec import encode
from txnstore.log.deleting import HIGH_WATERMARK, delete_records
from txnstore.log.topics import create_topic, delete_topic
from txnstore.model import PartitionName, Record
from txnstore.relay.options import relay_id_from, relay_id_to, start_id_of
from txnstore.relay.positions import RelayPosition, begin_relay_positions
from txnstore.testing.invariants import Invariant, find_violations, violations_on
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.sinks import OF_LAST_BATCH

_I = Invariant
TO_KAFKA = relay_id_to("kafka", "r")
AHEAD = 1_000


class Undone(Exception):
    """Rolls the damage back."""


class Progress:
    """A query that has read two batches of a topic, and relays: to Kafka, and from it where Kafka is further."""

    def __init__(self, store):
        self.store = store
        topic = store.write(lambda connection: create_topic(connection, "orders"))
        (self.partition_id,) = topic.partition_ids
        store.write(lambda c: append(c, [Append(self.partition_id, encode([Record(b"a"), Record(b"b")]))]))
        self.query_id = uuid.uuid4().hex
        for batch_id in range(2):
            assert sink_batch(store, self.query_id, self.partition_id, batch_id)
        self.stranger = TransactionCoordinator(store).init_producer_id("stranger", 60_000).identity
        end_offset = self.end_offset()
        store.write(lambda c: c.execute(update(sink_positions).values(next_offset=end_offset)))
        for relay_id in (start_id_of(TO_KAFKA), TO_KAFKA):
            self.begin(relay_id, RelayPosition(topic.topic_uuid, end_offset))
        self.begin(relay_id_from("kafka", "back"), RelayPosition(str(uuid.uuid4()), AHEAD))

    def end_offset(self):
        return self.store.read(lambda c: read_bounds(c, [self.partition_id]))[self.partition_id].high_watermark

    def begin(self, relay_id, position):
        at = {PartitionName("orders", 0): position}
        self.store.write(lambda connection: begin_relay_positions(connection, relay_id, at))


def change(table, *where, **values):
    def damage(connection, progress):
        assert connection.execute(update(table).where(*where).values(**values)).rowcount == 1

    return damage


def swap_producers(connection, progress):
    change(sink_runs, sink_runs.c.run_number == 2, producer_id=progress.stranger.producer_id)(connection, progress)


DAMAGES = {
    "a query stands beyond the log": (_I.PROGRESS_IN_LOG, change(sink_positions, next_offset=AHEAD)),
    "a relay to Kafka begins beyond the log": (
        _I.PROGRESS_IN_LOG,
        change(relay_positions, relay_positions.c.relay_id == start_id_of(TO_KAFKA), next_offset=AHEAD),
    ),
    "a relay to Kafka has begun beyond the log": (
        _I.PROGRESS_IN_LOG,
        change(relay_positions, relay_positions.c.relay_id == TO_KAFKA, next_offset=AHEAD),
    ),
    "what is noted of the last batch is of another": (_I.SINKS_SOUND, change(sink_inputs, batch_id=7)),
    "the last batch is forgotten": (
        _I.SINKS_SOUND,
        lambda connection, _: connection.execute(delete(sink_batches).where(sink_batches.c.batch_id == 1)),
    ),
    "a run writes as another id's producer": (_I.SINKS_SOUND, swap_producers),
    "a run has an epoch that was never given": (
        _I.SINKS_SOUND,
        change(sink_runs, sink_runs.c.run_number == 2, producer_epoch=AHEAD),
    ),
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_reported_by_name_and_only_that(store, name):
    progress = Progress(store)
    assert find_violations(store) == []
    invariant, damage = DAMAGES[name]
    found = []

    def work(connection):
        damage(connection, progress)
        found.extend(violations_on(connection))
        raise Undone

    with pytest.raises(Undone):
        store.write(work)
    assert [each.invariant for each in found] == [invariant]


def has_rows(connection, table):
    return connection.execute(select(table).limit(1)).one_or_none() is not None


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_deleted", [False, True])
def test_what_stands_in_a_log_that_is_empty_or_gone_is_sound(store, is_deleted):
    progress = Progress(store)
    if is_deleted:
        store.write(lambda connection: delete_topic(connection, "orders"))
        # One of this name has nothing to do with it.
        store.write(lambda connection: create_topic(connection, "orders"))
    else:
        delete_records(store, progress.partition_id, HIGH_WATERMARK)
    assert store.read(lambda c: has_rows(c, sink_positions) and has_rows(c, relay_positions))
    assert find_violations(store) == []


def test_a_query_that_was_forgotten_is_sound(store):
    """Of its last batch something is left where that was noted in another moment than it was committed."""
    progress = Progress(store)

    def forget(connection):
        for table in (sink_batches, sink_positions, sink_runs):
            connection.execute(delete(table))
        return connection.execute(select(sink_inputs.c.run_id)).scalars().all()

    assert store.write(forget) == [OF_LAST_BATCH]
    assert find_violations(store) == []
    assert sink_batch(store, progress.query_id, progress.partition_id, 0)
    assert find_violations(store) == []
