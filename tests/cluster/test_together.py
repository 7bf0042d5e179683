"""Many transactions over several databases end together, each as it would by itself, by a few database transactions."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, Table, event, select, update

from tests.cluster.conftest import Bench, Producer, down
from tests.tools.crashes import is_commit
from tests.tools.lists import be_many
from txnstore import Consumer, TopicPartition
from txnstore.db.backend import Subjects
from txnstore.db.cluster.locality import Locality
from txnstore.db.schema import (
    finished_transactions,
    offset_producers,
    pending_group_offsets,
    pending_markers,
    producer_states,
    transaction_groups,
    transaction_log,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
    transactions,
)
from txnstore.errors import (
    InvalidProducerEpoch,
    OutcomeUnknown,
    StatementFailed,
    StoreUnavailable,
    TransactionAbortable,
)
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.model import ProducerIdentity, Record
from txnstore.testing.invariants import assert_cluster_sound
from txnstore.transactions import rows
from txnstore.transactions.protocol import EPOCH_EXHAUSTED, FenceReason, TransactionState, complete
from txnstore.transactions.recovery import abort_overdue_in, abort_timed_out, complete_all_decided
from txnstore.transactions.together import abort_together, complete_together
from txnstore.transactions.transaction import abort_if_timed_out
from txnstore.transactions.writers import append_as_writer, begin_transaction, join_transaction, report_writer

S = TransactionState
PATIENCE_SECONDS = 60.0
TIMEOUT_MS = 60_000
#: What differs from one transaction to another that is alike.
IDS = {"transactional_id", "producer_id", "previous_producer_id", "writer_producer_id", "entry_id", "group_id"}
#: By what of a transaction they say whose they are.
OF_IDS = (
    transactions,
    transaction_log,
    transaction_partitions,
    transaction_groups,
    transaction_writers,
    transaction_writer_partitions,
    pending_markers,
)
OF_PRODUCERS = (producer_states, pending_group_offsets, offset_producers)
#: Where they stand in the log depends on who came before.
PLACES = {"transaction_first_offset", "last_offset", "last_base_offset"}


def open_some(bench: Bench) -> list[Producer]:
    """Open a transaction of each sort, coordinated by the first database."""
    here, there, third = (bench.partition_at(number) for number in (1, 2, 3))
    groups = [bench.name_at(number, "group") for number in (1, 2)]
    local, away, wide, offsets, written, last = (bench.producer_at(1) for _ in range(6))
    local.send(here, b"local")
    local.send_offsets(groups[0], {here: 1})
    away.send(there, b"away")
    for number in (here, there, third):
        wide.send(number, b"wide")
    for group_id in groups:
        offsets.send_offsets(group_id, {there: 7})
    store = bench.cluster.own(1)
    begin_transaction(store, written.transactional_id, written.identity, cluster=bench.cluster)
    for reports in (True, False):
        writer = join_transaction(store, written.transactional_id, written.identity, cluster=bench.cluster)
        batch = encode([Record(b"w")], producer=writer.identity, base_sequence=0, is_transactional=True)
        append_as_writer(store, writer, [Append(here, batch), Append(there, batch)], cluster=bench.cluster)
        if reports:
            report_writer(store, writer, cluster=bench.cluster)
    exhaust(bench, last)
    last.send(third, b"last")
    return [local, away, wide, offsets, written, last]


def exhaust(bench: Bench, producer: Producer) -> None:
    """Leave its producer id no further epoch."""
    row = update(transactions).where(transactions.c.transactional_id == producer.transactional_id)
    bench.cluster.own(1).write(lambda connection: connection.execute(row.values(producer_epoch=EPOCH_EXHAUSTED)))
    producer.become(ProducerIdentity(producer.identity.producer_id, EPOCH_EXHAUSTED))


def left_of(bench: Bench, producers: list[Producer], producer_ids: list[list[int]]) -> Any:
    """Return what each database holds of each of them, without what differs among those that are alike."""

    def found(number: int, table: Table, column: str, value: Any) -> list[dict[str, Any]]:
        statement = select(table).where(table.c[column] == value).order_by(*table.primary_key)
        listed = bench.cluster.own(number).read(lambda connection: connection.execute(statement).all())
        hidden = IDS | PLACES
        return [{key: repr(of) for key, of in row._mapping.items() if key not in hidden} for row in listed]

    return [
        [found(number, table, "transactional_id", producer.transactional_id) for table in OF_IDS]
        + [found(number, table, "producer_id", each) for table in OF_PRODUCERS for each in own]
        for producer, own in zip(producers, producer_ids, strict=True)
        for number in (1, 2, 3)
    ]


def producer_ids_of(bench: Bench, producers: list[Producer]) -> list[list[int]]:
    """Return the ids under which each has written."""

    def writers(producer: Producer, connection: Connection) -> list[int]:
        return sorted(rows.participants_of(connection, producer.transactional_id).writers)

    store = bench.cluster.own(1)
    return [[producer.identity.producer_id, *store.read(partial(writers, producer))] for producer in producers]


@pytest.mark.slow
@pytest.mark.parametrize("many", [False, True], ids=["few", "as many"])
def test_they_leave_the_rows_that_they_leave_one_by_one(bench: Bench, monkeypatch, many):
    if many:
        be_many(monkeypatch)
    opened = [open_some(bench) for _ in range(2)]
    ids = [producer_ids_of(bench, producers) for producers in opened]
    bench.clock.advance(TIMEOUT_MS + 1)
    store = bench.cluster.own(1)
    names = [producer.transactional_id for producer in opened[0]]
    locality = Locality.of(store, bench.cluster)
    done = store.write(lambda connection: abort_together(names, locality, connection))
    assert (list(done.aborted), done.busy, done.unusual) == (names, (), ())
    assert list(done.pending) == names[1:]
    assert [bench.row(name).state for name in names] == [S.COMPLETE_ABORT, *[S.PREPARE_ABORT] * 5]
    with monkeypatch.context() as patched:
        # None of them is left to be completed by itself.
        patched.delattr("txnstore.transactions.together.try_to_complete")
        completed = complete_together(store, bench.cluster, names)
    assert (list(completed.completed), completed.put_off) == (names, {})
    for producer in opened[1]:
        assert abort_if_timed_out(store, producer.transactional_id, bench.cluster)
    one, other = (left_of(bench, *of) for of in zip(opened, ids, strict=True))
    assert one == other
    for number in (1, 2, 3):
        assert bench.read(bench.partition_at(number)) == []
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_each_producer_is_told_and_goes_on(bench: Bench):
    producers = open_some(bench)
    bench.clock.advance(TIMEOUT_MS + 1)
    there = bench.partition_at(2)
    assert abort_overdue_in(bench.cluster.own(2), [there], bench.cluster) is None
    for producer in producers:
        row = bench.row(producer.transactional_id)
        assert (row.state, row.fence_reason) == (S.COMPLETE_ABORT, FenceReason.TIMEOUT)
        with pytest.raises(TransactionAbortable, match="longer than its timeout of 60000 ms"):
            producer.end(commit=True)
        producer.end(commit=False)
        producer.send(there, b"next")
        producer.end(commit=True)
    assert bench.read(there) == [b"next"] * len(producers)
    assert_cluster_sound(bench.cluster, at_rest=True)


def open_alike(bench: Bench, count: int) -> list[Producer]:
    producers = [bench.producer_at(1) for _ in range(count)]
    for producer in producers:
        for number in (1, 2):
            producer.send(bench.partition_at(number), b"a")
        producer.send_offsets("group of all", {bench.partition_at(1): 1})
    return producers


def commits_of(bench: Bench, work: Any) -> Counter[str]:
    """Return how many database transactions of each member have changed something."""
    found: Counter[str] = Counter()
    wrote: set[int] = set()
    stores = [bench.cluster.own(number) for number in (1, 2, 3)]

    def note(connection, cursor, statement, *_: object) -> None:
        if statement.lstrip().startswith(("INSERT", "UPDATE", "DELETE")):
            wrote.add(id(connection))
        elif is_commit(statement) and id(connection) in wrote:
            wrote.discard(id(connection))
            found[next(str(store.label) for store in stores if store.engine is connection.engine)] += 1

    for store in stores:
        event.listen(store.engine, "before_cursor_execute", note)
    try:
        work()
    finally:
        for store in stores:
            event.remove(store.engine, "before_cursor_execute", note)
    return found


@pytest.mark.slow
def test_many_cost_as_many_database_transactions_as_a_few(bench: Bench):
    bench.cluster.parallel = False
    counts = []
    for count in (2, 20):
        producers = open_alike(bench, count)
        bench.clock.advance(TIMEOUT_MS + 1)
        counts.append(commits_of(bench, lambda: abort_timed_out(bench.cluster.own(1), bench.cluster)))
        assert {bench.row(producer.transactional_id).state for producer in producers} == {S.COMPLETE_ABORT}
    # Decided and complete at the coordinator, and markers and offsets where they live.
    assert counts[0] == counts[1]
    group_is_at = bench.cluster.coordinator_id_of("group of all")
    assert counts[0].total() == (4 if group_is_at == 3 else 3)


def test_readers_are_woken_where_markers_are_written_and_by_nothing_else(bench: Bench, monkeypatch):
    there = bench.partition_at(2)
    for name in ("aborted", "completed"):
        for producer in [bench.producer_at(1) for _ in range(3)]:
            producer.send(there, b"a")
            if name == "completed":
                with bench.down(2), pytest.raises(OutcomeUnknown):
                    producer.end(commit=True)
        told: dict[int, list[Subjects]] = {1: [], 2: []}
        with monkeypatch.context() as patched:
            for number, of in told.items():
                patched.setattr(bench.cluster.own(number), "announce", of.append)
            if name == "aborted":
                bench.clock.advance(TIMEOUT_MS + 1)
                assert len(abort_timed_out(bench.cluster.own(1), bench.cluster)) == 3
            else:
                assert len(complete_all_decided(bench.cluster.own(1), bench.cluster)) == 3
        assert told == {1: [], 2: [Subjects(frozenset({there}))]}


@pytest.mark.slow
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_many_that_are_decided_are_completed_together(bench: Bench, commit):
    bench.cluster.parallel = False
    producers = open_alike(bench, 6)
    # Offsets of the same group are counted in as they were sent.
    with bench.down(2):
        for producer in producers:
            with pytest.raises(OutcomeUnknown):
                producer.end(commit=commit)
    done: list[str] = []
    counts = commits_of(bench, lambda: done.extend(complete_all_decided(bench.cluster.own(1), bench.cluster)))
    assert set(done) == {producer.transactional_id for producer in producers}
    # Markers, and the offsets of groups with them, then the completion.
    assert counts.total() == 2
    for number in (1, 2):
        assert bench.read(bench.partition_at(number)) == ([b"a"] * 6 if commit else [])
    assert bench.committed("group of all") == ({bench.partition_at(1): 1} if commit else {})
    assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_a_row_that_is_completed_together_becomes_what_the_rules_make_of_it(bench: Bench, commit):
    producers = [bench.producer_at(1) for _ in range(3)]
    usual, last, other_way = producers
    commits = {usual.transactional_id: commit, last.transactional_id: False, other_way.transactional_id: not commit}
    exhaust(bench, last)
    for producer in producers:
        for number in (1, 2):
            producer.send(bench.partition_at(number), b"a")
    with bench.down(2):
        for producer in producers:
            with pytest.raises(OutcomeUnknown):
                producer.end(commit=commits[producer.transactional_id])
    before = [bench.row(producer.transactional_id) for producer in producers]
    bench.clock.advance(7)
    names = [producer.transactional_id for producer in producers]
    store = bench.cluster.own(1)
    assert complete_together(store, bench.cluster, names).put_off == {}
    after = [bench.row(name) for name in names]
    assert after == [complete(row, now_ms=bench.clock.now_ms()) for row in before]
    entries = select(transaction_log.c.state, transaction_log.c.first_state, transaction_log.c.reason)
    for row in after:
        of_id = entries.where(transaction_log.c.transactional_id == row.transactional_id)
        newest = of_id.order_by(transaction_log.c.entry_id.desc()).limit(1)
        found = store.read(lambda connection, newest=newest: connection.execute(newest).one())
        assert tuple(found) == (row.state, row.state, "completion")
    assert_cluster_sound(bench.cluster, at_rest=True)


def decide_unheard(bench: Bench) -> list[tuple[str, int]]:
    """Let five transactions end while the second database is away, the last transactional id first.

    Each has two records in each partition there, one by a further writer. Returns the name of each, which is also in
    its records, and its epoch, in the order of decisions; the fourth was aborted.
    """
    there = [bench.partition_at(2, nth) for nth in range(2)]
    store = bench.cluster.own(1)
    producers = sorted((bench.producer_at(1) for _ in range(5)), key=lambda each: each.transactional_id, reverse=True)
    # Two of them have another epoch than the others.
    for producer in producers[1:3]:
        producer.send(bench.partition_at(1), b"before")
        producer.end(commit=True)
    found = []
    for producer in producers:
        name, identity = producer.transactional_id, producer.identity
        begin_transaction(store, name, identity, cluster=bench.cluster)
        writer = join_transaction(store, name, identity, cluster=bench.cluster)
        for number in there:
            producer.send(number, name.encode())
            batch = encode([Record(name.encode())], producer=writer.identity, base_sequence=0, is_transactional=True)
            append_as_writer(store, writer, [Append(number, batch)], cluster=bench.cluster)
        report_writer(store, writer, cluster=bench.cluster)
        found.append((name, identity.epoch))
    with bench.down(2):
        for producer in producers:
            bench.clock.advance(1)
            with pytest.raises(OutcomeUnknown):
                producer.end(commit=producer is not producers[3])
    return found


def commit_numbers_in(bench: Bench, partition_id: int) -> list[tuple[int, int | None]]:
    """Return the epoch and the commit number of each producer's transaction, in the order of markers."""
    statement = (
        select(finished_transactions.c.producer_epoch, finished_transactions.c.commit_number)
        .where(finished_transactions.c.partition_id == partition_id)
        .order_by(finished_transactions.c.marker_offset)
    )
    return [tuple(row) for row in bench.cluster.own(2).read(lambda connection: connection.execute(statement).all())]


