"""Many transactions whose time is up are aborted by one database transaction, each as it would be by one of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, event, insert, select

from tests.tools.lists import be_many
from tests.transactions.bench import Bench, Producer, bench_on
from txnstore.db.portions import Portions
from txnstore.db.schema import (
    pending_group_offsets,
    producer_states,
    transaction_branches,
    transaction_log,
    transaction_partitions,
    transaction_writer_partitions,
    transaction_writers,
    transactions,
)
from txnstore.db.store import RowsMissedError, Store
from txnstore.errors import (
    InvalidProducerIdMapping,
    OutcomeUnknown,
    ProducerFenced,
    StoreBusy,
    StoreUnavailable,
    TransactionAbortable,
    TxnStoreError,
    UnknownTopicOrPartition,
    WriteConflict,
)
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.model import Record
from txnstore.testing.invariants import assert_sound
from txnstore.transactions import protocol, rows
from txnstore.transactions.administration import WAITS_MAX, AbortedAsShown, abort_shown_transactions
from txnstore.transactions.protocol import (
    EPOCH_EXHAUSTED,
    FenceReason,
    TransactionMetadata,
    TransactionState,
    complete,
    fence_and_abort,
)
from txnstore.transactions.recovery import abort_by_administrator
from txnstore.transactions.rows import lock_row
from txnstore.transactions.together import AbortedTogether, abort_together
from txnstore.transactions.transaction import abort_if_timed_out
from txnstore.transactions.writers import append_as_writer, begin_transaction, join_transaction, report_writer

S = TransactionState
TIMEOUT_MS = 1_000
#: What differs from one bench to another.
IDS = {"transactional_id", "producer_id", "previous_producer_id", "partition_id", "group_id", "entry_id", "crc"}


@pytest.fixture(autouse=True, params=[False, True], ids=["few", "as many"])
def as_many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few go the way of many, too, whose values go to a server in lists."""
    if request.param:
        be_many(monkeypatch)


def write_as_writer(bench: Bench, producer: Producer, *, reports: bool) -> None:
    writer = join_transaction(bench.store, producer.transactional_id, producer.identity)
    batch = encode([Record(b"w")], producer=writer.identity, base_sequence=0, is_transactional=True)
    append_as_writer(bench.store, writer, [Append(bench.partition_ids[1], batch)])
    if reports:
        report_writer(bench.store, writer)


def open_some(bench: Bench) -> list[Producer]:
    """Open a transaction of each sort that there is."""
    first, second = bench.partition_ids
    plain, wide, offsets, alone, written, last = (bench.started(timeout_ms=TIMEOUT_MS) for _ in range(6))
    bench.set_row(last.transactional_id, producer_epoch=EPOCH_EXHAUSTED)
    last.identity = last.identity.__class__(last.identity.producer_id, EPOCH_EXHAUSTED)
    plain.send(first, b"plain")
    wide.send(first, b"wide")
    wide.send(second, b"wide", b"wide")
    for producer in (offsets, alone):
        producer.send_offsets(f"group {bench.prefix}", {first: 7})
    offsets.send_offsets(f"another group {bench.prefix}", {second: 8})
    offsets.send(second, b"with offsets")
    begin_transaction(bench.store, written.transactional_id, written.identity)
    for reports in (False, True):
        write_as_writer(bench, written, reports=reports)
    last.send(first, b"last")
    return [plain, wide, offsets, alone, written, last]


