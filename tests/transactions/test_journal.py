"""The journal: it tells of every change of a state, though what is done at once is one row."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from sqlalchemy import delete, select

from tests.transactions.bench import sent_offsets
from txnstore.db.schema import transaction_log
from txnstore.groups.offsets import commit_offsets
from txnstore.model import GroupMembership, OffsetAndMetadata
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


@pytest.mark.slow_but_first
@pytest.mark.parametrize("commits_whole", [True, False])
def test_the_entry_of_a_commit_tells_which_offsets_have_taken_effect_with_it(bench, monkeypatch, commits_whole) -> None:
    monkeypatch.setattr(bench.store, "commits_whole", commits_whole)
    producer, (first, second) = bench.started(), bench.partition_ids
    group, other = (f'{bench.prefix} "\N{SNOWMAN}\\\t{name}"' for name in "ab")

    def told() -> list[object]:
        of_id = transaction_log.c.transactional_id == producer.transactional_id
        statement = select(transaction_log.c.sent_offsets).where(of_id).order_by(transaction_log.c.entry_id)
        found: list[object] = bench.store.read(lambda connection: connection.execute(statement).scalars().all())
        return found

    def tells(offsets: dict[str, list[list[int]]] | None) -> None:
        text = None if offsets is None else json.dumps(offsets, ensure_ascii=False, separators=(",", ":"))
        assert told()[-1] == text

    for number in range(2):
        # The group is known the second time.
        producer.commit(offsets=[sent_offsets(group, {second: number, first: 3})])
        tells({group: [[first, 3], [second, number]]})
    producer.commit(appends=[producer.batch(first, b"a")], offsets=[sent_offsets(group, {second: 4})])
    tells({group: [[second, 4]]})
    producer.commit(appends=[producer.batch(first, b"a")], offsets=[sent_offsets(group, {})])
    tells(None)
    # What is sent again takes the place of what was sent before, and a commit of others changes nothing of it.
    producer.send_offsets(other, {first: 1})
    producer.send_offsets(group, {second: 5, first: 1})
    producer.send_offsets(group, {first: 2})
    assert not any(told()[5:])
    bench.store.write(
        lambda connection: commit_offsets(connection, GroupMembership(other), {first: OffsetAndMetadata(9)})
    )
    producer.commit(offsets=[sent_offsets(group, {second: 6})])
    tells({group: [[first, 2], [second, 6]], other: [[first, 1]]})
    producer.send(first, b"a")
    producer.send_offsets(group, {first: 7})
    producer.abort()
    tells(None)


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
