"""The journal: it tells of every change of a state, though what is done at once is one row."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import delete, select

from txnstore.db.schema import transaction_log
from txnstore.transactions import protocol, rows
from txnstore.transactions.protocol import EPOCH_EXHAUSTED, TransactionMetadata, TransactionState

S = TransactionState


def test_what_is_begun_decided_and_complete_at_once_is_one_entry_of_the_journal(bench) -> None:
    producer = bench.started()
    before = bench.entries(producer.transactional_id)
    producer.commit(appends=[producer.batch(bench.partition_ids[0], b"a")])
    assert bench.entries(producer.transactional_id) == before + 1
    assert bench.journal(producer.transactional_id)[-3:] == [
        (S.ONGOING, 0),
        (S.PREPARE_COMMIT, 1),
        (S.COMPLETE_COMMIT, 1),
    ]


def test_the_journal_tells_of_each_change_whatever_they_are_written_with(bench) -> None:
    started = bench.row(bench.started().transactional_id)
    exhausted = replace(started, producer_epoch=EPOCH_EXHAUSTED)
    for row in (started, exhausted):
        for commit in (True, False):
            ongoing = protocol.add_to_transaction(row, row.identity, now_ms=5, holds_all=True)
            _, decided = protocol.end_transaction(
                ongoing, row.identity, commit=commit, now_ms=5, allocate=lambda: 10**6
            )
            _, empty = protocol.end_transaction(row, row.identity, commit=False, now_ms=5, allocate=lambda: 10**6)
            steps = (ongoing, decided, protocol.complete(decided, now_ms=5))
            later = protocol.complete(decided, now_ms=6)
            forgotten = replace(steps[-1], state=S.DEAD)
            for together in (
                *(steps[first:last] for first in range(3) for last in range(first + 1, 4)),
                (empty, protocol.complete(empty, now_ms=5)),
                (ongoing, decided, later),
                (*steps, protocol.fence_at_rest(steps[-1], now_ms=5, allocate=lambda: 10**6)),
                (*steps, forgotten),
            ):
                written = [replace(step, transactional_id=f"{step.transactional_id}-x") for step in together]
                assert written == told_by_journal(bench, written)


def told_by_journal(bench, steps) -> list[TransactionMetadata]:
    """Return the steps as the journal tells of them once it has nothing else of their transactional id."""

    def work(connection):
        of_id = transaction_log.c.transactional_id == steps[0].transactional_id
        connection.execute(delete(transaction_log).where(of_id))
        rows.journal(connection, steps, reason="test")
        found = connection.execute(select(transaction_log).where(of_id).order_by(transaction_log.c.entry_id))
        return [change for row in found for change in rows.changes_of(row)]

    return [
        replace(
            step,
            producer_id=change.producer_id,
            producer_epoch=change.producer_epoch,
            state=change.state,
            timeout_ms=change.timeout_ms,
            start_ms=change.start_ms,
            last_update_ms=change.update_ms,
            transaction_number=change.transaction_number,
        )
        for step, change in zip(steps, bench.store.write(work), strict=True)
    ]