def test_each_of_those_that_are_completed_together_is_a_commit_of_its_own(bench: Bench) -> None:
    decided = decide_unheard(bench)
    assert len({epoch for _, epoch in decided}) == 2
    assert len(complete_all_decided(bench.cluster.own(1), bench.cluster)) == len(decided)
    first, second = (commit_numbers_in(bench, bench.partition_at(2, nth)) for nth in range(2))
    # A transaction has one number in all partitions, and so have its writers.
    assert first == second
    assert [epoch for epoch, _ in first[::2]] == [epoch for _, epoch in decided]
    assert first[::2] == first[1::2]
    numbers = [number for _, number in first[::2]]
    assert numbers.pop(3) is None
    assert numbers == sorted(set(numbers))  # type: ignore[type-var]  # none of them is None
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_a_consumer_gets_those_that_are_completed_together_one_by_one_as_they_were_decided(bench: Bench) -> None:
    committed = [name for number, (name, _) in enumerate(decide_unheard(bench)) if number != 3]
    complete_all_decided(bench.cluster.own(1), bench.cluster)
    settings = {"txnstore.delivery.order": "commit", "txnstore.delivery.atomic": True, "auto.offset.reset": "earliest"}
    places = [bench.topic.partition_ids.index(bench.partition_at(2, nth)) for nth in range(2)]
    with Consumer({"bootstrap.servers": ", ".join(bench.site.urls), "group.id": "readers", **settings}) as consumer:
        consumer.assign([TopicPartition(bench.topic.name, place) for place in places])
        for name in committed:
            transaction = consumer.consume_transaction(PATIENCE_SECONDS)
            assert transaction is not None
            assert [message.value() for message in transaction.messages] == [name.encode()] * 4