def rows_of(bench: Bench, producers: list[Producer]) -> Any:
    """Return what the tables hold of them, without what is another one's in another bench."""
    names = [producer.transactional_id for producer in producers]

    def found(connection: Connection) -> Any:
        tables = (transactions, transaction_log, transaction_partitions, transaction_writers)
        listed = [
            connection.execute(select(table).where(table.c.transactional_id == name).order_by(*table.primary_key)).all()
            for table in (*tables, transaction_writer_partitions)
            for name in names
        ]
        states = select(producer_states).where(producer_states.c.partition_id.in_(bench.partition_ids))
        listed.append(
            connection.execute(states.order_by(producer_states.c.partition_id, producer_states.c.producer_id)).all()
        )
        pending = select(pending_group_offsets).where(pending_group_offsets.c.partition_id.in_(bench.partition_ids))
        listed.append(connection.execute(pending).all())
        return [
            [{key: value for key, value in row._mapping.items() if key not in IDS} for row in some] for some in listed
        ]

    markers = [bench.markers(partition_id) for partition_id in bench.partition_ids]
    finished = [
        [(row.marker_offset, row.first_offset, row.outcome, row.last_stable_offset) for row in bench.finished(each)]
        for each in bench.partition_ids
    ]
    return bench.store.read(found), markers, finished


def abort_all(bench: Bench, producers: list[Producer]) -> AbortedTogether:
    names = [producer.transactional_id for producer in producers]
    return bench.store.write(partial(abort_together, names, None))


@pytest.mark.slow
def test_they_leave_the_rows_that_they_leave_one_by_one(store, clock) -> None:
    benches = [bench_on(store, clock) for _ in range(2)]
    opened = [open_some(bench) for bench in benches]
    clock.advance(TIMEOUT_MS + 1)
    together = abort_all(benches[0], opened[0])
    assert together == AbortedTogether(tuple(producer.transactional_id for producer in opened[0]))
    # Markers come in the order in which they are named.
    for producer in opened[1]:
        assert abort_if_timed_out(store, producer.transactional_id)
    one, other = (rows_of(bench, producers) for bench, producers in zip(benches, opened, strict=True))
    assert one == other
    assert all(not some for some in one[0][-1:])
    assert_sound(store, at_rest=True)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({"last_producer_epoch": -1}, id="as it began"),
        pytest.param({"producer_epoch": 7, "last_producer_epoch": 6, "begin_epoch": 7}, id="after some"),
        pytest.param({"producer_epoch": 7, "begin_epoch": 5}, id="taken over"),
        pytest.param({"producer_epoch": EPOCH_EXHAUSTED - 1, "begin_epoch": EPOCH_EXHAUSTED - 1}, id="one epoch left"),
        pytest.param({"producer_epoch": EPOCH_EXHAUSTED, "begin_epoch": EPOCH_EXHAUSTED}, id="no epoch left"),
        pytest.param({"previous_producer_id": 3, "fence_reason": "admin", "fence_detail": "a"}, id="with a past"),
    ],
)
def test_a_row_becomes_what_the_rules_make_of_it(own_bench, columns: dict[str, Any]) -> None:
    bench = own_bench
    producer = bench.started(timeout_ms=TIMEOUT_MS)
    producer.send(bench.partition_ids[0], b"a")
    bench.set_row(producer.transactional_id, **columns)
    before = bench.row(producer.transactional_id)
    bench.clock.advance(TIMEOUT_MS + 5)
    now_ms = bench.clock.now_ms()
    abort_all(bench, [producer])
    after = bench.row(producer.transactional_id)
    detail = "it was open for 1005 ms, longer than its timeout of 1000 ms"
    decided = fence_and_abort(before, FenceReason.TIMEOUT, detail, now_ms=now_ms, allocate=lambda: after.producer_id)
    assert after == complete(decided, now_ms=now_ms)
    assert bench.journal(producer.transactional_id)[-2:] == [
        (S.PREPARE_ABORT, decided.producer_epoch),
        (S.COMPLETE_ABORT, after.producer_epoch),
    ]


