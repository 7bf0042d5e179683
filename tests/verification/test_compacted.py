"""What can be proven of a compacted partition is: whatever somebody breaks there by hand is reported, and said."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import delete, update

from tests.log.compacted_log import CompactedLog
from txnstore.db.schema import finished_transactions, partition_storage, producer_states, record_batches
from txnstore.db.sqlite import seen_keys
from txnstore.log.append import Append, append
from txnstore.log.bounds import read_bounds
from txnstore.log.deleting import advance_log_start
from txnstore.log.locked_partitions import Marker, write_markers
from txnstore.model import ControlType, ProducerIdentity
from txnstore.testing.invariants import Invariant, partition_violations

DAY_MS = 86_400_000
_I = Invariant


class Undone(Exception):
    """Rolls the damage back."""


class Filled(CompactedLog):
    """One that was compacted, with records behind it that were not."""

    def __init__(self, store, clock):
        super().__init__(store, clock)
        self.plain = ProducerIdentity(self.coordinator.init_producer_id(None).identity.producer_id, 3)
        self.configure(cleanup_policy="delete")
        self.put((None, b"from before"), (b"a", b"1"), (b"b", b"1"))
        self.configure(cleanup_policy="compact")
        self.kept = self.put((b"c", b"1"), (b"a", b"2"), producer=self.plain, base_sequence=0)
        self.commit((b"d", b"1"), (b"b", b"2"))
        lost = self.begin()
        lost.put((b"a", b"never"))
        lost.end(commit=False)
        self.put((b"e", None), (b"f", b"1"), producer=self.plain, base_sequence=2)
        self.run()
        self.behind = self.put((b"c", b"2"), (b"g", b"1"))
        lost = self.begin()
        self.aborted = self.end
        lost.put((b"h", b"never"))
        lost.end(commit=False)

    @property
    def end(self):
        return self.store.read(self.end_on)

    def end_on(self, connection):
        return read_bounds(connection, [self.partition])[self.partition].high_watermark

    def found(self, damage):
        """Return what is wrong once the damage is done, which it is only for that long."""
        found = []

        def work(connection):
            damage(connection, self)
            found.extend(partition_violations(connection, self.partition))
            raise Undone

        with pytest.raises(Undone):
            self.store.write(work)
        return {(violation.invariant, violation.place.offset): violation.seen for violation in found}


@pytest.fixture
def log(store, clock):
    return Filled(store, clock)


def of(table, log, **values):
    return [table.c.partition_id == log.partition, *(table.c[name] == value for name, value in values.items())]


def say_compacted(connection, log):
    """Say that all of it is compacted, which it is not."""
    everything = update(partition_storage).where(*of(partition_storage, log))
    connection.execute(everything.values(compacted_offset=log.end_on(connection)))


def say_tombstones_are_gone(connection, log):
    horizons = json.dumps([[log.end_on(connection), 0]])
    connection.execute(update(partition_storage).where(*of(partition_storage, log)).values(horizons=horizons))


def lose_an_ending(connection, log):
    connection.execute(delete(finished_transactions).where(*of(finished_transactions, log, outcome=1)))


def lose_a_marker(connection, log):
    connection.execute(delete(record_batches).where(*of(record_batches, log, control_type=1)))


def turn_an_ending(connection, log):
    turned = (
        update(finished_transactions)
        .where(*of(finished_transactions, log, outcome=1))
        .values(outcome=0, commit_number=None)
    )
    connection.execute(turned)


def shift_a_batch(connection, log):
    one = of(record_batches, log, base_offset=log.behind)
    connection.execute(update(record_batches).where(*one).values(base_offset=log.behind - 1))


def write_again(connection, log, *, epoch, sequence):
    connection.execute(delete(producer_states).where(*of(producer_states, log, producer_id=log.plain.producer_id)))
    producer = ProducerIdentity(log.plain.producer_id, epoch)
    append(connection, [Append(log.partition, log.encoded((b"z", b"1"), producer=producer, base_sequence=sequence))])


def damage_a_batch(connection, log):
    one = of(record_batches, log, base_offset=log.behind)
    connection.execute(update(record_batches).where(*one).values(value_data=b"another"))


def lower_a_time(connection, log):
    one = of(record_batches, log, base_offset=log.behind)
    connection.execute(update(record_batches).where(*one).values(running_max_timestamp_ms=1))


DAMAGES = {
    "an old value is left": (
        say_compacted,
        _I.ONE_OF_EACH_KEY,
        lambda log: log.behind,
        lambda log: f"the key of this record is also that of the one at offset {log.kept}",
    ),
    "aborted records are left": (
        say_compacted,
        _I.ONE_OF_EACH_KEY,
        lambda log: log.aborted,
        lambda _: "aborted records of producer",
    ),
    "a tombstone is left": (
        say_tombstones_are_gone,
        _I.ONE_OF_EACH_KEY,
        lambda log: log.kept + 7,
        lambda _: "a tombstone is left after its time",
    ),
    "records have no ending": (
        lose_an_ending,
        _I.INDEX_KNOWN,
        lambda log: log.kept + 2,
        lambda _: "has records and no ending",
    ),
    "a marker is not in the index": (
        lose_an_ending,
        _I.INDEX_KNOWN,
        lambda log: log.kept + 4,
        lambda _: "the index has None for the marker",
    ),
    "a transaction of the index has no marker": (
        lose_a_marker,
        _I.INDEX_KNOWN,
        lambda log: log.kept + 4,
        lambda _: "there is no marker here",
    ),
    "the index has another ending": (
        turn_an_ending,
        _I.INDEX_KNOWN,
        lambda log: log.kept + 4,
        lambda _: "for the marker of producer",
    ),
    "committed records are not visible": (
        turn_an_ending,
        _I.COMMITTED_VISIBLE,
        lambda _: None,
        lambda _: "a reader gets the offsets",
    ),
    "batches overlap": (
        shift_a_batch,
        _I.OFFSETS_FOLLOW,
        lambda log: log.behind - 1,
        lambda log: f"where {log.behind} is next",
    ),
    "a sequence number comes twice": (
        lambda connection, log: write_again(connection, log, epoch=3, sequence=3),
        _I.SEQUENCES_FOLLOW,
        lambda log: log.end,
        lambda _: "has sequence 3 after 3",
    ),
    "an old epoch has written": (
        lambda connection, log: write_again(connection, log, epoch=2, sequence=0),
        _I.EPOCHS_RISE,
        lambda log: log.end,
        lambda _: "after epoch 3",
    ),
    "a value is another": (
        damage_a_batch,
        _I.BATCHES_WHOLE,
        lambda log: log.behind,
        lambda _: "it does not match its checksum",
    ),
    "times fall": (lower_a_time, _I.TIMES_RUN, lambda log: log.behind, lambda _: "1, the largest so far is"),
}


#: What else a damage breaks, of necessity.
FOLLOWS = {
    "records have no ending": {_I.COMMITTED_VISIBLE},
    "a marker is not in the index": {_I.COMMITTED_VISIBLE},
    "a transaction of the index has no marker": {_I.COMMITTED_VISIBLE, _I.STORAGE_KNOWN},
    "the index has another ending": {_I.COMMITTED_VISIBLE, _I.ONE_OF_EACH_KEY},
    "committed records are not visible": {_I.INDEX_KNOWN, _I.ONE_OF_EACH_KEY},
    "batches overlap": {_I.ONE_OF_EACH_KEY},
}


def test_a_compacted_partition_is_found_sound(log):
    assert log.found(lambda *_: None) == {}
    # Of one batch the first record is left, of the other the last one.
    log.put((b"x", b"1"), (b"y", b"1"))
    log.put((b"y", b"2"), (b"x", b"1"))
    log.put((b"y", b"3"))
    log.put((b"x", b"2"), (b"z", b"1"))
    log.put((b"z", b"2"))
    log.run()
    assert log.found(lambda *_: None) == {}


def test_a_marker_that_is_younger_than_its_records_is_no_damage(log):
    slow = log.begin()
    slow.put((b"x", b"1"))
    log.clock.advance(1_000)
    slow.end(commit=True)
    assert log.found(lambda *_: None) == {}


def test_what_waits_to_be_deleted_below_the_log_start_is_no_damage(log):
    log.configure(cleanup_policy="compact,delete")
    # No pass has read these keys, and an open transaction is in front of the last stable offset.
    log.put((b"twice", b"1"), (b"twice", b"2"))
    transaction = log.begin()
    transaction.put((b"a", b"3"))
    log.store.write(lambda c: advance_log_start(c, log.partition, log.end_on(c)))
    assert log.found(lambda *_: None) == {}
    transaction.end(commit=False)
    log.put((b"new", b"1"))
    log.run()
    (storage,) = log.rows(partition_storage)
    assert storage.first_stored_offset == 0
    assert storage.compacted_offset == log.end
    assert log.found(lambda *_: None) == {}


def test_a_marker_of_a_transaction_that_wrote_nothing_here_is_no_damage(log):
    """In a cluster a partition is added to a transaction before it is written to, which may fail."""
    producer = log.coordinator.init_producer_id(None).identity
    marker = Marker(log.partition, producer, ControlType.ABORT)
    assert log.found(lambda connection, _: write_markers(connection, [marker])) == {}


def test_a_batch_in_which_the_log_starts_is_looked_at(log):
    log.configure(cleanup_policy="compact,delete")
    first = log.put((b"twice", b"1"), (b"twice", b"2"))
    log.store.write(lambda c: advance_log_start(c, log.partition, first + 1))
    assert (_I.ONE_OF_EACH_KEY, first + 1) in log.found(say_compacted)


def test_a_batch_in_which_a_pass_has_ended_at_the_log_start_is_no_damage(log):
    log.configure(cleanup_policy="compact,delete", min_cleanable_dirty_ratio=1, delete_retention_ms=1_000)
    log.configure(max_compaction_lag_ms=1)
    log.clock.advance(2)
    log.run()
    log.configure(max_compaction_lag_ms=DAY_MS)
    first = log.put((b"twice", b"1"), (b"twice", b"2"), (b"a", b"3"))
    log.store.write(lambda c: advance_log_start(c, log.partition, first + 2))
    # Tombstones go now, and so little is new that their pass reads no keys.
    log.clock.advance(1_000)
    log.run()
    (storage,) = log.rows(partition_storage)
    assert storage.compacted_offset == first + 2
    assert log.found(lambda *_: None) == {}
    log.configure(min_cleanable_dirty_ratio=0)
    log.run()
    assert log.rows(partition_storage)[0].compacted_offset == log.end
    assert log.found(lambda *_: None) == {}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_to_a_compacted_partition_is_reported(log, name):
    damage, invariant, place, text = DAMAGES[name]
    offset, seen = place(log), text(log)
    found = log.found(damage)
    assert {kind for kind, _ in found} == {invariant} | FOLLOWS.get(name, set()), found
    if invariant is _I.COMMITTED_VISIBLE:
        assert any(seen in told for (kind, _), told in found.items() if kind is invariant), found
    else:
        assert seen in found.get((invariant, offset), ""), found


def test_a_sequence_may_go_on_behind_what_was_removed_and_begin_anew(log):
    assert log.found(lambda c, log: write_again(c, log, epoch=3, sequence=1_000)) == {}
    assert log.found(lambda c, log: write_again(c, log, epoch=4, sequence=0)) == {}


@pytest.mark.slow
def test_keys_that_do_not_fit_into_memory_are_told_apart(log, monkeypatch):
    monkeypatch.setattr(seen_keys, "CACHE_KIB", 1)
    for number in range(20):
        log.put(*((b"key %d" % (1_000 * number + each), b"v") for each in range(1_000)))
    log.run()
    assert log.found(lambda *_: None) == {}
    again = log.put((b"key 7", b"w"))
    found = log.found(say_compacted)
    assert [offset for invariant, offset in found if invariant is _I.ONE_OF_EACH_KEY] == [again]
