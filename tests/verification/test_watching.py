"""A watch reads what is new and nothing twice, and misses nothing for it that it would find otherwise."""

from __future__ import annotations

import itertools
import uuid
from contextlib import contextmanager

import pytest
from sqlalchemy import delete, event, insert, update

from txnstore.db.cluster.cluster import open_cluster
from txnstore.db.schema import outbox, outbox_sequencers, partition_heads, producer_states, record_batches
from txnstore.log.append import Append, append
from txnstore.log.codec import decode, encode
from txnstore.log.compaction import compact_partitions
from txnstore.log.deleting import HIGH_WATERMARK, delete_records
from txnstore.log.topics import change_topic_configs, create_topic, delete_topic, lock_topic_configs
from txnstore.model import Record
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.verification import outbox as outbox_module
from txnstore.verification import partitions as partitions_module
from txnstore.verification import verify as verify_module
from txnstore.verification.invariants import Invariant
from txnstore.verification.verify import WatchState, verify

_numbers = itertools.count(1)


class Watched:
    """A store with a partition, and somebody who looks at it again and again."""

    def __init__(self, cluster):
        self.cluster, self.store, self.watch = cluster, cluster.controller, WatchState()
        self.coordinator = TransactionCoordinator(self.store)
        (self.partition,) = self.store.write(lambda c: create_topic(c, "orders")).partition_ids
        self.plain = self.coordinator.init_producer_id(None).identity
        self.sequence = 0

    def put(self, key=b"k", value=b"v", timestamp_ms=0):
        """Append two records outside transactions."""
        records = [Record(value, key=key, timestamp_ms=timestamp_ms)] * 2
        batch = encode(records, producer=self.plain, base_sequence=self.sequence)
        self.sequence += 2
        self.store.write(lambda c: append(c, [Append(self.partition, batch)]))

    def begin(self):
        name = f"worker-{next(_numbers)}"
        producer = self.coordinator.init_producer_id(name, 60_000).identity
        batch = encode([Record(b"v", key=b"t")], producer=producer, base_sequence=0, is_transactional=True)
        self.coordinator.append(name, producer, [Append(self.partition, batch)])
        return name, producer

    def end(self, transaction, *, commit=True):
        self.coordinator.end_transaction(*transaction, commit=commit)

    def look(self, **options):
        """Return what is wrong: the invariants."""
        return [each.invariant for each in verify(self.cluster, **{"watch": self.watch, **options})]

    def change(self, statement):
        self.store.write(lambda connection: connection.execute(statement))

    @contextmanager
    def reading(self):
        """Collect where the batches begin that are read and decoded."""
        decoded: list[int] = []

        def counting(row):
            decoded.append(row.base_offset)
            return decode(row)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(partitions_module, "decode", counting)
            yield decoded


@pytest.fixture
def watched(txnstore_url):
    with open_cluster(txnstore_url, create=False) as cluster:
        yield Watched(cluster)


def test_what_was_read_is_not_read_again(watched):
    for _ in range(3):
        watched.put()
    with watched.reading() as decoded:
        assert watched.look() == []
    assert decoded == [0, 2, 4]
    watched.put()
    with watched.reading() as decoded:
        assert watched.look() == []
        assert watched.look() == []
    assert decoded == [6]
    with watched.reading() as decoded:
        assert watched.look(watch=None) == []
    assert decoded == [0, 2, 4, 6]


def test_readers_are_asked_for_what_is_new_alone(watched):
    first = watched.begin()
    watched.put()
    assert watched.look() == []
    watched.put()
    asked = []

    def noting(connection, cursor, statement, parameters, *_):
        if "record_batches" in statement and " DESC" in statement:
            asked.append(statement)

    watched.end(first)
    assert watched.look() == []
    event.listen(watched.store.engine, "before_cursor_execute", noting)
    assert watched.look() == []
    assert asked == []
    watched.put()
    assert watched.look() == []
    assert len(asked) == 1


def test_transactions_that_go_on_from_one_look_to_the_next_are_right(watched):
    transactions = [watched.begin() for _ in range(3)]
    assert watched.look() == []
    watched.end(transactions[0], commit=False)
    watched.put()
    assert watched.look() == []
    watched.end(transactions[2])
    assert watched.look() == []
    watched.end(transactions[1])
    fourth = watched.begin()
    assert watched.look() == []
    watched.end(fourth)
    assert watched.look() == [] == watched.look(watch=None)


def test_what_is_deleted_and_forgotten_meanwhile_is_right(watched):
    for _ in range(3):
        watched.put()
    open_ = watched.begin()
    assert watched.look() == []
    delete_records(watched.store, watched.partition, 4)
    assert watched.look() == []
    watched.change(delete(producer_states).where(producer_states.c.producer_id == watched.plain.producer_id))
    assert watched.look() == []
    # It is remembered no longer than by the store: it goes on where it was.
    watched.put()
    watched.end(open_)
    assert watched.look() == []
    # Beyond what was read: the rest of it has gone in part.
    watched.put()
    watched.put()
    delete_records(watched.store, watched.partition, 12)
    assert watched.look() == []
    watched.store.write(lambda c: delete_topic(c, "orders"))
    assert watched.look() == []
    assert watched.watch.proven == {}