@pytest.mark.slow_but_first
def test_a_statement_that_misses_one_is_an_error_and_none_is_aborted(own_bench, monkeypatch) -> None:
    bench = own_bench
    late, in_time = bench.started(timeout_ms=TIMEOUT_MS), bench.started(timeout_ms=60_000)
    for producer in (late, in_time):
        producer.send(bench.partition_ids[0], b"a")
    bench.clock.advance(TIMEOUT_MS + 1)
    monkeypatch.setattr(protocol, "deadline_of", lambda *_: 0)
    with pytest.raises(RowsMissedError, match="transactions hit 1 rows where 2 were to be hit"):
        abort_all(bench, [late, in_time])
    assert {bench.row(producer.transactional_id).state for producer in (late, in_time)} == {S.ONGOING}
    assert bench.markers(bench.partition_ids[0]) == []


@pytest.mark.slow
def test_each_producer_is_told_and_goes_on(own_bench) -> None:
    bench = own_bench
    producers = open_some(bench)
    bench.clock.advance(TIMEOUT_MS + 1)
    abort_all(bench, producers)
    for producer in producers:
        row = bench.row(producer.transactional_id)
        assert (row.state, row.fence_reason) == (S.COMPLETE_ABORT, FenceReason.TIMEOUT)
        old = producer.twin()
        with pytest.raises(TransactionAbortable, match="longer than its timeout of 1000 ms"):
            producer.commit()
        producer.abort()
        producer.sequences.clear()
        producer.send(bench.partition_ids[0], b"next")
        producer.commit()
        # One whose producer id had no epoch left has got another one.
        with pytest.raises((ProducerFenced, InvalidProducerIdMapping)):
            old.commit()
    assert bench.read(bench.partition_ids[0]) == [b"next"] * len(producers)
    assert bench.read(bench.partition_ids[1]) == []
    assert bench.offsets(f"group {bench.prefix}").offsets == {}
    assert_sound(bench.store, at_rest=True)


@pytest.mark.slow_but_first
def test_those_in_time_those_that_are_over_and_those_that_nobody_knows_stay_as_they_are(own_bench) -> None:
    bench = own_bench
    late, in_time, over = (bench.started(timeout_ms=timeout) for timeout in (TIMEOUT_MS, 60_000, TIMEOUT_MS))
    for producer in (late, in_time, over):
        producer.send(bench.partition_ids[0], b"a")
    over.commit()
    before = [bench.row(producer.transactional_id) for producer in (in_time, over)]
    bench.clock.advance(TIMEOUT_MS + 1)
    nobody = bench.producer("nobody")
    assert abort_all(bench, [in_time, nobody, over, late]) == AbortedTogether(
        (late.transactional_id,), busy=("nobody",)
    )
    assert [bench.row(producer.transactional_id) for producer in (in_time, over)] == before
    assert abort_all(bench, [late]) == AbortedTogether(())
    in_time.commit()


@pytest.mark.slow_but_first
def test_those_that_an_administrator_was_shown_are_aborted_whatever_their_age(own_bench, monkeypatch) -> None:
    """As one by one; what has ended since, or gone on, stays as it is."""
    bench = own_bench
    usual, last, over, gone_on, one = (bench.started(timeout_ms=60_000) for _ in range(5))
    bench.set_row(last.transactional_id, producer_epoch=EPOCH_EXHAUSTED)
    last.identity = last.identity.__class__(last.identity.producer_id, EPOCH_EXHAUSTED)
    for producer in (usual, last, over, gone_on, one):
        producer.send(bench.partition_ids[0], b"a")
    usual.send_offsets(f"group {bench.prefix}", {bench.partition_ids[0]: 7})
    shown = [bench.row(producer.transactional_id) for producer in (usual, last, over, gone_on)]
    over.commit()
    gone_on.commit()
    gone_on.sequences.clear()
    gone_on.send(bench.partition_ids[0], b"later")
    before = [bench.row(producer.transactional_id) for producer in (over, gone_on)]
    assert abort_by_administrator(bench.store, one.transactional_id)
    with monkeypatch.context() as patched:
        # None of them is left to be aborted by itself.
        patched.delattr("txnstore.transactions.administration.abort_by_administrator")
        assert abort_shown_transactions(bench.store, shown) == AbortedAsShown(2)
    assert [bench.row(producer.transactional_id) for producer in (over, gone_on)] == before
    each = {"transactional_id": "", "producer_id": 0}
    together, alone = (replace(bench.row(producer.transactional_id), **each) for producer in (usual, one))
    assert together == alone
    assert bench.journal(usual.transactional_id)[-2:] == bench.journal(one.transactional_id)[-2:]
    for producer in (usual, last):
        with pytest.raises(TransactionAbortable, match="by an administrator"):
            producer.commit()
    assert bench.offsets(f"group {bench.prefix}").unstable == frozenset()
    gone_on.commit()
    assert bench.read(bench.partition_ids[0]) == [b"a", b"a", b"later"]
    assert_sound(bench.store, at_rest=True)


