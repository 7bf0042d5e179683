"""What a look for transactions whose time is up finds, aborts, and says of the next one."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, event

from txnstore.db.portions import Portions
from txnstore.errors import StoreBusy, StoreUnavailable, UnknownTopicOrPartition, WriteConflict
from txnstore.transactions import recovery, rows, together
from txnstore.transactions.protocol import FenceReason, TransactionState
from txnstore.transactions.recovery import AFTER_OTHERS_MS, AGAIN_MS, abort_overdue
from txnstore.transactions.rows import lock_row
from txnstore.transactions.together import AbortedTogether

S = TransactionState


def begin(bench, timeout_ms: int):
    producer = bench.started(timeout_ms=timeout_ms)
    producer.send(bench.partition_ids[0], b"a")
    return producer


def test_it_says_when_the_next_ones_time_is_up(own_bench) -> None:
    bench = own_bench
    assert abort_overdue(bench.store) is None
    later, sooner = begin(bench, 5_000), begin(bench, 1_000)
    assert abort_overdue(bench.store) == 1_001
    bench.clock.advance(1_000)
    assert abort_overdue(bench.store) == 1
    assert bench.row(sooner.transactional_id).state is S.ONGOING
    bench.clock.advance(1)
    assert abort_overdue(bench.store) == 4_000
    assert bench.row(sooner.transactional_id).fence_reason is FenceReason.TIMEOUT
    assert bench.row(later.transactional_id).state is S.ONGOING
    bench.clock.advance(4_000)
    assert abort_overdue(bench.store) is None
    assert bench.row(later.transactional_id).fence_reason is FenceReason.TIMEOUT
    bounds = bench.bounds(bench.partition_ids[0])
    assert bounds.last_stable_offset == bounds.high_watermark


def test_one_that_never_times_out_is_not_counted(own_bench) -> None:
    bench = own_bench
    bench.set_store({"transaction.two.phase.commit.enable": "true"})
    producer = bench.started(enable_two_phase_commit=True)
    producer.send(bench.partition_ids[0], b"a")
    assert abort_overdue(bench.store) is None


def test_a_look_is_bounded_and_the_next_one_goes_on(own_bench, monkeypatch) -> None:
    bench = own_bench
    monkeypatch.setattr(recovery, "HELP_SECONDS", 0.0)
    monkeypatch.setattr(recovery, "ABORTED_FIRST", 2)
    monkeypatch.setattr(recovery, "ABORTED_MIN", 1)
    producers = []
    for _ in range(3):
        producers.append(begin(bench, 1_000))
        bench.clock.advance(1)
    bench.clock.advance(1_000)
    assert abort_overdue(bench.store) == 0
    assert [bench.row(producer.transactional_id).state for producer in producers] == [
        S.COMPLETE_ABORT,
        S.COMPLETE_ABORT,
        S.ONGOING,
    ]
    assert abort_overdue(bench.store) is None


def test_what_cannot_be_aborted_now_is_looked_at_again(own_bench, monkeypatch) -> None:
    bench = own_bench
    begin(bench, 1_000)
    bench.clock.advance(1_001)

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable

    with monkeypatch.context() as patched:
        patched.setattr(recovery, "abort_together", away)
        assert abort_overdue(bench.store) == AGAIN_MS
    assert abort_overdue(bench.store) is None


def test_it_waits_for_nobody_who_is_at_work_on_one(own_bench) -> None:
    bench = own_bench
    locked, free = begin(bench, 1_000), begin(bench, 2_000)
    bench.clock.advance(2_001)

    def work(connection: Connection) -> int | None:
        lock_row(connection, locked.transactional_id)
        began_at = time.monotonic()
        left_ms = abort_overdue(bench.store)
        # Whoever waits for the lock waits for so long.
        assert time.monotonic() - began_at < bench.store.limits.lock_timeout_ms / 1000
        return left_ms

    left_ms = bench.store.write(work)
    if bench.store.backend.has_one_writer:
        assert left_ms is not None
        assert AFTER_OTHERS_MS[0] <= left_ms <= AFTER_OTHERS_MS[1]
    else:
        assert left_ms == AGAIN_MS
        assert bench.row(free.transactional_id).state is S.COMPLETE_ABORT
    assert bench.row(locked.transactional_id).state is S.ONGOING
    assert abort_overdue(bench.store) is None
    assert bench.row(locked.transactional_id).state is S.COMPLETE_ABORT


@pytest.mark.parametrize("error", [StoreBusy, WriteConflict])
def test_where_another_one_helps_a_client_waits_for_none_of_them_and_looks_again_soon(
    own_bench, monkeypatch, error
) -> None:
    """All whom one time wakes look at once: one that went one by one would be in the way of who aborts many."""
    bench = own_bench
    for _ in range(3):
        begin(bench, 1_000)
    bench.clock.advance(1_001)
    taken: list[int] = []

    def hold(some, *_: object) -> AbortedTogether:
        taken.append(len(some))
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(bench.store, "limits", replace(bench.store.limits, retry_timeout_ms=0))
        patched.setattr("txnstore.db.portions.LOCK_TIMEOUT_MS", 0)
        patched.setattr(recovery, "abort_together", hold)
        patched.setattr(recovery, "abort_if_timed_out", lambda *_, **__: pytest.fail("one by one"))
        looks = [abort_overdue(bench.store) for _ in range(8)]
    assert set(taken) == {3}
    assert all(left_ms is not None and AFTER_OTHERS_MS[0] <= left_ms <= AFTER_OTHERS_MS[1] for left_ms in looks)
    # Each helper at another moment.
    assert len(set(looks)) > 1
    assert abort_overdue(bench.store) is None


def test_a_look_that_aborts_nothing_is_bounded_too(own_bench, monkeypatch) -> None:
    bench = own_bench
    monkeypatch.setattr(recovery, "HELP_SECONDS", 0.0)
    monkeypatch.setattr(recovery, "ABORTED_FIRST", 1)
    monkeypatch.setattr(recovery, "ABORTED_MIN", 1)
    for _ in range(3):
        begin(bench, 1_000)
    bench.clock.advance(1_001)
    taken: list[int] = []

    def find_locked(some, *_: object) -> AbortedTogether:
        taken.append(len(some))
        return AbortedTogether((), busy=some)

    with monkeypatch.context() as patched:
        patched.setattr(recovery, "abort_together", find_locked)
        assert abort_overdue(bench.store) == AGAIN_MS
    assert taken == [1]


def test_many_are_aborted_as_many_at_once_as_may_be_from_the_first_on(own_bench, monkeypatch) -> None:
    """Where others are at work as well, each look gets the lock once."""
    bench = own_bench
    monkeypatch.setattr(recovery, "HELP_SECONDS", 0.0)
    monkeypatch.setattr(recovery, "LOOKED_AT_FIRST", 2)
    for _ in range(5):
        begin(bench, 1_000)
    bench.clock.advance(1_001)
    # All of them in one portion.
    assert abort_overdue(bench.store) is None


def test_one_by_one_goes_no_further_than_the_time_for_a_look(own_bench, monkeypatch) -> None:
    bench = own_bench
    monkeypatch.setattr(recovery, "HELP_SECONDS", 0.0)
    names = [begin(bench, 1_000).transactional_id for _ in range(3)]
    bench.clock.advance(1_001)
    with monkeypatch.context() as patched:
        patched.setattr(recovery, "abort_together", lambda some, *_: AbortedTogether((), unusual=some))
        # The next look goes on at once.
        assert abort_overdue(bench.store) == 0
    assert [bench.row(name).state for name in names] == [S.COMPLETE_ABORT, S.ONGOING, S.ONGOING]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("help_with", ["a client", "maintenance"])
def test_those_that_cannot_be_aborted_now_keep_no_other_one_open(own_bench, monkeypatch, help_with) -> None:
    """However many of them have waited longest."""
    bench = own_bench
    monkeypatch.setattr(recovery, "LOOKED_AT_FIRST", 3)
    monkeypatch.setattr(recovery, "HELP_SECONDS", 60.0)
    monkeypatch.setattr(recovery, "FOUND_MAX", 2)
    monkeypatch.setattr(recovery, "ABORTED_IN_A_ROW", 2)
    monkeypatch.setattr(recovery, "_TIMED_OUT", recovery._TIMED_OUT.limit(3))
    monkeypatch.setattr(recovery, "ABORTED_FIRST", 2)
    monkeypatch.setattr(recovery, "ABORTED_MIN", 1)
    monkeypatch.setattr(recovery, "ABORTED_MAX", 2)
    stuck = [begin(bench, 1_000).transactional_id for _ in range(7)]
    bench.clock.advance(1)
    free = [begin(bench, 1_000).transactional_id for _ in range(3)]
    bench.clock.advance(1_001)

    def abort_together_if_free(names, locality, connection) -> AbortedTogether:
        # Locked by somebody.
        aborted = together.abort_together([name for name in names if name not in stuck], locality, connection)
        return replace(aborted, busy=[name for name in names if name in stuck])

    def abort_if_free(store, transactional_id, *arguments, **options) -> bool:
        assert transactional_id in stuck
        assert options["waits"]
        # Who waits for that gives up in the end.
        raise StoreBusy

    monkeypatch.setattr(recovery, "abort_together", abort_together_if_free)
    monkeypatch.setattr(recovery, "abort_if_timed_out", abort_if_free)
    if help_with == "a client":
        assert abort_overdue(bench.store) == AGAIN_MS
    else:
        assert len(recovery.abort_timed_out(bench.store)) == 2
        with pytest.raises(StoreBusy):
            recovery.abort_timed_out(bench.store)
    assert {bench.row(name).state for name in free} == {S.COMPLETE_ABORT}
    assert {bench.row(name).state for name in stuck} == {S.ONGOING}


@pytest.mark.parametrize("help_with", ["a client", "maintenance"])
def test_however_slow_a_portion_is_the_next_one_takes_some(own_bench, monkeypatch, help_with) -> None:
    """Fewer would take as long."""
    bench = own_bench
    monkeypatch.setattr(recovery, "ABORTED_MIN", 2)
    monkeypatch.setattr(recovery, "ABORTED_FIRST", 1)
    monkeypatch.setattr(recovery, "HELP_SECONDS", 60.0)
    monkeypatch.setattr(recovery, "ABORTED_MAX", 1)
    names = [begin(bench, 1_000).transactional_id for _ in range(6)]
    bench.clock.advance(1_001)
    taken: list[list[str]] = []

    def note(some, locality, connection) -> AbortedTogether:
        taken.append(list(some))
        return together.abort_together(some, locality, connection)

    monkeypatch.setattr(recovery, "abort_together", note)
    if help_with == "a client":
        assert abort_overdue(bench.store) is None
    else:
        assert len(recovery.abort_timed_out(bench.store)) == 6
    assert sorted(name for some in taken for name in some) == sorted(names)
    assert [len(some) for some in taken] == [2, 2, 2]


def test_a_portion_of_those_that_have_written_to_several_partitions_is_smaller(own_bench, monkeypatch) -> None:
    bench = own_bench
    for name in ("ABORTED_MIN", "ABORTED_FIRST", "ABORTED_MAX"):
        monkeypatch.setattr(recovery, name, 4)
    for _ in range(8):
        begin(bench, 1_000).send(bench.partition_ids[1], b"a")
    bench.clock.advance(1_001)
    taken: list[int] = []

    def note(some, locality, connection) -> AbortedTogether:
        taken.append(len(some))
        return together.abort_together(some, locality, connection)

    monkeypatch.setattr(recovery, "abort_together", note)
    assert len(recovery.abort_timed_out(bench.store)) == 8
    assert taken == [2, 2, 2, 2]


def test_one_that_is_damaged_keeps_no_other_one_open(own_bench, monkeypatch) -> None:
    bench = own_bench
    damaged, free = begin(bench, 1_000), begin(bench, 1_000)
    # Its partition is not there: no marker can be written.
    bench.store.write(lambda c: rows.add_partitions(c, damaged.transactional_id, [10**12]))
    bench.clock.advance(1_001)
    monkeypatch.setattr(recovery, "HELP_SECONDS", 60.0)
    assert abort_overdue(bench.store) == AGAIN_MS
    # Whoever is held back by it need not wait for the maintenance.
    assert bench.row(free.transactional_id).state is S.COMPLETE_ABORT
    with pytest.raises(UnknownTopicOrPartition):
        recovery.abort_timed_out(bench.store)
    assert bench.row(damaged.transactional_id).state is S.ONGOING


def test_one_that_the_rules_cannot_abort_keeps_no_other_one_open(own_bench, monkeypatch) -> None:
    bench = own_bench
    damaged, free = begin(bench, 1_000), begin(bench, 1_000)
    # No marker of the epochs that it has left would end records of this one.
    bench.set_row(damaged.transactional_id, begin_epoch=7)
    bench.clock.advance(1_001)
    monkeypatch.setattr(recovery, "HELP_SECONDS", 60.0)
    assert abort_overdue(bench.store) == AGAIN_MS
    # Whoever is held back by it need not wait for the maintenance.
    assert bench.row(free.transactional_id).state is S.COMPLETE_ABORT
    with pytest.raises(AssertionError, match="a marker's epoch is above that of its records"):
        recovery.abort_timed_out(bench.store)
    assert bench.row(damaged.transactional_id).state is S.ONGOING


@pytest.mark.parametrize("why", ["refused together", "busy"])
def test_whoever_is_told_to_stop_waits_for_no_further_one(own_bench, monkeypatch, why) -> None:
    bench = own_bench
    names = [begin(bench, 1_000).transactional_id for _ in range(3)]
    bench.clock.advance(1_001)
    stop = threading.Event()
    asked: list[str] = []

    def together_not(some, *_: object) -> AbortedTogether:
        if why == "busy":
            return AbortedTogether((), busy=some)
        raise StoreBusy

    def wait_for_one(_: object, transactional_id: str, *__: object, **___: object) -> bool:
        asked.append(transactional_id)
        stop.set()
        return False

    monkeypatch.setattr(recovery, "abort_together", together_not)
    monkeypatch.setattr(recovery, "abort_if_timed_out", wait_for_one)
    monkeypatch.setattr(bench.store, "limits", replace(bench.store.limits, retry_timeout_ms=0))
    assert recovery.abort_timed_out(bench.store, portions=Portions(stop=stop)) == ()
    assert asked == names[:1]


@pytest.mark.parametrize(
    ("statement", "parameters", "index", "condition"),
    [
        (
            recovery._NEXT_DEADLINES,
            {**recovery._FIRST_DEADLINE, "count_max": 3},
            "transactions_deadline",
            "deadline_ms",
        ),
        (recovery._TIMED_OUT, recovery._FIRST_DEADLINE, "transactions_deadline", "deadline_ms<"),
        (recovery._DECIDED, {"after_id": ""}, "transactions_decided", ""),
    ],
    ids=["the next", "timed out", "decided"],
)
def test_a_look_reads_nothing_of_what_is_at_rest_or_in_time(shared_store, statement, parameters, index, condition):
    executed: list[tuple[str, Any]] = []

    def note(connection, cursor, text, values, *_: object) -> None:
        executed.append((text, values))

    def explain(connection: Connection) -> str:
        is_sqlite = shared_store.backend.name == "sqlite"
        if not is_sqlite:
            # Of a few rows PostgreSQL reads them all.
            connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
        event.listen(connection, "before_cursor_execute", note)
        connection.execute(statement, parameters).all()
        text, values = executed[-1]
        return str(connection.exec_driver_sql(f"EXPLAIN {'QUERY PLAN ' if is_sqlite else ''}{text}", values).all())

    plan = shared_store.read(explain)
    assert index in plan
    assert condition in plan.replace(" ", ""), plan


def test_those_that_somebody_is_at_work_on_come_last_and_together(own_bench, monkeypatch) -> None:
    """Maintenance in two processes: who comes second does not ask for one after the other what the first has done."""
    bench = own_bench
    names = [begin(bench, 1_000).transactional_id for _ in range(6)]
    bench.clock.advance(1_001)
    taken: list[list[str]] = []

    def abort_others(some, locality, connection) -> AbortedTogether:
        taken.append(list(some))
        if len(taken) == 1:
            # Locked by somebody who is done soon.
            free, busy = some[::2], some[1::2]
            return replace(together.abort_together(free, locality, connection), busy=busy)
        return together.abort_together(some, locality, connection)

    def abort_one(*_: object, **__: object) -> bool:
        raise AssertionError("nobody waits for one of them")

    monkeypatch.setattr(recovery, "abort_together", abort_others)
    monkeypatch.setattr(recovery, "abort_if_timed_out", abort_one)
    monkeypatch.setattr(recovery, "ABORTED_FIRST", 4)
    monkeypatch.setattr(recovery, "ABORTED_MAX", 4)
    monkeypatch.setattr(recovery, "ABORTED_MIN", 4)
    assert sorted(recovery.abort_timed_out(bench.store)) == sorted(names)
    assert taken[:2] == [names[:4], names[4:]]
    assert sorted(taken[-1]) == sorted(names[1:4:2])


def test_it_is_known_when_the_time_of_the_next_one_is_up(own_bench) -> None:
    bench = own_bench
    assert recovery.next_timeout_ms(bench.store) is None
    begin(bench, 5_000)
    begin(bench, 1_000)
    assert recovery.next_timeout_ms(bench.store) == 1_001
    bench.clock.advance(1_001)
    assert recovery.next_timeout_ms(bench.store) == 0
    recovery.abort_timed_out(bench.store)
    assert recovery.next_timeout_ms(bench.store) == 4_000