def test_a_log_of_which_everything_was_deleted_is_right(watched):
    """The largest timestamp was that of a record that is gone."""
    watched.put(timestamp_ms=2_000)
    delete_records(watched.store, watched.partition, HIGH_WATERMARK)
    assert watched.look() == [] == watched.look()
    watched.put(timestamp_ms=1_000)
    assert watched.look() == []
    watched.put(timestamp_ms=3_000)
    assert watched.look() == [] == watched.look(watch=None)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("what", "invariant"),
    [
        ("a gap", Invariant.OFFSETS_FOLLOW),
        ("a time", Invariant.TIMES_RUN),
        ("a value", Invariant.BATCHES_WHOLE),
        ("a sequence", Invariant.SEQUENCES_FOLLOW),
        ("a producer", Invariant.PRODUCERS_KNOWN),
    ],
)
def test_damage_to_what_is_new_is_found_and_stays_found(watched, what, invariant):
    watched.put()
    assert watched.look() == []
    open_ = watched.begin()
    watched.put()
    last = (record_batches.c.partition_id == watched.partition, record_batches.c.base_offset == 3)
    of_partition = partition_heads.c.partition_id == watched.partition
    if what == "a gap":
        watched.change(delete(record_batches).where(*last))
    elif what == "a time":
        watched.change(update(partition_heads).where(of_partition).values(running_max_timestamp_ms=1))
    elif what == "a value":
        watched.change(update(record_batches).where(*last).values(value_data=b"00"))
    elif what == "a sequence":
        watched.change(delete(producer_states).where(producer_states.c.producer_id == watched.plain.producer_id))
        watched.sequence = 9
        watched.put()
    else:
        nobody_open = update(producer_states).where(producer_states.c.producer_id == open_[1].producer_id)
        watched.change(nobody_open.values(transaction_first_offset=None))
    first = watched.look()
    assert invariant in first
    assert watched.look() == first


def test_a_log_that_goes_back_is_found(watched):
    watched.put()
    watched.put()
    assert watched.look() == []
    watched.change(delete(record_batches).where(record_batches.c.base_offset == 2))
    watched.change(update(partition_heads).values(next_offset=2))
    assert Invariant.OFFSETS_FOLLOW in watched.look()


def test_once_a_day_everything_is_read_again(watched, monkeypatch):
    watched.put()
    assert watched.look() == []
    watched.change(update(record_batches).values(value_data=b"00"))
    assert watched.look() == []
    monkeypatch.setattr(verify_module, "READ_AGAIN_SECONDS", 0.0)
    assert watched.look() == [Invariant.BATCHES_WHOLE]


def test_a_compacted_partition_is_read_again_once_it_has_changed(watched):
    texts = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}
    watched.store.write(lambda c: change_topic_configs(c, lock_topic_configs(c, "orders"), texts))
    watched.put()
    watched.put(value=b"w")
    assert watched.look() == []
    with watched.reading() as decoded:
        assert watched.look() == []
    assert decoded == []
    compact_partitions(watched.store)
    with watched.reading() as decoded:
        assert watched.look() == []
    assert decoded == [2]


def test_rows_of_the_outbox_that_are_refused_or_wait_for_long_are_told(watched, monkeypatch):
    topic = f"gone-{uuid.uuid4().hex[:8]}"
    watched.change(insert(outbox).values(topic=topic, refusal="no such topic"))
    watched.change(insert(outbox).values(topic=topic, refusal="no such topic"))
    (violation,) = verify(watched.cluster, watch=watched.watch)
    assert (violation.invariant, violation.place.topic) == (Invariant.OUTBOX_MOVES, topic)
    assert "2 rows from number" in violation.seen
    assert "are refused: no such topic" in violation.seen
    assert str(violation.place) == topic
    watched.change(delete(outbox))
    watched.change(insert(outbox).values(topic="orders"))
    assert watched.look() == [] == watched.look()
    monkeypatch.setattr(outbox_module, "WAITS_MAX_SECONDS", 0.0)
    (violation,) = verify(watched.cluster, watch=watched.watch)
    assert (violation.invariant, violation.place.topic) == (Invariant.OUTBOX_MOVES, "orders")
    # Another look knows nothing of how long it has waited, and another row has not.
    assert watched.look(watch=None) == []
    watched.change(delete(outbox))
    watched.change(insert(outbox).values(topic="orders"))
    assert watched.look() == []


def test_an_outbox_that_nobody_can_move_is_told(watched):
    watched.change(delete(outbox_sequencers))
    assert watched.look() == [Invariant.OUTBOX_MOVES]
    watched.change(insert(outbox_sequencers).values(singleton=1, sequenced_count=0))
    assert watched.look() == []
