"""Transactions that are open for too long, ids and producers that nobody uses any more, and the journal's end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import func, select, update

from txnstore.db.schema import transaction_log
from txnstore.errors import InvalidProducerIdMapping, ProducerFenced, TransactionAbortable
from txnstore.log.partition_rows import producers_of_partition
from txnstore.model import ControlType, ProducerIdentity
from txnstore.participants.branches import register_branches
from txnstore.testing.invariants import assert_sound
from txnstore.transactions.outcome import CommitRequest, end_within
from txnstore.transactions.protocol import (
    AT_REST,
    TIMEOUT_NEVER_MS,
    FenceReason,
    TransactionMetadata,
    TransactionState,
    has_timed_out,
    may_expire,
)
from txnstore.transactions.recovery import (
    AHEAD_MS,
    Recovered,
    _begin_now,
    _expire,
    abort_by_administrator,
    abort_timed_out,
    begin_anew,
    expire_producers,
    expire_transactional_ids,
    recover,
    trim_journal,
)
from txnstore.transactions.transaction import abort_if_timed_out
from txnstore.transactions.writers import append_as_writer, join_transaction, report_writer

S = TransactionState
NewRow = Callable[..., TransactionMetadata]

WEEK_MS = 604_800_000
DAY_MS = 86_400_000


@pytest.mark.parametrize(
    ("changes", "now_ms", "timed_out"),
    [
        pytest.param({}, 60_899, False, id="a moment before"),
        pytest.param({}, 60_900, False, id="start + timeout == now"),
        pytest.param({}, 60_901, True, id="start + timeout < now"),
        pytest.param({"timeout_ms": TIMEOUT_NEVER_MS}, 2**62, False, id="two-phase commit"),
    ],
)
def test_a_transaction_has_timed_out_once_it_is_open_for_longer_than_its_timeout(
    new_row: NewRow, changes: dict[str, Any], now_ms: int, timed_out: bool
) -> None:
    assert has_timed_out(new_row(S.ONGOING, **changes), now_ms) is timed_out


@pytest.mark.parametrize("state", sorted(set(S) - {S.ONGOING}), ids=lambda state: state.kafka_name)
def test_what_is_not_open_does_not_time_out(new_row: NewRow, state: TransactionState) -> None:
    assert not has_timed_out(new_row(state), 2**62)


@pytest.mark.parametrize("state", sorted(S), ids=lambda state: state.kafka_name)
@pytest.mark.parametrize(
    ("now_ms", "is_time"),
    [
        pytest.param(1_999, False, id="lastUpdate > now - expiration"),
        pytest.param(2_000, True, id="lastUpdate == now - expiration"),
        pytest.param(2_001, True, id="lastUpdate < now - expiration"),
    ],
)
def test_an_id_may_expire_at_rest_once_it_was_not_used_for_long_enough(
    new_row: NewRow, state: TransactionState, now_ms: int, is_time: bool
) -> None:
    assert may_expire(new_row(state), now_ms, 1_000) is (is_time and state in AT_REST)


def test_the_reaper_aborts_after_the_timeout_and_not_at_it(own_bench) -> None:
    bench = own_bench
    slow, quick = bench.started(timeout_ms=1_000), bench.started(timeout_ms=500_000)
    slow.send(bench.partition_ids[0], b"slow")
    slow.send_offsets("readers", {bench.partition_ids[0]: 3})
    quick.send(bench.partition_ids[0], b"quick")
    bench.clock.advance(1_000)
    assert abort_timed_out(bench.store) == ()
    assert bench.row(slow.transactional_id).state is S.ONGOING
    bench.clock.advance(1)
    assert abort_timed_out(bench.store) == (slow.transactional_id,)
    assert abort_timed_out(bench.store) == ()

    row = bench.row(slow.transactional_id)
    assert (row.state, row.producer_epoch, row.last_producer_epoch) == (S.COMPLETE_ABORT, 1, -1)
    assert row.fence_reason is FenceReason.TIMEOUT
    assert row.fence_detail == "it was open for 1001 ms, longer than its timeout of 1000 ms"
    assert bench.markers(bench.partition_ids[0]) == [(2, ControlType.ABORT, 1)]
    assert bench.offsets("readers").unstable == frozenset()
    assert bench.participants(slow.transactional_id) == ([], [])
    assert bench.bounds(bench.partition_ids[0]).last_stable_offset == 1
    quick.commit()
    assert bench.read(bench.partition_ids[0]) == [b"quick"]


def test_a_later_write_does_not_put_the_deadline_off(own_bench) -> None:
    bench = own_bench
    producer = bench.started(timeout_ms=1_000)
    producer.send(bench.partition_ids[0], b"a")
    bench.clock.advance(900)
    producer.send(bench.partition_ids[1], b"b")
    bench.clock.advance(101)
    assert abort_timed_out(bench.store) == (producer.transactional_id,)


def test_a_clock_that_was_set_back_aborts_nobody(own_bench) -> None:
    bench = own_bench
    producer = bench.started(timeout_ms=1_000)
    producer.send(bench.partition_ids[0], b"a")
    bench.clock.advance(-DAY_MS)
    assert recover(bench.store) == Recovered((), ())
    producer.commit()
    assert bench.read(bench.partition_ids[0]) == [b"a"]


def test_what_was_begun_by_a_clock_that_was_ahead_is_open_for_its_timeout_from_then_on(own_bench) -> None:
    bench = own_bench
    bench.clock.advance(DAY_MS)
    ahead, ended = bench.started(timeout_ms=1_000), bench.started(timeout_ms=1_000)
    for producer in (ahead, ended):
        producer.send(bench.partition_ids[0], b"a")
    ended.commit()
    begun = bench.row(ahead.transactional_id)
    bench.clock.advance(-DAY_MS)
    right = bench.started(timeout_ms=900_000)
    right.send(bench.partition_ids[0], b"b")
    assert begin_anew(bench.store) == 1
    assert bench.row(ahead.transactional_id) == replace(
        begun, start_ms=bench.clock.now_ms(), last_update_ms=bench.clock.now_ms()
    )
    assert begin_anew(bench.store) == 0
    assert_sound(bench.store)
    bench.clock.advance(1_000)
    assert abort_timed_out(bench.store) == ()
    bench.clock.advance(1)
    assert abort_timed_out(bench.store) == (ahead.transactional_id,)
    right.commit()
    assert bench.read(bench.partition_ids[0]) == [b"a", b"b"]
    assert_sound(bench.store)


def test_it_may_be_committed_all_the_same(own_bench) -> None:
    bench = own_bench
    bench.clock.advance(DAY_MS)
    producer = bench.started(timeout_ms=1_000)
    producer.send(bench.partition_ids[0], b"a")
    bench.clock.advance(-DAY_MS)
    assert begin_anew(bench.store) == 1
    producer.send(bench.partition_ids[1], b"b")
    producer.commit()
    assert [bench.read(number) for number in bench.partition_ids[:2]] == [[b"a"], [b"b"]]
    assert_sound(bench.store)


def test_a_clock_that_is_set_back_by_a_moment_changes_no_transaction(own_bench) -> None:
    bench = own_bench
    producer = bench.started(timeout_ms=1_000)
    producer.send(bench.partition_ids[0], b"a")
    begun = bench.row(producer.transactional_id)
    bench.clock.advance(-AHEAD_MS)
    assert begin_anew(bench.store) == 0
    assert bench.row(producer.transactional_id) == begun
    bench.clock.advance(-1)
    assert begin_anew(bench.store) == 1


@pytest.mark.slow_but_first
@pytest.mark.parametrize("meanwhile", ["it ends", "the next one begins", "the clock is set right"])
def test_what_was_seen_to_begin_in_the_future_is_looked_at_again_under_its_lock(own_bench, meanwhile: str) -> None:
    bench = own_bench
    bench.clock.advance(DAY_MS)
    producer = bench.started(timeout_ms=900_000)
    producer.send(bench.partition_ids[0], b"a")
    start_ms = bench.row(producer.transactional_id).start_ms
    bench.clock.advance(-DAY_MS)
    if meanwhile == "the clock is set right":
        bench.clock.advance(DAY_MS + 1)
    else:
        producer.commit()
        if meanwhile == "the next one begins":
            bench.clock.advance(2 * DAY_MS)
            producer.send(bench.partition_ids[0], b"b")
            bench.clock.advance(-2 * DAY_MS)
    row = bench.row(producer.transactional_id)
    assert not bench.store.write(partial(_begin_now, producer.transactional_id, start_ms))
    assert bench.row(producer.transactional_id) == row


def test_recovery_completes_what_is_decided_however_old_and_aborts_what_is_open_for_too_long(own_bench) -> None:
    bench = own_bench
    decided, too_long, fine = (bench.started(timeout_ms=timeout_ms) for timeout_ms in (1_000, 1_000, 900_000))
    for producer in (decided, too_long, fine):
        producer.send(bench.partition_ids[0], producer.transactional_id.encode())
    decided.decide(commit=True)
    bench.clock.advance(5_000)
    assert recover(bench.store) == Recovered((decided.transactional_id,), (too_long.transactional_id,))
    assert recover(bench.store) == Recovered((), ())
    fine.commit()
    assert bench.read(bench.partition_ids[0]) == [
        decided.transactional_id.encode(),
        fine.transactional_id.encode(),
    ]


WRITES: dict[str, Callable] = {
    "records": lambda bench, producer: producer.send(bench.partition_ids[0], b"late"),
    "offsets": lambda bench, producer: producer.send_offsets("readers", {bench.partition_ids[0]: 9}),
    "commit": lambda bench, producer: producer.commit(),
    "commit with records": lambda bench, producer: producer.commit(
        appends=[producer.batch(bench.partition_ids[0], b"late")]
    ),
}


def abort_from_outside(bench, producer, reason: str) -> None:
    if reason == "timeout":
        bench.clock.advance(60_001)
        assert abort_if_timed_out(bench.store, producer.transactional_id)
    else:
        assert abort_by_administrator(bench.store, producer.transactional_id, "the shop is closed")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("reason", ["timeout", "administrator"])
@pytest.mark.parametrize("late", WRITES.values(), ids=WRITES)
def test_a_producer_whose_transaction_was_aborted_from_outside_is_told_to_abort_and_why(
    bench, reason: str, late: Callable
) -> None:
    producer = bench.started(timeout_ms=60_000)
    producer.send(bench.partition_ids[0], b"a")
    abort_from_outside(bench, producer, reason)
    why = "longer than its timeout of 60000 ms" if reason == "timeout" else "the shop is closed"
    with pytest.raises(TransactionAbortable, match=why):
        late(bench, producer)
    assert bench.bounds(bench.partition_ids[0]).high_watermark == 2


@pytest.mark.slow_but_first
@pytest.mark.parametrize("late", WRITES.values(), ids=WRITES)
def test_what_comes_after_the_deadline_is_refused_and_aborts_though_nobody_has_looked_before(
    bench, late: Callable
) -> None:
    producer = bench.started(timeout_ms=60_000)
    producer.send(bench.partition_ids[0], b"a")
    producer.send_offsets("readers", {bench.partition_ids[0]: 3})
    bench.clock.advance(60_001)
    with pytest.raises(
        TransactionAbortable, match="was aborted: it was open for 60001 ms, longer than its timeout of 60000 ms; abort"
    ):
        late(bench, producer)
    row = bench.row(producer.transactional_id)
    assert (row.state, row.fence_reason) == (S.COMPLETE_ABORT, FenceReason.TIMEOUT)
    assert bench.markers(bench.partition_ids[0]) == [(1, ControlType.ABORT, 1)]
    bounds = bench.bounds(bench.partition_ids[0])
    assert bounds.last_stable_offset == bounds.high_watermark == 2
    assert bench.offsets("readers").unstable == frozenset()
    producer.abort()
    producer.send(bench.partition_ids[0], b"b")
    producer.commit()
    assert bench.read(bench.partition_ids[0]) == [b"b"]


@pytest.mark.parametrize("late", WRITES.values(), ids=WRITES)
def test_what_comes_at_the_deadline_counts(bench, late: Callable) -> None:
    producer = bench.started(timeout_ms=60_000)
    producer.send(bench.partition_ids[0], b"a")
    bench.clock.advance(60_000)
    late(bench, producer)
    assert bench.row(producer.transactional_id).fence_reason is None


def test_an_abort_after_the_deadline_is_the_producers_own(bench) -> None:
    producer = bench.started(timeout_ms=60_000)
    producer.send(bench.partition_ids[0], b"a")
    bench.clock.advance(60_001)
    producer.abort()
    row = bench.row(producer.transactional_id)
    assert (row.state, row.fence_reason) == (S.COMPLETE_ABORT, None)


def test_a_prepared_transaction_has_no_deadline(own_bench) -> None:
    bench = own_bench
    bench.set_store({"transaction.two.phase.commit.enable": "true"})
    producer = bench.started(enable_two_phase_commit=True)
    producer.send(bench.partition_ids[0], b"a")
    bench.clock.advance(DAY_MS)
    producer.commit()
    assert bench.read(bench.partition_ids[0]) == [b"a"]


def test_a_commit_with_rows_of_the_application_is_refused_after_the_deadline(bench) -> None:
    producer = bench.started(timeout_ms=60_000)
    producer.send(bench.partition_ids[0], b"a")
    bench.clock.advance(60_001)
    appends = [producer.batch(bench.partition_ids[0], b"b")]
    request = CommitRequest(producer.transactional_id, producer.identity, appends)
    with pytest.raises(TransactionAbortable, match="it was open for 60001 ms"):
        bench.store.write(lambda connection: end_within(connection, request))
    producer.abort()
    assert bench.read(bench.partition_ids[0]) == []


def test_branches_are_not_let_in_after_the_deadline(bench) -> None:
    producer = bench.started(timeout_ms=60_000)
    producer.send(bench.partition_ids[0], b"a")
    bench.clock.advance(60_001)
    with pytest.raises(TransactionAbortable, match="it was open for 60001 ms"):
        bench.store.write(partial(register_branches, producer.transactional_id, producer.identity, (), ()))


WRITER_CALLS: dict[str, Callable] = {
    "another writer": lambda bench, producer, writer: join_transaction(
        bench.store, producer.transactional_id, producer.identity
    ),
    "records of a writer": lambda bench, producer, writer: append_as_writer(
        bench.store,
        writer,
        [replace(producer, identity=writer.identity, sequences={}).batch(bench.partition_ids[0], b"w")],
    ),
    "a writer's report": lambda bench, producer, writer: report_writer(bench.store, writer),
}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("late", WRITER_CALLS.values(), ids=WRITER_CALLS)
def test_further_writers_are_refused_after_the_deadline_too(bench, late: Callable) -> None:
    producer = bench.started(timeout_ms=60_000)
    producer.send(bench.partition_ids[0], b"a")
    writer = join_transaction(bench.store, producer.transactional_id, producer.identity)
    bench.clock.advance(60_001)
    with pytest.raises(ProducerFenced, match=r"it was aborted \(it was open for 60001 ms"):
        late(bench, producer, writer)
    assert bench.row(producer.transactional_id).fence_reason is FenceReason.TIMEOUT
    assert bench.markers(bench.partition_ids[0]) == [(1, ControlType.ABORT, 1)]


@pytest.mark.parametrize("reason", ["timeout", "administrator"])
def test_its_abort_gives_it_the_new_epoch_and_it_goes_on(bench, reason: str) -> None:
    producer = bench.started(timeout_ms=60_000)
    producer.send(bench.partition_ids[0], b"a")
    abort_from_outside(bench, producer, reason)
    producer.abort()
    assert producer.identity.epoch == 1
    producer.send(bench.partition_ids[0], b"b")
    producer.commit()
    assert bench.read(bench.partition_ids[0]) == [b"b"]
    assert bench.row(producer.transactional_id).fence_reason is None


def test_its_own_request_for_a_new_epoch_is_fenced_as_in_kafka(bench) -> None:
    producer = bench.started(timeout_ms=60_000)
    producer.send(bench.partition_ids[0], b"a")
    abort_from_outside(bench, producer, "timeout")
    with pytest.raises(ProducerFenced):
        producer.start(expected=producer.identity)


def test_once_somebody_has_taken_over_it_is_fenced_like_any_other(bench) -> None:
    producer = bench.started(timeout_ms=60_000)
    producer.send(bench.partition_ids[0], b"a")
    abort_from_outside(bench, producer, "timeout")
    producer.twin().start()
    for late in (*WRITES.values(), lambda bench, producer: producer.abort()):
        with pytest.raises(ProducerFenced):
            late(bench, producer)


def test_an_administrator_aborts_only_what_is_open(bench) -> None:
    producer = bench.started()
    assert not abort_by_administrator(bench.store, producer.transactional_id)
    producer.send(bench.partition_ids[0], b"a")
    producer.commit()
    assert not abort_by_administrator(bench.store, producer.transactional_id)
    assert bench.read(bench.partition_ids[0]) == [b"a"]


def test_an_id_expires_exactly_after_its_time_and_only_at_rest(own_bench) -> None:
    bench = own_bench
    empty, committed, aborted, still_open = (bench.started() for _ in range(4))
    for producer in (committed, aborted, still_open):
        producer.send(bench.partition_ids[0], b"a")
    committed.commit()
    aborted.abort()
    bench.clock.advance(WEEK_MS - 1)
    assert expire_transactional_ids(bench.store) == ()
    bench.clock.advance(1)
    at_rest = {producer.transactional_id for producer in (empty, committed, aborted)}
    assert set(expire_transactional_ids(bench.store)) == at_rest
    assert [bench.is_known(transactional_id) for transactional_id in at_rest] == [False] * 3
    assert bench.row(still_open.transactional_id).state is S.ONGOING
    assert bench.journal(committed.transactional_id)[-1] == (S.DEAD, 1)


def test_an_id_that_is_used_does_not_expire(own_bench) -> None:
    bench = own_bench
    bench.set_store({"transactional.id.expiration.ms": "1000"})
    producer = bench.started()
    bench.clock.advance(999)
    producer.send(bench.partition_ids[0], b"a")
    producer.commit()
    bench.clock.advance(999)
    assert expire_transactional_ids(bench.store) == ()
    bench.clock.advance(1)
    assert expire_transactional_ids(bench.store) == (producer.transactional_id,)
    with pytest.raises(InvalidProducerIdMapping):
        producer.send(bench.partition_ids[0], b"b")


def test_an_id_that_is_used_between_the_look_and_the_lock_does_not_expire(own_bench) -> None:
    bench = own_bench
    is_open, is_at_rest = bench.started(), bench.started()
    looked_at_ms = bench.row(is_open.transactional_id).last_update_ms
    bench.clock.advance(WEEK_MS)
    is_open.send(bench.partition_ids[0], b"open")
    is_at_rest.commit(appends=[is_at_rest.batch(bench.partition_ids[0], b"at rest")])
    for producer in (is_open, is_at_rest):
        name = producer.transactional_id
        for last_update_ms in (looked_at_ms, bench.row(name).last_update_ms):
            assert not bench.store.write(partial(_expire, name, last_update_ms, [], is_last=True))
    is_open.commit()
    is_at_rest.send(bench.partition_ids[0], b"next")
    is_at_rest.commit()
    assert bench.read(bench.partition_ids[0]) == [b"open", b"at rest", b"next"]


def test_an_id_that_expired_begins_again_with_another_producer_id(own_bench) -> None:
    bench = own_bench
    producer = bench.started()
    old = producer.identity
    bench.clock.advance(WEEK_MS)
    expire_transactional_ids(bench.store)
    producer.start()
    assert producer.identity.epoch == 0
    assert producer.identity.producer_id != old.producer_id


def test_a_silent_producer_is_forgotten_exactly_after_its_time_but_never_with_an_open_transaction(own_bench) -> None:
    bench = own_bench
    done, still_open = bench.started(), bench.started()
    done.send(bench.partition_ids[0], b"a")
    still_open.send(bench.partition_ids[0], b"b")
    done.commit()

    def remembered() -> set[int]:
        states = bench.store.read(lambda connection: producers_of_partition(connection, bench.partition_ids[0]))
        return {state.producer_id for state in states}

    bench.clock.advance(DAY_MS - 1)
    assert expire_producers(bench.store) == 0
    bench.clock.advance(1)
    assert expire_producers(bench.store) == 1
    assert remembered() == {still_open.identity.producer_id}
    with pytest.raises(TransactionAbortable):
        still_open.commit()
    still_open.abort()
    # Both go on: the coordinator knows their epochs.
    for producer in (done, still_open):
        producer.send(bench.partition_ids[0], b"c")
        producer.commit()
    assert bench.read(bench.partition_ids[0]) == [b"a", b"c", b"c"]


def test_the_journal_is_trimmed_but_for_transactions_that_are_not_complete(own_bench) -> None:
    bench = own_bench
    done, still_open, decided = bench.started(), bench.started(), bench.started(writes_elsewhere=True)
    for producer in (done, still_open, decided):
        producer.send(bench.partition_ids[0], b"a")
    done.commit()
    decided.decide(commit=True)
    # Not the first entry of each, which gave out the identity: it is of no transaction.
    kept = bench.journal(still_open.transactional_id)[1:], bench.journal(decided.transactional_id)[1:]
    count = select(func.count()).select_from(transaction_log)
    before = bench.store.read(lambda connection: connection.execute(count).scalar_one())
    bench.clock.advance(WEEK_MS)
    assert trim_journal(bench.store) == 0
    bench.clock.advance(1)
    assert trim_journal(bench.store) == 5
    assert bench.store.read(lambda connection: connection.execute(count).scalar_one()) == before - 5
    assert bench.journal(done.transactional_id) == []
    assert (bench.journal(still_open.transactional_id), bench.journal(decided.transactional_id)) == kept
    # Nor by a clock that was ahead, with an old entry behind it.
    of_open = transaction_log.c.transactional_id == still_open.transactional_id
    ahead = update(transaction_log).where(of_open).values(update_ms=bench.clock.now_ms() + 1)
    bench.store.write(lambda connection: connection.execute(ahead))
    assert trim_journal(bench.store) == 0
    assert (bench.journal(still_open.transactional_id), bench.journal(decided.transactional_id)) == kept


def test_the_journal_of_an_id_from_before_it_was_forgotten_is_trimmed_whatever_is_open_now(own_bench) -> None:
    """Its transactions are counted anew: what is open now has the number of an earlier one."""
    bench = own_bench
    producer = bench.started()
    producer.send(bench.partition_ids[0], b"a")
    producer.commit()
    bench.clock.advance(WEEK_MS)
    assert expire_transactional_ids(bench.store) == (producer.transactional_id,)
    anew = producer.twin()
    anew.start()
    bench.clock.advance(WEEK_MS + 1)
    anew.send(bench.partition_ids[0], b"b")
    trim_journal(bench.store)
    assert bench.journal(producer.transactional_id) == [(S.ONGOING, 0)]
    assert_sound(bench.store)


def test_an_expired_id_and_its_old_producer_id_do_not_come_back_together(own_bench) -> None:
    bench = own_bench
    old = bench.started()
    bench.clock.advance(WEEK_MS)
    expire_transactional_ids(bench.store)
    new = old.twin()
    new.start()
    for producer_id in (old.identity.producer_id, new.identity.producer_id + 1):
        old.become(ProducerIdentity(producer_id, 0))
        with pytest.raises(InvalidProducerIdMapping):
            old.commit()


def test_there_is_nothing_to_abort_under_an_id_that_nobody_has_used(bench) -> None:
    assert not abort_by_administrator(bench.store, bench.new_id())