def test_one_that_cannot_be_aborted_keeps_none_that_was_shown_open(own_bench) -> None:
    bench = own_bench
    damaged, free = (bench.started(timeout_ms=60_000) for _ in range(2))
    for producer in (damaged, free):
        producer.send(bench.partition_ids[0], b"a")
    # Its partition is not there: no marker can be written.
    bench.store.write(lambda c: rows.add_partitions(c, damaged.transactional_id, [10**12]))
    shown = [bench.row(producer.transactional_id) for producer in (damaged, free)]
    done = abort_shown_transactions(bench.store, shown)
    assert (done.aborted, done.left, type(done.error)) == (1, 1, UnknownTopicOrPartition)
    assert bench.row(damaged.transactional_id).state is S.ONGOING
    assert bench.row(free.transactional_id).state is S.COMPLETE_ABORT


@pytest.fixture
def shown(own_bench: Bench) -> list[TransactionMetadata]:
    """Three open transactions, as they are shown."""
    producers = [own_bench.started(timeout_ms=60_000) for _ in range(3)]
    for producer in producers:
        producer.send(own_bench.partition_ids[0], b"a")
        producer.send(own_bench.partition_ids[1], b"a")
    return [own_bench.row(producer.transactional_id) for producer in producers]


@pytest.fixture
def portions(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Lets portions of shown ones meet these errors, one after the other, before or after they are done."""
    met: list[list[str]] = []

    def meet(*errors: Exception, after: bool = False) -> list[list[str]]:
        left = list(errors)
        write = Portions.write

        def wrapped(portions: Portions, store: Store, work: Any, **options: Any) -> Any:
            def noted(connection: Connection) -> Any:
                done = work(connection)
                met.append([*done.aborted])
                return done

            if left and not after:
                raise left.pop(0)
            done = write(portions, store, noted, **options)
            if left:
                raise left.pop(0)
            return done

        monkeypatch.setattr(Portions, "write", wrapped)
        return met

    return meet


def test_the_portions_of_those_that_were_shown_have_as_many_rows_as_have_others(
    own_bench, shown, portions, monkeypatch
) -> None:
    """Transactions of many partitions keep their writers waiting no longer than those of one."""
    monkeypatch.setattr("txnstore.transactions.administration.ABORTED_MIN", 1)
    monkeypatch.setattr("txnstore.transactions.administration.ABORTED_FIRST", 4)
    monkeypatch.setattr(Portions, "_adapt", lambda *_: None)
    met = portions()
    names = [row.transactional_id for row in shown]
    assert abort_shown_transactions(own_bench.store, shown) == AbortedAsShown(3)
    assert met == [names[:2], names[2:]]


def test_what_was_aborted_though_the_answer_was_lost_is_counted_as_aborted(own_bench, shown, portions) -> None:
    portions(OutcomeUnknown("the answer was lost"), after=True)
    assert abort_shown_transactions(own_bench.store, shown) == AbortedAsShown(3)


def test_what_had_ended_before_an_answer_was_lost_is_not_counted_as_aborted(own_bench, shown, portions) -> None:
    over = own_bench.producer(shown[0].transactional_id)
    over.become(shown[0].identity)
    over.abort()
    portions(OutcomeUnknown("the answer was lost"), after=True)
    assert abort_shown_transactions(own_bench.store, shown) == AbortedAsShown(2)


@pytest.mark.parametrize("error", [StoreBusy, WriteConflict, OutcomeUnknown])
def test_a_portion_that_finds_somebody_at_work_is_repeated_and_not_tried_one_by_one(
    own_bench, shown, portions, monkeypatch, error: type[TxnStoreError]
) -> None:
    monkeypatch.delattr("txnstore.transactions.administration.abort_by_administrator")
    portions(*[error("somebody is at work")] * (WAITS_MAX - 1))
    assert abort_shown_transactions(own_bench.store, shown) == AbortedAsShown(3)


@pytest.mark.parametrize("error", [StoreBusy, WriteConflict, OutcomeUnknown, StoreUnavailable])
def test_those_for_which_somebody_is_at_work_for_too_long_are_left(
    own_bench, shown, portions, monkeypatch, error: type[TxnStoreError]
) -> None:
    monkeypatch.delattr("txnstore.transactions.administration.abort_by_administrator")
    portions(*[error("somebody is at work")] * WAITS_MAX)
    done = abort_shown_transactions(own_bench.store, shown)
    assert (done.aborted, done.left, type(done.error)) == (0, 3, error)
    assert {own_bench.row(row.transactional_id).state for row in shown} == {S.ONGOING}


def test_one_with_branches_is_left_to_be_aborted_by_itself(own_bench) -> None:
    bench = own_bench
    branched, plain = (bench.started(timeout_ms=TIMEOUT_MS) for _ in range(2))
    for producer in (branched, plain):
        producer.send(bench.partition_ids[0], b"a")
    share = {
        "gid": "txnstore_a",
        "transactional_id": branched.transactional_id,
        "producer_id": branched.identity.producer_id,
        "producer_epoch": branched.identity.epoch,
        "database_label": "db2:5432/bank",
        "database_identity": "1:1",
        "transaction_xid8": "3",
        "registered_ms": 1,
    }
    bench.store.write(lambda connection: connection.execute(insert(transaction_branches), share))
    bench.clock.advance(TIMEOUT_MS + 1)
    expected = AbortedTogether((plain.transactional_id,), unusual=(branched.transactional_id,))
    assert abort_all(bench, [branched, plain]) == expected
    assert bench.row(branched.transactional_id).state is S.ONGOING


def test_nobody_waits_for_one_that_somebody_is_at_work_on(own_bench) -> None:
    bench = own_bench
    if bench.store.backend.name == "sqlite":
        pytest.skip("whoever writes to a SQLite database is alone with it")
    locked, free = (bench.started(timeout_ms=TIMEOUT_MS) for _ in range(2))
    for producer in (locked, free):
        producer.send(bench.partition_ids[0], b"a")
    bench.clock.advance(TIMEOUT_MS + 1)

    def work(connection: Connection) -> AbortedTogether:
        lock_row(connection, locked.transactional_id)
        assert not abort_if_timed_out(bench.store, locked.transactional_id, waits=False)
        return abort_all(bench, [locked, free])

    assert bench.store.write(work) == AbortedTogether((free.transactional_id,), busy=(locked.transactional_id,))


def executions(bench: Bench, work: Callable[[], object]) -> int:
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    event.listen(bench.store.engine, "before_cursor_execute", note)
    work()
    event.remove(bench.store.engine, "before_cursor_execute", note)
    return count


@pytest.mark.slow
def test_many_cost_as_many_statements_as_a_few(own_bench) -> None:
    bench = own_bench
    counts = []
    for number in (3, 30):
        producers = [bench.started(timeout_ms=TIMEOUT_MS) for _ in range(number)]
        for producer in producers:
            producer.send(bench.partition_ids[0], b"a")
        bench.clock.advance(TIMEOUT_MS + 1)
        counts.append(executions(bench, partial(abort_all, bench, producers)))
    assert counts[0] == counts[1] <= 15