def test_one_that_is_damaged_elsewhere_keeps_no_other_one_open(bench: Bench):
    damaged, *others = open_alike(bench, 3)
    there = bench.partition_at(2)

    def be_newer(connection: Connection, epoch: int) -> None:
        key = (producer_states.c.partition_id == there) & (
            producer_states.c.producer_id == damaged.identity.producer_id
        )
        connection.execute(update(producer_states).where(key).values(producer_epoch=epoch))

    bench.cluster.own(2).write(lambda connection: be_newer(connection, 9))
    bench.clock.advance(TIMEOUT_MS + 1)
    names = {producer.transactional_id for producer in (damaged, *others)}
    assert set(abort_timed_out(bench.cluster.own(1), bench.cluster)) == names
    assert bench.row(damaged.transactional_id).state is S.PREPARE_ABORT
    assert {bench.row(other.transactional_id).state for other in others} == {S.COMPLETE_ABORT}
    with pytest.raises(InvalidProducerEpoch):
        complete_all_decided(bench.cluster.own(1), bench.cluster)
    bench.cluster.own(2).write(lambda connection: be_newer(connection, damaged.identity.epoch))
    assert complete_all_decided(bench.cluster.own(1), bench.cluster) == (damaged.transactional_id,)
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_one_that_somebody_is_at_work_on_is_completed_by_itself(bench: Bench, monkeypatch):
    producers = open_alike(bench, 3)
    bench.clock.advance(TIMEOUT_MS + 1)
    store = bench.cluster.own(1)
    names = [producer.transactional_id for producer in producers]
    locality = Locality.of(store, bench.cluster)
    store.write(lambda connection: abort_together(names, locality, connection))
    busy: list[str] = []

    def complete_alone(store, cluster, transactional_id):
        busy.append(transactional_id)
        return StoreUnavailable("it is for this test to say")

    monkeypatch.setattr("txnstore.transactions.together.try_to_complete", complete_alone)
    if store.backend.name == "sqlite":
        # Whoever writes to a SQLite database is alone with it.
        assert complete_together(store, bench.cluster, names).put_off == {}
        return

    def work(connection: Connection) -> Any:
        rows.lock_row(connection, names[1])
        return complete_together(store, bench.cluster, names)

    done = store.write(work)
    assert busy == [names[1]] == list(done.put_off)
    assert list(done.completed) == [names[0], names[2]]
    monkeypatch.undo()
    assert complete_all_decided(store, bench.cluster) == (names[1],)
    assert_cluster_sound(bench.cluster, at_rest=True)


