"""Transactions that were taken over once they were prepared (KIP-939) are sound, and damage is still found."""

from __future__ import annotations

import pytest
from sqlalchemy import delete, update

from tests.transactions.bench import Bench, Producer, bench_on
from txnstore.db.schema import group_offsets, transaction_log
from txnstore.db.store import Store
from txnstore.testing.invariants import Invariant, assert_sound, find_violations
from txnstore.testing.manual_clock import ManualClock
from txnstore.transactions.protocol import TransactionState

S = TransactionState
TWO_PHASE = {"enable_two_phase_commit": True}
KEEP = {"enable_two_phase_commit": True, "keep_prepared": True}
ENDS = pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])


@pytest.fixture
def bench(store: Store, clock: ManualClock) -> Bench:
    bench = bench_on(store, clock)
    bench.set_store({"transaction.two.phase.commit.enable": "true"})
    return bench


def taken_over(bench: Bench, takers: int, *, writes_elsewhere: bool = False) -> Producer:
    """Return the last of those who have taken over a prepared transaction, which holds a record and an offset."""
    producer = bench.started(writes_elsewhere=writes_elsewhere, **TWO_PHASE)
    producer.send(bench.partition_ids[0], b"a")
    producer.send_offsets(bench.prefix, {bench.partition_ids[1]: 4})
    for _ in range(takers):
        producer.start(**KEEP)
    return producer


def begin_another(bench: Bench, producer: Producer, offset: int) -> None:
    producer.send(bench.partition_ids[0], b"b")
    producer.send_offsets(bench.prefix, {bench.partition_ids[1]: offset})


@pytest.mark.slow_but_first
@ENDS
@pytest.mark.parametrize("takers", [1, 2, 3])
@pytest.mark.parametrize("writes_elsewhere", [False, True], ids=["in one database", "over several databases"])
def test_a_transaction_is_sound_however_often_it_was_taken_over(
    bench: Bench, writes_elsewhere: bool, takers: int, commit: bool
) -> None:
    producer = taken_over(bench, takers, writes_elsewhere=writes_elsewhere)
    assert_sound(bench.store)
    if writes_elsewhere:
        producer.decide(commit=commit)
        assert_sound(bench.store)
    producer.end(commit=commit)
    assert_sound(bench.store, at_rest=True)
    # An abort of nothing has the number of the transaction before it.
    producer.abort()
    begin_another(bench, producer, 5)
    assert_sound(bench.store)
    producer.end(commit=not commit)
    assert_sound(bench.store, at_rest=True)


def test_it_is_sound_if_the_journal_knows_its_end_alone(bench: Bench) -> None:
    producer = taken_over(bench, 2)
    bench.store.write(lambda connection: connection.execute(delete(transaction_log)))
    producer.commit()
    assert_sound(bench.store, at_rest=True)
    begin_another(bench, producer, 5)
    producer.abort()
    assert_sound(bench.store, at_rest=True)


@pytest.mark.slow_but_first
@ENDS
def test_a_decision_that_was_reversed_is_found(bench: Bench, commit: bool) -> None:
    taken_over(bench, 2).end(commit=commit)
    done, reversed_ = (S.COMPLETE_COMMIT, S.COMPLETE_ABORT) if commit else (S.COMPLETE_ABORT, S.COMPLETE_COMMIT)
    bench.store.write(
        lambda connection: connection.execute(
            update(transaction_log).where(transaction_log.c.state == int(done)).values(state=int(reversed_))
        )
    )
    assert Invariant.DECISION_STANDS in {found.invariant for found in find_violations(bench.store)}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("journal_is_whole", [True, False], ids=["the whole journal", "a trimmed journal"])
def test_offsets_that_were_undone_are_found(bench: Bench, journal_is_whole: bool) -> None:
    """What the group has is that of the transaction that was taken over; a later one has committed anew."""
    producer = taken_over(bench, 2)
    if not journal_is_whole:
        bench.store.write(lambda connection: connection.execute(delete(transaction_log)))
    producer_id = producer.identity.producer_id
    producer.commit()
    begin_another(bench, producer, 5)
    producer.commit()
    assert_sound(bench.store, at_rest=True)
    of_first = {"committed_offset": 4, "producer_id": producer_id, "producer_epoch": 0}
    bench.store.write(lambda connection: connection.execute(update(group_offsets).values(of_first)))
    assert {found.invariant for found in find_violations(bench.store)} == {Invariant.OFFSETS_TOLD}


def test_an_offset_that_its_commit_does_not_tell_of_is_found(bench: Bench) -> None:
    taken_over(bench, 2).commit()
    bench.store.write(lambda connection: connection.execute(update(group_offsets).values(committed_offset=3)))
    assert {found.invariant for found in find_violations(bench.store)} == {Invariant.OFFSETS_TOLD}
