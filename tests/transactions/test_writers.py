"""Several writers in one transaction: those that its commit names count, and no others."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
from sqlalchemy import Connection

from txnstore.db.statements import HotStatement
from txnstore.db.store import Store
from txnstore.errors import (
    InvalidRequest,
    InvalidTransactionState,
    ProducerFenced,
    TransactionAbortable,
)
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import delete_topic
from txnstore.model import ControlType, IsolationLevel, Record
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.administration import OpenInPartition, abort_open_transaction
from txnstore.transactions.listing import (
    TransactionFilter,
    describe_transaction,
    hanging_transactions,
    list_transactions,
)
from txnstore.transactions.protocol import EPOCH_EXHAUSTED, EPOCH_MAX, TransactionState
from txnstore.transactions.recovery import abort_by_administrator, recover
from txnstore.transactions.rows import Participants, markers_of, participants_of
from txnstore.transactions.transaction import abort_if_timed_out
from txnstore.transactions.writers import (
    TransactionWriter,
    append_as_writer,
    begin_transaction,
    join_transaction,
    report_writer,
)


@dataclass
class Writer:
    """A process that joined a transaction: it counts its sequence numbers."""

    store: Store
    joined: TransactionWriter
    sequences: dict[int, int] = field(default_factory=dict)

    @property
    def id(self):
        return self.joined.writer_id

    def batch(self, partition_id, *values):
        first = self.sequences.get(partition_id, 0)
        self.sequences[partition_id] = first + len(values)
        batch = encode(
            [Record(value) for value in values],
            producer=self.joined.identity,
            base_sequence=first,
            is_transactional=True,
        )
        return Append(partition_id, batch)

    def send(self, partition_id, *values, report=False):
        return append_as_writer(self.store, self.joined, [self.batch(partition_id, *values)], report=report)[0]

    def report(self):
        report_writer(self.store, self.joined)
        return self.id


def begun(bench, **options):
    producer = bench.started(**options)
    begin_transaction(bench.store, producer.transactional_id, producer.identity)
    return producer


def join(bench, producer):
    return Writer(bench.store, join_transaction(bench.store, producer.transactional_id, producer.identity))


def uncommitted(bench, partition_id):
    return bench.read(partition_id, IsolationLevel.READ_UNCOMMITTED)


def check(bench, *, at_rest=True):
    # Other tests use the store as well: at rest are only these partitions.
    assert_sound(bench.store, partition_ids=bench.partition_ids)
    if at_rest:
        for partition_id in bench.partition_ids:
            bounds = bench.bounds(partition_id)
            assert bounds.last_stable_offset == bounds.high_watermark


@pytest.fixture
def bench(own_bench):
    """A store that nobody else uses: all of it has to be sound in the end."""
    return own_bench


@pytest.fixture(params=[False, True], ids=["at once", "separately"])
def separate(request):
    return request.param


@pytest.mark.slow_but_first
def test_writers_that_reported_count_and_the_others_do_not(bench, separate) -> None:
    first, second = bench.partition_ids
    producer = begun(bench, writes_elsewhere=separate)
    good, silent, empty = (join(bench, producer) for _ in range(3))
    assert good.joined.identity.producer_id not in {silent.id, producer.identity.producer_id}
    producer.send(first, b"own")
    good.send(first, b"good 1")
    silent.send(first, b"silent 1")
    good.send(second, b"good 2")
    silent.send(second, b"silent 2")
    good.report()
    empty.report()
    check(bench, at_rest=False)
    assert bench.read(first) == bench.read(second) == []
    producer.commit()
    assert (bench.read(first), bench.read(second)) == ([b"own", b"good 1"], [b"good 2"])
    assert len(uncommitted(bench, first)) == 3
    kinds = sorted((row.producer_id, ControlType(row.outcome)) for row in bench.finished(second))
    assert kinds == sorted([(good.id, ControlType.COMMIT), (silent.id, ControlType.ABORT)])
    check(bench)
    described = bench.store.read(lambda connection: describe_transaction(connection, producer.transactional_id))
    assert described.writers == ()


@pytest.mark.slow_but_first
def test_named_writers_count_and_no_other_even_if_it_has_reported(bench, separate) -> None:
    first, _ = bench.partition_ids
    producer = begun(bench, writes_elsewhere=separate)
    named, other = join(bench, producer), join(bench, producer)
    named.send(first, b"named", report=True)
    other.send(first, b"other", report=True)
    producer.commit(writers=[named.id])
    assert bench.read(first) == [b"named"]
    check(bench)


def test_a_commit_that_names_nobody_counts_no_writer(bench) -> None:
    first, _ = bench.partition_ids
    producer = begun(bench)
    writer = join(bench, producer)
    writer.send(first, b"writer", report=True)
    producer.send(first, b"own")
    producer.commit(writers=[])
    assert bench.read(first) == [b"own"]


@pytest.mark.parametrize("name", ["a stranger", "one that has not reported"])
def test_a_commit_that_names_a_writer_that_cannot_count_changes_nothing(bench, name) -> None:
    first, _ = bench.partition_ids
    producer = begun(bench)
    silent, good = join(bench, producer), join(bench, producer)
    silent.send(first, b"silent")
    good.send(first, b"good", report=True)
    named = 10**12 if name == "a stranger" else silent.id
    with pytest.raises(InvalidRequest, match=rf"writer {named} .*nothing was committed"):
        producer.commit(writers=[good.id, named])
    assert bench.row(producer.transactional_id).state is TransactionState.ONGOING
    silent.report()
    producer.commit(writers=[good.id, silent.id])
    assert sorted(bench.read(first)) == [b"good", b"silent"]


def test_an_abort_aborts_every_writer_and_takes_no_names(bench, separate) -> None:
    first, second = bench.partition_ids
    producer = begun(bench, writes_elsewhere=separate)
    writer = join(bench, producer)
    writer.send(first, b"a", report=True)
    writer_of_nothing = join(bench, producer)
    with pytest.raises(InvalidRequest, match="an abort takes no records"):
        producer.end(commit=False, writers=[writer.id])
    producer.abort()
    assert bench.read(first) == bench.read(second) == []
    assert [row.outcome for row in bench.finished(first)] == [ControlType.ABORT]
    with pytest.raises(ProducerFenced, match="CompleteAbort"):
        writer_of_nothing.send(second, b"late")
    check(bench)


def commits(bench, producer):
    producer.commit()


def aborts(bench, producer):
    producer.abort()


def starts_again(bench, producer):
    producer.twin().start()


def times_out(bench, producer):
    bench.clock.advance(60_001)
    assert abort_if_timed_out(bench.store, producer.transactional_id)


def is_aborted_by_an_administrator(bench, producer):
    assert abort_by_administrator(bench.store, producer.transactional_id)


def ends_and_another_begins(bench, producer):
    producer.commit()
    begin_transaction(bench.store, producer.transactional_id, producer.identity)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("over", "how"),
    [
        (commits, "CompleteCommit"),
        (aborts, "CompleteAbort"),
        (starts_again, "the producer is"),
        (times_out, r"aborted \(it was open for .* longer than its timeout"),
        (is_aborted_by_an_administrator, r"aborted \(by an administrator\)"),
        (ends_and_another_begins, "Ongoing|the producer is"),
    ],
)
def test_a_late_writer_is_fenced_and_told_how_the_transaction_ended(bench, over, how) -> None:
    first, _ = bench.partition_ids
    producer = begun(bench)
    writer = join(bench, producer)
    writer.send(first, b"in time")
    zombie = producer.twin()
    over(bench, producer)
    before = uncommitted(bench, first)
    for late in (
        lambda: writer.send(first, b"late"),
        writer.report,
        lambda: join(bench, zombie),
    ):
        with pytest.raises(ProducerFenced, match=rf"is over: .*({how})"):
            late()
    assert uncommitted(bench, first) == before
    assert b"late" not in bench.read(first)
    check(bench)


def test_the_transaction_of_writers_that_died_is_aborted_in_time_and_its_producer_told(bench) -> None:
    first, second = bench.partition_ids
    producer = begun(bench)
    join(bench, producer).send(first, b"a", report=True)
    join(bench, producer).send(second, b"b")
    assert bench.bounds(first).last_stable_offset == 0
    bench.clock.advance(60_001)
    assert producer.transactional_id in recover(bench.store).aborted
    check(bench)
    with pytest.raises(TransactionAbortable):
        producer.commit()
    assert bench.read(first) == bench.read(second) == []


def test_a_decision_that_was_not_carried_out_is_carried_out_by_anybody(bench) -> None:
    first, second = bench.partition_ids
    producer = begun(bench, writes_elsewhere=True)
    good, silent = join(bench, producer), join(bench, producer)
    good.send(first, b"good", report=True)
    silent.send(first, b"silent 1")
    silent.send(second, b"silent 2")
    producer.send(second, b"own")
    producer.decide(commit=True)
    check(bench, at_rest=False)
    with pytest.raises(ProducerFenced, match="PrepareCommit"):
        silent.send(first, b"late")
    assert producer.transactional_id in recover(bench.store).completed
    assert (bench.read(first), bench.read(second)) == ([b"good"], [b"own"])
    check(bench)
    # The answer of the decision was lost: the same request says what was done, whoever it names.
    producer.commit(writers=[silent.id])
    assert bench.read(first) == [b"good"]


def test_a_repeated_commit_is_recognised(bench, separate) -> None:
    first, _ = bench.partition_ids
    producer = begun(bench, writes_elsewhere=separate)
    writer = join(bench, producer)
    writer.send(first, b"a", report=True)
    repeating = producer.twin()
    producer.commit(writers=[writer.id])
    repeating.commit(writers=[writer.id])
    assert repeating.identity == producer.identity
    assert bench.read(first) == [b"a"]


def test_the_last_epoch_of_a_producer_id_has_room_for_the_writers_markers(bench) -> None:
    first, _ = bench.partition_ids
    producer = bench.started()
    bench.set_row(producer.transactional_id, producer_epoch=EPOCH_EXHAUSTED)
    producer.become(type(producer.identity)(producer.identity.producer_id, EPOCH_EXHAUSTED))
    begin_transaction(bench.store, producer.transactional_id, producer.identity)
    writer = join(bench, producer)
    writer.send(first, b"a", report=True)
    producer.commit()
    assert producer.identity.epoch == 0
    assert bench.read(first) == [b"a"]
    with pytest.raises(ProducerFenced):
        writer.send(first, b"late")
    check(bench)


def test_however_many_have_taken_it_over_all_markers_have_the_last_epoch(new_row) -> None:
    decided = new_row(TransactionState.PREPARE_COMMIT, producer_epoch=40_000)
    markers = markers_of(decided, Participants([1], {9: [2], 10: [3]}, {9: True, 10: False}), {9})
    assert [marker.producer.epoch for marker in markers] == [EPOCH_MAX] * 3


def test_a_batch_whose_answer_was_lost_is_recognised_also_after_the_report(bench) -> None:
    first, second = bench.partition_ids
    producer = begun(bench)
    writer = join(bench, producer)
    last = [writer.batch(first, b"a"), writer.batch(second, b"b")]
    places = append_as_writer(bench.store, writer.joined, last, report=True)
    again = append_as_writer(bench.store, writer.joined, last, report=True)
    assert [place.base_offset for place in again] == [place.base_offset for place in places]
    assert all(place.is_duplicate for place in again)
    assert writer.report() == writer.report()
    producer.commit()
    assert (bench.read(first), bench.read(second)) == ([b"a"], [b"b"])


def test_whoever_has_reported_writes_no_more(bench) -> None:
    first, second = bench.partition_ids
    producer = begun(bench)
    writer = join(bench, producer)
    writer.send(first, b"a", report=True)
    with pytest.raises(InvalidTransactionState, match="has reported"):
        writer.send(second, b"more")
    producer.commit()
    assert (bench.read(first), uncommitted(bench, second)) == ([b"a"], [])


def test_a_batch_of_somebody_else_or_none_of_a_transaction_is_refused(bench) -> None:
    first, _ = bench.partition_ids
    producer = begun(bench)
    writer, other = join(bench, producer), join(bench, producer)
    plain = encode([Record(b"x")], producer=writer.joined.identity, base_sequence=0)
    for batch in (other.batch(first, b"x"), producer.batch(first, b"x"), Append(first, plain)):
        with pytest.raises(InvalidRequest):
            append_as_writer(bench.store, writer.joined, [batch])
    forged = TransactionWriter(producer.transactional_id, producer.identity, type(producer.identity)(10**12, 0))
    with pytest.raises(InvalidRequest, match="has not joined"):
        report_writer(bench.store, forged)
    assert uncommitted(bench, first) == []


def test_a_transaction_is_joined_only_while_it_is_open(bench) -> None:
    producer = bench.started()
    with pytest.raises(ProducerFenced, match=r"not open \(Empty\)"):
        join(bench, producer)
    with pytest.raises(ProducerFenced, match="not known"):
        join_transaction(bench.store, f"{producer.transactional_id}-other", producer.identity)
    begin_transaction(bench.store, producer.transactional_id, producer.identity)
    begin_transaction(bench.store, producer.transactional_id, producer.identity)
    assert bench.row(producer.transactional_id).transaction_number == 1
    assert pickle.loads(pickle.dumps(join(bench, producer).joined)).transaction == producer.identity
    producer.commit()


def test_a_description_shows_the_writers_and_what_they_wrote_to(bench) -> None:
    first, second = bench.partition_ids
    producer = begun(bench)
    quiet, busy = join(bench, producer), join(bench, producer)
    busy.send(first, b"a")
    busy.send(second, b"b", report=True)
    described = bench.store.read(lambda connection: describe_transaction(connection, producer.transactional_id))
    assert [writer.producer_id for writer in described.writers] == [quiet.id, busy.id]
    assert [writer.has_reported for writer in described.writers] == [False, True]
    assert described.writers[1].partitions == described.partitions
    assert [name.partition for name in described.partitions] == [0, 1]
    wanted = TransactionFilter(producer_ids={busy.id})
    found = bench.store.read(lambda connection: list_transactions(connection, wanted))
    assert [row.transactional_id for row in found] == [producer.transactional_id]
    producer.abort()
    assert bench.store.read(lambda connection: list_transactions(connection, wanted)) == []


def test_what_a_writer_has_open_does_not_hang_while_its_transaction_runs(bench) -> None:
    first, _ = bench.partition_ids
    producer = bench.producer()
    producer.start(timeout_ms=900_000)
    begin_transaction(bench.store, producer.transactional_id, producer.identity)
    join(bench, producer).send(first, b"a")
    bench.clock.advance(899_000)

    def hanging():
        return bench.store.read(
            lambda connection: hanging_transactions(bench.store, connection, 1_000, bench.partition_ids)
        )

    assert hanging() == []
    producer.abort()


def test_an_administrator_who_aborts_a_writers_records_aborts_the_transaction_as_a_whole(bench) -> None:
    first, second = bench.partition_ids
    producer = begun(bench)
    writer = join(bench, producer)
    writer.send(first, b"a", report=True)
    producer.send(second, b"own")
    abort_open_transaction(bench.store, OpenInPartition(first, writer.joined.identity))
    check(bench)
    with pytest.raises(TransactionAbortable):
        producer.commit()
    assert bench.read(first) == bench.read(second) == []


def test_a_topic_that_a_writer_has_written_to_is_not_deleted(bench) -> None:
    first, _ = bench.partition_ids
    producer = begun(bench)
    join(bench, producer).send(first, b"a")
    with pytest.raises(InvalidTransactionState, match="open transaction"):
        bench.store.write(lambda connection: delete_topic(connection, f"topic-{bench.prefix}"))
    producer.abort()


def test_readers_wait_for_the_oldest_writer_only_until_the_decision(bench) -> None:
    first, _ = bench.partition_ids
    other = bench.started()
    producer = begun(bench)
    writer = join(bench, producer)
    writer.send(first, b"w", report=True)
    other.send(first, b"o")
    other.commit()
    assert bench.bounds(first).last_stable_offset == 0
    page = bench.store.read(lambda connection: fetch(connection, {first: 0}))[first]
    assert (page.batches, page.next_offset) == ((), 0)
    producer.commit()
    assert bench.read(first) == [b"w", b"o"]


def test_writers_come_in_one_order_whatever_plan_the_database_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        SimpleNamespace(writer_id=writer_id, reported=True, partition_id=partition_id, is_branch=False)
        for writer_id, partition_id in ((9, 2), (4, 3), (9, 1))
    ]
    monkeypatch.setattr(HotStatement, "rows", lambda *_: rows)
    assert list(participants_of(cast(Connection, None), "id").writers.items()) == [(4, [3]), (9, [1, 2])]