def left_by_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[Producer]:
    """Return producers of decided transactions whose markers are all queued, those of the coordinator's own too."""
    producers = open_alike(bench, 2)
    with monkeypatch.context() as patched, bench.down(2):
        # As in a database that has not heard of its partition yet.
        patched.setattr(Locality, "partitions_elsewhere", lambda self, connection, numbers: set(numbers))
        for producer in producers:
            with pytest.raises(OutcomeUnknown):
                producer.end(commit=True)
    for producer in producers:
        assert bench.queued(producer.transactional_id) == {bench.partition_at(1), bench.partition_at(2)}
    return producers


def test_what_is_left_to_the_coordinators_own_database_is_done_before_they_are_complete(bench: Bench, monkeypatch):
    producers = left_by_others(bench, monkeypatch)
    done = complete_all_decided(bench.cluster.own(1), bench.cluster)
    assert set(done) == {producer.transactional_id for producer in producers}
    assert {bench.row(name).state for name in done} == {S.COMPLETE_COMMIT}
    for number in (1, 2):
        assert bench.read(bench.partition_at(number)) == [b"a", b"a"]
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_those_that_cannot_be_struck_off_together_are_completed_one_by_one(bench: Bench, monkeypatch):
    producers = open_alike(bench, 2)
    names = [producer.transactional_id for producer in producers]
    with bench.down(2):
        for producer in producers:
            with pytest.raises(OutcomeUnknown):
                producer.end(commit=True)

    def refuse(*_: object, **__: object) -> None:
        raise StatementFailed("one of them is damaged")

    with monkeypatch.context() as patched:
        patched.setattr(rows, "save_each", refuse)
        done = complete_together(bench.cluster.own(1), bench.cluster, names)
    assert (list(done.completed), done.put_off) == (names, {})
    assert {bench.row(name).state for name in names} == {S.COMPLETE_COMMIT}
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_of_one_that_was_forgotten_meanwhile_nothing_is_left(bench: Bench):
    for cluster in (bench.cluster, None):
        assert complete_together(bench.cluster.own(1), cluster, ["nobody"]).put_off == {}


