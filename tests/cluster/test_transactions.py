"""Transactions over several databases: decided at one, carried out in all, fenced in each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine, delete, event, select, update

from tests.cluster.conftest import Bench, Producer
from tests.tools.cluster_changes import change_store_settings, delete_topic
from tests.transactions.bench import sent_offsets
from txnstore.db.schema import offset_producers, transaction_groups, transaction_partitions
from txnstore.db.store import Store
from txnstore.errors import (
    InvalidProducerEpoch,
    InvalidRequest,
    InvalidTransactionState,
    OutcomeUnknown,
    ProducerFenced,
    StoreUnavailable,
    TransactionAbortable,
    UnknownTopicOrPartition,
)
from txnstore.groups.offsets_from_elsewhere import (
    EndedElsewhere,
    add_offsets_from_elsewhere,
    finish_offsets_from_elsewhere,
)
from txnstore.log import topics
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.partition_rows import producers_of_partition
from txnstore.model import GroupMembership, IsolationLevel, OffsetAndMetadata, ProducerIdentity, Record
from txnstore.testing.invariants import Invariant, assert_cluster_sound
from txnstore.transactions import rows
from txnstore.transactions.administration import OpenInPartition, abort_open_transaction, abort_open_transactions
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.transactions.listing import HANGING_MARGIN_MS, hanging_in_cluster
from txnstore.transactions.open_transactions import each_held
from txnstore.transactions.outcome import Outcome, resolve_outcome
from txnstore.transactions.protocol import TransactionState
from txnstore.transactions.recovery import (
    AGAIN_MS,
    abort_by_administrator,
    abort_overdue_in,
    abort_timed_out,
    expire_producers,
    recover,
)
from txnstore.transactions.transaction import abort_if_timed_out, complete_decided
from txnstore.transactions.writers import append_as_writer, begin_transaction, join_transaction, report_writer
from txnstore.verification.verify import verify

S = TransactionState


@contextmanager
def commits_of(engine: Engine) -> Iterator[list[str]]:
    """Count the database transactions of one database, in every thread."""
    found: list[str] = []

    def note(connection: object, cursor: object, statement: str, *_: object) -> None:
        found.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield found
    finally:
        event.remove(engine, "before_cursor_execute", note)


@pytest.mark.slow
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
@pytest.mark.parametrize("coordinator_id", [1, 2])
def test_a_transaction_ends_the_same_in_every_database(bench: Bench, commit: bool, coordinator_id: int):
    producer = bench.producer_at(coordinator_id)
    began = producer.identity
    groups = {bench.partition_at(number): bench.name_at(number, "group") for number in (1, 2, 3)}
    for number in bench.topic.partition_ids:
        producer.send(number, b"a", b"b")
    for number, group_id in groups.items():
        producer.send_offsets(group_id, {number: 7})
    for number in bench.topic.partition_ids:
        assert bench.read(number) == []
    assert all(bench.offsets(group_id).unstable for group_id in groups.values())
    ended = producer.end(commit=commit)
    assert ended.identity == ProducerIdentity(began.producer_id, began.epoch + 1)
    for number in bench.topic.partition_ids:
        assert bench.read(number) == ([b"a", b"b"] if commit else [])
        assert bench.markers(number) == [(int(commit), began.epoch + 1)]
    for number, group_id in groups.items():
        assert bench.committed(group_id) == ({number: 7} if commit else {})
        assert not bench.offsets(group_id).unstable
    # And again, with what was begun and never written to.
    producer.coordinator.add_partitions(producer.transactional_id, producer.identity, bench.topic.partition_ids)
    producer.end(commit=True)
    assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_coordinator_commits_no_more_often_however_many_databases_take_part(sqlite_bench: Bench, count: int):
    bench = sqlite_bench
    producer = bench.producer_at(1)
    # Where it is new, a producer of another database is announced and verified first.
    for number in bench.topic.partition_ids:
        producer.send(number, b"warm")
    producer.end(commit=True)
    leaders = range(1, count + 1)
    with commits_of(bench.cluster.own(1).engine) as at_coordinator:
        partitions = [bench.partition_at(leader, nth) for leader in leaders for nth in (0, 1)]
        producer.coordinator.add_partitions(
            producer.transactional_id, producer.identity, partitions, added=producer.added
        )
        for number in partitions:
            if number not in (bench.partition_at(1), bench.partition_at(1, 1)):
                producer.send(number, b"x")
        own = [producer.batch(bench.partition_at(1, nth), b"x") for nth in (0, 1)]
        producer.end(commit=True, appends=own)
    commits = at_coordinator.count("COMMIT")
    # All in the coordinator's database: one. Otherwise three: the parts are added, it is decided, and what was
    # delivered is struck off.
    assert commits == (1 if count == 1 else 3), "\n".join(at_coordinator)
    statements = [text for text in at_coordinator if not text.startswith(("BEGIN", "COMMIT"))]
    assert len(statements) <= (10 if count == 1 else 34)
    assert all(bench.read(number)[-1] == b"x" for number in partitions)


def test_what_one_database_holds_all_of_costs_what_it_costs_without_a_cluster(sqlite_bench: Bench):
    bench = sqlite_bench
    producer = bench.producer_at(2)
    for _ in range(2):
        producer.end(commit=True, appends=[producer.batch(bench.partition_at(2), b"a")])
    with commits_of(bench.cluster.own(2).engine) as statements, commits_of(bench.cluster.own(1).engine) as others:
        producer.end(commit=True, appends=[producer.batch(bench.partition_at(2), b"b")])
    # As pinned in tests/transactions/test_cost.py.
    assert len(statements) == 12, "\n".join(statements)
    assert others == []


@pytest.mark.slow
def test_what_is_still_buffered_is_sent_with_the_end(bench: Bench):
    producer = bench.producer_at(2)
    group = bench.name_at(1, "group")
    appends = [producer.batch(number, b"a") for number in bench.topic.partition_ids]
    identity = producer.identity
    offsets = [
        sent_offsets(group, {bench.partition_at(1): 5}),
        sent_offsets(bench.name_at(2, "group"), {bench.partition_at(1): 6}),
    ]
    first = producer.end(commit=True, appends=appends, offsets=offsets)
    again = producer.coordinator.end_transaction(
        producer.transactional_id, identity, commit=True, appends=appends, offsets=offsets
    )
    assert again.identity == first.identity
    places = {place.partition_id: place.base_offset for place in first.appended}
    assert places == dict.fromkeys(bench.topic.partition_ids, 0)
    assert {place.partition_id: place.base_offset for place in again.appended} == places
    assert all(place.is_duplicate for place in again.appended)
    assert all(bench.read(number) == [b"a"] for number in bench.topic.partition_ids)
    assert bench.committed(group) == {bench.partition_at(1): 5}
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_buffered_offsets_of_a_group_elsewhere_count_with_every_commit(sqlite_bench: Bench):
    """Also where the producer is known already, so that nobody asks whether the group takes part."""
    bench = sqlite_bench
    producer, group = bench.producer_at(2), bench.name_at(1, "group")
    for offset in (5, 6):
        producer.end(commit=True, offsets=[sent_offsets(group, {bench.partition_at(1): offset})])
        assert bench.committed(group) == {bench.partition_at(1): offset}
        assert not bench.offsets(group).unstable


@pytest.mark.slow_but_first
@pytest.mark.parametrize("stands", [True, False])
def test_a_commit_whose_answer_was_lost_is_told_as_it_is_after_a_newer_producer(bench: Bench, stands: bool):
    producer = bench.producer_at(2)
    appends = [producer.batch(number, b"a") for number in bench.topic.partition_ids]
    late = producer.twin()
    if stands:
        producer.end(commit=True, appends=appends)
    producer.twin().start()
    if stands:
        late.end(commit=True, appends=appends, is_repeated=True)
    else:
        with pytest.raises(ProducerFenced):
            late.twin().end(commit=True, appends=appends, is_repeated=True)
    with pytest.raises(ProducerFenced):
        late.send(bench.topic.partition_ids[0], b"too late")
    assert all(bench.read(number) == ([b"a"] if stands else []) for number in bench.topic.partition_ids)


def test_a_repeated_append_is_recognised_wherever_it_went(bench: Bench):
    producer = bench.producer_at(1)
    batch = producer.batch(bench.partition_at(3), b"a")
    first = producer.send_again([batch])
    again = producer.send_again([batch])
    assert [place.base_offset for place in first + again] == [0, 0]
    assert again[0].is_duplicate
    producer.end(commit=True)
    assert bench.read(bench.partition_at(3)) == [b"a"]


def test_who_is_made_known_in_one_partition_keeps_what_it_has_open_in_another_one(bench: Bench):
    producer = bench.producer_at(1)
    known, new = bench.partition_at(2), bench.partition_at(2, 1)
    producer.send(known, b"first")
    producer.send_again([producer.batch(known, b"second"), producer.batch(new, b"third")])
    assert bench.read(known) == []
    producer.end(commit=True)
    assert (bench.read(known), bench.read(new)) == ([b"first", b"second"], [b"third"])
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_one_append_goes_to_one_database(sqlite_bench: Bench):
    producer = sqlite_bench.producer_at(1)
    both = [producer.batch(sqlite_bench.partition_at(number), b"a") for number in (2, 3)]
    with pytest.raises(InvalidRequest, match="make a call for each"):
        producer.send_again(both)
    with pytest.raises(UnknownTopicOrPartition):
        producer.coordinator.add_partitions(producer.transactional_id, producer.identity, [10**6])


@pytest.mark.parametrize("is_known", [False, True])
def test_nothing_is_appended_elsewhere_before_its_partition_takes_part(sqlite_bench: Bench, is_known: bool):
    bench = sqlite_bench
    producer = bench.producer_at(1)
    if is_known:
        # Nobody asks whether it may write there any more.
        producer.send(bench.partition_at(2), b"before")
        producer.end(commit=True)
    appended_with: list[int] = []
    own, away = bench.cluster.own(1), bench.cluster.own(2)
    in_transaction = select(transaction_partitions.c.partition_id)

    def look(connection: object, cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT INTO txnstore_record_batches"):
            appended_with.extend(own.read(lambda connection: connection.execute(in_transaction).scalars().all()))

    event.listen(away.engine, "before_cursor_execute", look)
    producer.send(bench.partition_at(2), b"a")
    event.remove(away.engine, "before_cursor_execute", look)
    assert appended_with == [bench.partition_at(2)]


# --- fencing ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", ["commit", "abort", "newer producer", "timeout", "administrator"])
def test_what_comes_late_is_refused_in_every_database(bench: Bench, ended_by: str):
    producer = bench.producer_at(1)
    late = producer.twin()
    written, added = bench.partition_at(2), bench.partition_at(3)
    group = bench.name_at(3, "group")
    producer.send(written, b"a")
    producer.coordinator.add_partitions(producer.transactional_id, producer.identity, [added])
    producer.send_offsets(group, {bench.partition_at(1): 1})
    late.added = {written, added}
    expected: type[Exception] = ProducerFenced
    if ended_by in ("commit", "abort"):
        producer.end(commit=ended_by == "commit")
    elif ended_by == "newer producer":
        Producer(bench.cluster, producer.transactional_id).start()
    else:
        expected = TransactionAbortable
        if ended_by == "timeout":
            bench.clock.advance(60_001)
            assert abort_timed_out(bench.cluster.own(1), bench.cluster) == (producer.transactional_id,)
        else:
            assert abort_by_administrator(bench.cluster.own(1), producer.transactional_id, cluster=bench.cluster)
    late.sequences[written] = 1
    for number in (written, added):
        before = bench.read(number, IsolationLevel.READ_UNCOMMITTED)
        with pytest.raises(expected):
            late.send(number, b"late")
        assert bench.read(number, IsolationLevel.READ_UNCOMMITTED) == before
    with pytest.raises(expected):
        late.send_offsets(group, {bench.partition_at(1): 99})
    with pytest.raises(InvalidProducerEpoch, match="came after the end of their transaction"):
        bench.cluster.own(3).write(
            lambda connection: add_offsets_from_elsewhere(
                connection, GroupMembership(group), {bench.partition_at(1): OffsetAndMetadata(99)}, late.identity
            )
        )
    assert bench.committed(group) == ({bench.partition_at(1): 1} if ended_by == "commit" else {})
    assert not bench.offsets(group).unstable
    assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.slow
def test_a_start_aborts_what_is_open_in_other_databases_first(bench: Bench):
    producer = bench.producer_at(2)
    before = producer.identity
    producer.send(bench.partition_at(1), b"a")
    producer.send(bench.partition_at(2), b"b")
    newer = Producer(bench.cluster, producer.transactional_id).start()
    # See test_lost_epochs.py.
    assert (newer.identity.producer_id > before.producer_id, newer.identity.epoch) == (True, 0)
    assert bench.row(producer.transactional_id).state is S.EMPTY
    for number in (1, 2):
        assert bench.markers(bench.partition_at(number)) == [(0, before.epoch + 1)]
    with pytest.raises(ProducerFenced):
        producer.end(commit=True)
    newer.send(bench.partition_at(1), b"c")
    newer.end(commit=True)
    assert bench.read(bench.partition_at(1)) == [b"c"]
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_a_producer_that_asks_for_its_next_epoch_keeps_its_place(sqlite_bench: Bench):
    producer = sqlite_bench.producer_at(1)
    producer.send(sqlite_bench.partition_at(2), b"a")
    before = producer.identity
    producer.start(expected=before)
    assert producer.identity.producer_id == before.producer_id
    producer.send(sqlite_bench.partition_at(2), b"b")
    producer.end(commit=True)
    assert sqlite_bench.read(sqlite_bench.partition_at(2)) == [b"b"]


def test_an_outcome_that_is_asked_for_is_final_in_every_database(bench: Bench):
    producer = bench.producer_at(1)
    producer.send(bench.partition_at(2), b"a")
    open_one = producer.identity
    store = bench.cluster.own(1)
    assert resolve_outcome(store, producer.transactional_id, open_one, bench.cluster) is Outcome.ABORTED
    assert bench.markers(bench.partition_at(2)) == [(0, open_one.epoch + 1)]
    with pytest.raises(ProducerFenced):
        producer.end(commit=True)
    producer.start()
    producer.send(bench.partition_at(2), b"b")
    committed = producer.identity
    producer.end(commit=True)
    assert resolve_outcome(store, producer.transactional_id, committed, bench.cluster) is Outcome.COMMITTED
    assert bench.read(bench.partition_at(2)) == [b"b"]


# --- further writers -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_writers_write_to_every_database_and_count_only_if_named(bench: Bench):
    producer = bench.producer_at(1)
    store = bench.cluster.own(1)
    began = producer.identity
    begin_transaction(store, producer.transactional_id, began, bench.cluster)
    counted = join_transaction(store, producer.transactional_id, began, bench.cluster)
    dropped = join_transaction(store, producer.transactional_id, began, bench.cluster)

    def batch(writer, number: int, value: bytes, sequence: int = 0) -> Append:
        return Append(
            number,
            encode([Record(value)], producer=writer.identity, base_sequence=sequence, is_transactional=True),
        )

    partitions = [bench.partition_at(3), bench.partition_at(1), bench.partition_at(2)]
    batches = [batch(counted, number, b"counts") for number in partitions]
    placed = append_as_writer(store, counted, batches, bench.cluster, report=True)
    assert [place.partition_id for place in placed] == partitions
    again = append_as_writer(store, counted, batches, bench.cluster, report=True)
    assert all(place.is_duplicate for place in again)
    append_as_writer(store, dropped, [batch(dropped, number, b"does not") for number in partitions], bench.cluster)
    report_writer(store, dropped, bench.cluster)
    for number in (bench.partition_at(2), bench.partition_at(2, 1)):
        with pytest.raises(InvalidTransactionState, match="has reported"):
            append_as_writer(store, counted, [batch(counted, number, b"more", 1)], bench.cluster)
    ended = producer.end(commit=True, writers=[counted.writer_id])
    for number in partitions:
        assert bench.read(number) == [b"counts"]
    with pytest.raises(ProducerFenced, match="is over"):
        append_as_writer(store, dropped, [batch(dropped, bench.partition_at(2), b"late", 1)], bench.cluster)
    assert ended.identity.epoch == began.epoch + 1
    assert_cluster_sound(bench.cluster, at_rest=True)


# --- what an administrator does --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_open_transaction_is_aborted_as_a_whole_from_any_of_its_partitions(bench: Bench):
    producer = bench.producer_at(1)
    for number in (1, 2, 3):
        producer.send(bench.partition_at(number), b"a")
    target = OpenInPartition(bench.partition_at(2), producer.identity)
    abort_open_transaction(bench.cluster.own(2), target, bench.cluster)
    for number in (1, 2, 3):
        assert bench.markers(bench.partition_at(number)) == [(0, producer.identity.epoch + 1)]
    with pytest.raises(InvalidTransactionState):
        abort_open_transaction(bench.cluster.own(2), target, bench.cluster)
    with pytest.raises(TransactionAbortable):
        producer.send(bench.partition_at(2), b"b")
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_what_nobody_coordinates_hangs_and_what_is_coordinated_elsewhere_does_not(sqlite_bench: Bench):
    bench = sqlite_bench
    producer = bench.producer_at(1)
    producer.send(bench.partition_at(2), b"a")
    # Damage: nobody has made this partition a part of anything.
    hanging = producer.batch(bench.partition_at(3), b"x")
    bench.cluster.own(3).write(lambda connection: append(connection, [hanging], coordinated=True))
    bench.clock.advance(1_000 + HANGING_MARGIN_MS)
    (found,) = hanging_in_cluster(bench.cluster, {}, 900)
    assert found.partition.partition == bench.topic.partition_ids.index(bench.partition_at(3))
    with bench.down(1):
        # Its coordinator would know.
        assert hanging_in_cluster(bench.cluster, {}, 900) == []
    abort_open_transaction(
        bench.cluster.own(3), OpenInPartition(bench.partition_at(3), producer.identity), bench.cluster
    )


def test_many_that_nobody_coordinates_are_ended_wherever_they_are_and_others_with_their_transactions(bench: Bench):
    there = bench.partition_at(3)
    owned = bench.producer_at(1)
    for number in (2, 3):
        owned.send(bench.partition_at(number), b"a")
    # Of producer ids that two databases gave out, and that no transactional id has.
    strangers = []
    for number in (1, 2):
        for _ in range(2):
            stranger = bench.producer_at(number)
            stranger.become(ProducerIdentity(stranger.identity.producer_id + 1_000, 0))
            hanging = stranger.batch(there, b"x")
            bench.cluster.own(3).write(
                lambda connection, hanging=hanging: append(connection, [hanging], coordinated=True)
            )
            strangers.append(stranger)
    targets = [OpenInPartition(there, producer.identity) for producer in (*strangers, owned)]
    store = bench.cluster.own(3)
    with bench.down(1), pytest.raises(StoreUnavailable):
        # Nobody can tell whether it is somebody's.
        abort_open_transactions(store, targets, bench.cluster)
    assert bench.markers(there) == []
    assert abort_open_transactions(store, targets, bench.cluster) == 5
    assert len(bench.markers(there)) == 5
    assert bench.markers(bench.partition_at(2)) == [(0, owned.identity.epoch + 1)]
    assert bench.row(owned.transactional_id).state is S.COMPLETE_ABORT
    assert abort_open_transactions(store, targets, bench.cluster) == 0


def test_offsets_that_a_transaction_of_another_database_holds_are_named_with_their_owner(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    producer = bench.producer_at(1)
    groups = [bench.name_at(number, "group") for number in (1, 2)]
    for group in groups:
        producer.send_offsets(group, {bench.partition_at(3): 7})
    bench.clock.advance(10)
    held = {one.group_id: one for one in each_held(bench.cluster, {})}
    assert sorted(held) == sorted(groups)
    for one in held.values():
        assert (one.transactional_id, one.state, one.timeout_ms) == (producer.transactional_id, S.ONGOING, 60_000)
        assert (one.age_ms, one.pending_offset, one.coordinator_database_id) == (10, 7, 1)
        assert producer.transactional_id in (one.freed_by or "")

    def away(database_id: int) -> Store:
        raise StoreUnavailable

    stores = list(bench.cluster.stores())
    with monkeypatch.context() as patched:
        patched.setattr(bench.cluster, "stores", lambda _: iter(stores))
        patched.setattr(bench.cluster, "own", away)
        assert {one.group_id: one.transactional_id for one in each_held(bench.cluster, {})} == {
            groups[0]: producer.transactional_id,
            groups[1]: None,
        }
    assert abort_by_administrator(bench.cluster.own(1), producer.transactional_id, cluster=bench.cluster)
    assert list(each_held(bench.cluster, {})) == []


# --- late and twice --------------------------------------------------------------------------------------------------


def test_a_delivery_that_comes_again_after_the_next_transaction_began_changes_nothing_of_it(bench: Bench):
    producer = bench.producer_at(1)
    group, number = bench.name_at(2, "group"), bench.partition_at(2)
    producer.send_offsets(group, {bench.partition_at(1): 1})
    producer.end(commit=True)
    marker = producer.identity
    producer.send_offsets(group, {bench.partition_at(1): 2})
    producer.send(number, b"open")
    # The end of the first one once more, by somebody who was asleep in between.
    store = bench.cluster.own(2)
    ended = EndedElsewhere(marker, [group], commit=True)
    store.write(lambda connection: finish_offsets_from_elsewhere(connection, [ended]))
    assert bench.committed(group) == {bench.partition_at(1): 1}
    assert bench.offsets(group).unstable == {bench.partition_at(1)}
    producer.end(commit=False)
    assert bench.committed(group) == {bench.partition_at(1): 1}
    assert bench.read(number) == []
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_offsets_that_were_announced_and_come_after_the_end_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    producer = bench.producer_at(1)
    group = bench.name_at(2, "group")
    before = producer.identity
    work = producer.coordinator
    # AddOffsetsToTxn went through, and the offsets themselves are under way for a long time.
    with monkeypatch.context() as patch:
        patch.setattr("txnstore.transactions.distributed.add_offsets_from_elsewhere", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            work.send_offsets(producer.transactional_id, before, sent_offsets(group, {bench.partition_at(1): 9}))
    producer.end(commit=True)
    with pytest.raises(InvalidProducerEpoch):
        bench.cluster.own(2).write(
            lambda connection: add_offsets_from_elsewhere(
                connection, GroupMembership(group), {bench.partition_at(1): OffsetAndMetadata(9)}, before
            )
        )
    assert not bench.offsets(group).unstable
    assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["not noted", "noted with a newer epoch"])
def test_the_checker_sees_offsets_that_nothing_guards(bench: Bench, damage: str):
    producer = bench.producer_at(1)
    group = bench.name_at(2, "group")
    producer.send_offsets(group, {bench.partition_at(1): 1})
    # Of its own transactions a database notes none.
    producer.send_offsets(bench.name_at(1, "group"), {bench.partition_at(1): 1})
    assert_cluster_sound(bench.cluster)
    newer = update(offset_producers).values(producer_epoch=offset_producers.c.producer_epoch + 1)
    statement = delete(offset_producers) if damage == "not noted" else newer
    bench.cluster.own(2).write(lambda connection: connection.execute(statement))
    found = [each for each in verify(bench.cluster) if each.invariant is Invariant.OFFSETS_FENCED]
    assert [(each.place.group_id, each.place.database) for each in found] == [(group, bench.cluster.databases[1].label)]
    assert {each.invariant for each in verify(bench.cluster)} == {Invariant.OFFSETS_FENCED}
    producer.end(commit=False)


def test_producers_of_other_databases_are_forgotten_with_age(sqlite_bench: Bench):
    bench = sqlite_bench
    producer = bench.producer_at(1)
    group = bench.name_at(2, "group")
    producer.send_offsets(group, {bench.partition_at(1): 1})
    producer.end(commit=True)
    known = select(offset_producers.c.producer_id)
    store = bench.cluster.own(2)
    expire_producers(store)
    assert store.read(lambda connection: connection.execute(known).scalars().all()) == [producer.identity.producer_id]
    bench.clock.advance(86_400_001)
    producer.start()
    producer.send_offsets(group, {bench.partition_at(1): 2})
    # While it holds offsets it is known.
    expire_producers(store)
    assert store.read(lambda connection: connection.execute(known).scalars().all()) == [producer.identity.producer_id]
    producer.end(commit=True)
    bench.clock.advance(86_400_001)
    expire_producers(store)
    assert store.read(lambda connection: connection.execute(known).scalars().all()) == []


@pytest.mark.slow
def test_a_partition_deleted_under_a_transaction_is_no_part_of_it_any_more(sqlite_bench: Bench):
    bench = sqlite_bench
    producer = bench.producer_at(2)
    for number in bench.topic.partition_ids:
        producer.send(number, b"a")
    with pytest.raises(InvalidTransactionState, match="end it first, then delete the topic"):
        delete_topic(bench.cluster, "orders")
    with bench.down(2):
        # Nobody can be asked.
        delete_topic(bench.cluster, "orders")
    assert bench.cluster.reconcile(2)
    producer.end(commit=True)
    assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("remembered", [True, False], ids=["remembered", "forgotten"])
def test_a_partition_deleted_between_decision_and_delivery_needs_no_marker(sqlite_bench: Bench, remembered: bool):
    bench = sqlite_bench
    producer = bench.producer_at(1)
    producer.send(bench.partition_at(2), b"a")
    with bench.down(2), pytest.raises(OutcomeUnknown, match="is decided"):
        producer.end(commit=True)
    # As if the transaction had come between the look and the deletion.
    assert bench.queued(producer.transactional_id) == {bench.partition_at(2)}
    bench.cluster.own(1).write(lambda connection: connection.execute(delete(transaction_partitions)))
    markers = bench.cluster.own(1).read(lambda connection: rows.queued_markers(connection, producer.transactional_id))

    def delete_but_for_the_queue(connection) -> None:
        topics.delete_topic(connection, "orders")
        rows.queue_markers(connection, {producer.transactional_id: markers})

    bench.cluster.own(1).write(delete_but_for_the_queue)
    bench.cluster.publish()
    if not remembered:
        bench.cluster._leaders.clear()
    complete_decided(bench.cluster.own(1), producer.transactional_id, bench.cluster)
    assert bench.row(producer.transactional_id).state is S.COMPLETE_COMMIT
    assert_cluster_sound(bench.cluster, at_rest=True)


# --- at once ---------------------------------------------------------------------------------------------------------


def test_at_the_end_of_the_interpreter_a_transaction_ends_without_threads(sqlite_bench: Bench):
    bench = sqlite_bench
    producer = bench.producer_at(1)
    # As it is when functions of `atexit` run.
    bench.cluster._threads().shutdown()
    for database_id in (2, 3):
        producer.send(bench.partition_at(database_id), b"a")
    producer.end(commit=True)
    assert [bench.read(bench.partition_at(database_id)) for database_id in (2, 3)] == [[b"a"], [b"a"]]
    assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.slow
def test_many_recoveries_at_once_complete_each_transaction_once(bench: Bench):
    producers = [bench.producer_at(database_id) for database_id in (1, 2, 3)]
    began = [producer.identity for producer in producers]
    for producer in producers:
        for number in (1, 2, 3):
            producer.send(bench.partition_at(number), b"a")
    bench.clock.advance(60_001)
    errors: list[BaseException] = []

    def help_out() -> None:
        try:
            with bench.site.open() as cluster:
                for store in cluster.stores():
                    recover(store, cluster)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=help_out) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    for number in (1, 2, 3):
        assert len(bench.markers(bench.partition_at(number))) == 3
    for producer, before in zip(producers, began, strict=True):
        row = bench.row(producer.transactional_id)
        assert (row.state, row.producer_epoch) == (S.COMPLETE_ABORT, before.epoch + 1)
    assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.slow
def test_a_long_row_of_transactions_stays_in_order(bench: Bench):
    """Threads deliver: what each transaction wrote, and nothing else, is what readers find at its end."""
    producer = bench.producer_at(3)
    expected: dict[int, list[bytes]] = {number: [] for number in bench.topic.partition_ids}
    for turn in range(12):
        commit = turn % 3 != 1
        for nth, number in enumerate(bench.topic.partition_ids):
            if (turn + nth) % 2:
                producer.send(number, b"%d" % turn)
                if commit:
                    expected[number].append(b"%d" % turn)
        producer.end(commit=commit)
        for number in bench.topic.partition_ids:
            assert bench.read(number) == expected[number]
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_settings_of_the_store_hold_in_every_database(sqlite_bench: Bench):
    change_store_settings(sqlite_bench.cluster, {"transaction.max.timeout.ms": "1000"})
    for database_id in (1, 2, 3):
        coordinator = TransactionCoordinator(sqlite_bench.cluster.own(database_id), sqlite_bench.cluster)
        with pytest.raises(Exception, match="this store allows 1 to 1000"):
            coordinator.init_producer_id(sqlite_bench.name_at(database_id), 1001)


def test_a_partition_knows_its_producers_of_all_databases(sqlite_bench: Bench):
    producers = [sqlite_bench.producer_at(database_id) for database_id in (1, 2, 3)]
    number = sqlite_bench.partition_at(1)
    for producer in producers:
        producer.send(number, b"a")
        assert not abort_if_timed_out(producer.coordinator.store, producer.transactional_id, producer.cluster)
    states = sqlite_bench.cluster.own(1).read(lambda connection: producers_of_partition(connection, number))
    assert [state.producer_id >> 40 for state in states] == [0, 1, 2]
    groups = select(transaction_groups.c.group_id)
    assert sqlite_bench.cluster.own(1).read(lambda connection: connection.execute(groups).all()) == []
    for producer in producers:
        producer.end(commit=True)
    assert sqlite_bench.read(number) == [b"a"] * 3


@pytest.mark.slow
def test_who_is_held_back_ends_what_another_database_coordinates(bench: Bench):
    abandoned, alive = (bench.producer_at(2) for _ in range(2))
    abandoned.coordinator.init_producer_id(abandoned.transactional_id, 1_000)
    abandoned.start(1_000)
    held, group_id = bench.partition_at(3), bench.name_at(3, "group")
    abandoned.send(held, b"abandoned")
    abandoned.send_offsets(group_id, {held: 7})
    alive.send(held, b"alive")
    third = bench.cluster.own(3)
    assert abort_overdue_in(third, [held], bench.cluster) == 1_001
    bench.clock.advance(1_001)
    with bench.down(2):
        assert abort_overdue_in(third, [held], bench.cluster) == AGAIN_MS
    assert abort_overdue_in(third, [bench.partition_at(3, 1)], bench.cluster) is None
    assert bench.row(abandoned.transactional_id).state is S.ONGOING
    assert abort_overdue_in(third, [held], bench.cluster) == 60_000 - 1_000
    assert bench.row(abandoned.transactional_id).state is S.COMPLETE_ABORT
    assert not bench.offsets(group_id).unstable
    alive.end(commit=True)
    assert bench.read(held) == [b"alive"]
    assert_cluster_sound(bench.cluster, at_rest=True)


@pytest.mark.slow
def test_what_comes_after_the_deadline_is_refused_for_other_databases_too(bench: Bench):
    group_id = bench.name_at(3, "group")
    calls: dict[str, Callable[[Producer], object]] = {
        "records": lambda late: late.send(bench.partition_at(3, 1), b"late"),
        "offsets": lambda late: late.send_offsets(group_id, {bench.partition_at(1): 7}),
        "commit": lambda late: late.end(commit=True),
        "commit with records": lambda late: late.end(
            commit=True, appends=[late.batch(bench.partition_at(3, 1), b"late")]
        ),
        "a known part": lambda late: late.coordinator.check_in_time(late.transactional_id, late.identity),
    }
    for name, late in calls.items():
        producer = bench.producer_at(2)
        producer.start(1_000)
        producer.send(bench.partition_at(3), name.encode())
        producer.coordinator.check_in_time(producer.transactional_id, producer.identity)
        bench.clock.advance(1_001)
        with pytest.raises(TransactionAbortable, match="it was open for 1001 ms"):
            late(producer)
        assert bench.row(producer.transactional_id).state is S.COMPLETE_ABORT, name
        assert bench.read(bench.partition_at(3)) == bench.read(bench.partition_at(3, 1)) == []
    assert_cluster_sound(bench.cluster, at_rest=True)


def test_a_transaction_group_is_refused_where_there_are_several_databases(bench: Bench) -> None:
    store = bench.cluster.coordinator_of("grouped")
    with pytest.raises(InvalidRequest, match="needs a store of one database"):
        TransactionCoordinator(store, bench.cluster, "ledger").init_producer_id("grouped")