def test_what_another_one_has_struck_off_meanwhile_is_not_waited_for(bench: Bench, monkeypatch):
    """Each of two helpers reached one of the databases only: what both have delivered is complete."""
    producer = bench.producer_at(1)
    for number in (2, 3):
        producer.send(bench.partition_at(number), b"a")
    with bench.down(2), bench.down(3), pytest.raises(OutcomeUnknown):
        producer.end(commit=True)
    store, name = bench.cluster.own(1), producer.transactional_id
    original = store.write

    def write_later(work, **options):
        # The other one comes in between.
        monkeypatch.undo()
        with bench.site.open() as other, down(other, other.own(3)):
            assert set(complete_together(other.own(1), other, [name]).put_off) == {name}
        assert bench.queued(name) == {bench.partition_at(3)}
        return original(work, **options)

    with bench.down(2):
        monkeypatch.setattr(store, "write", write_later)
        complete_together(store, bench.cluster, [name])
    assert bench.row(name).state is S.COMPLETE_COMMIT
    for number in (2, 3):
        assert bench.read(bench.partition_at(number)) == [b"a"]
    assert_cluster_sound(bench.cluster, at_rest=True)


def decided_unheard(bench: Bench) -> tuple[Producer, int]:
    """Commit a record in the second database, which does not hear of it; return who may go on, and the partition."""
    producer = bench.producer_at(1)
    there = bench.partition_at(2)
    producer.send(there, b"first")
    twin = producer.twin()
    with bench.down(2), pytest.raises(OutcomeUnknown):
        producer.end(commit=True)
    return twin, there


def test_a_helper_that_slept_strikes_nothing_off_the_next_transaction(bench: Bench, monkeypatch):
    twin, there = decided_unheard(bench)
    store, name = bench.cluster.own(1), twin.transactional_id
    original = store.write

    def write_later(work, **options):
        # Meanwhile the first one is completed, and the next one decided, which the second database does not hear.
        monkeypatch.undo()
        twin.end(commit=True)
        twin.send(there, b"second")
        with bench.down(2), pytest.raises(OutcomeUnknown):
            twin.end(commit=True)
        return original(work, **options)

    monkeypatch.setattr(store, "write", write_later)
    complete_together(store, bench.cluster, [name])
    assert bench.queued(name) == {there}
    assert bench.row(name).state is S.PREPARE_COMMIT
    assert bench.read(there) == [b"first"]
    assert complete_all_decided(store, bench.cluster) == (name,)
    assert bench.read(there) == [b"first", b"second"]
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_a_helper_whose_markers_come_too_late_has_nothing_to_put_off(bench: Bench, monkeypatch):
    twin, there = decided_unheard(bench)
    store, name = bench.cluster.own(1), twin.transactional_id
    original = bench.cluster.write_at

    def write_later(*arguments, **options):
        # Meanwhile it is completed, and its producer has begun the next one in that partition.
        monkeypatch.undo()
        twin.end(commit=True)
        twin.send(there, b"second")
        return original(*arguments, **options)

    monkeypatch.setattr(bench.cluster, "write_at", write_later)
    assert complete_together(store, bench.cluster, [name]).put_off == {}
    twin.end(commit=True)
    assert bench.read(there) == [b"first", b"second"]
    assert_cluster_sound(bench.cluster, at_rest=True)
