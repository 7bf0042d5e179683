"""This file is the coordinator of a sink that many tasks write to: each batch of a query becomes visible once.

Each attempt of a task opens a writer of its own and appends its records, in short database transactions.  The driver
then decides the batch, once: the records of the writers that it names, the row in `sink_batches` and the offsets of
what the batch read are one database transaction, so all of it is there or nothing, whoever dies when.

- A batch that is decided already, by this run or another one, is dropped: its writers write nothing.
- Failed, retried and speculative attempts leave writers that nobody names; the decision aborts their records.
- A new run of the query fences the one before it, and one whose driver aborts is over (`sink_runs`).
- A dead run holds readers up until the next run comes, or its transaction's timeout is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from functools import partial
from typing import Final

from sqlalchemy import Connection, bindparam, delete, func, select
from sqlalchemy.dialects.postgresql import insert as upsert

from txnstore.db.schema import sink_batches
from txnstore.db.server_time import server_now_ms
from txnstore.db.store import Store
from txnstore.errors import ProducerFenced
from txnstore.model import GroupMembership, OffsetAndMetadata
from txnstore.transactions.locked import LockedTransaction, SentOffsets
from txnstore.transactions.sink_inputs import (
    NotedInput,
    Novelty,
    check_batch_id,
    check_writer_ids,
    commit_inputs,
    forget_inputs,
    read_inputs,
)
from txnstore.transactions.sink_runs import SinkRun, end_run, enter_run, save_identity
from txnstore.transactions.states import TransactionState
from txnstore.transactions.timeouts import write_in_time
from txnstore.transactions.writer_rules import TransactionWriter
from txnstore.transactions.writers import enter_writer

#: How long a batch may stay open; transaction.max.timeout.ms of the store has the same default.
TIMEOUT_MS_DEFAULT: Final = 900_000
#: So many decided batches of a query are kept for people; a replay is recognised by the newest one.
BATCHES_KEPT: Final = 100

_OF_SINK: Final = sink_batches.c.sink_id == bindparam("of_sink_id")
_LAST: Final = select(func.max(sink_batches.c.batch_id)).where(_OF_SINK)
_INSERT: Final = upsert(sink_batches).values(commit_ms=server_now_ms())
_INSERT_NEW: Final = _INSERT.on_conflict_do_nothing(index_elements=["sink_id", "batch_id"]).returning(
    sink_batches.c.batch_id
)
_INSERT_AGAIN: Final = _INSERT.on_conflict_do_update(
    index_elements=["sink_id", "batch_id"],
    set_={"transactional_id": _INSERT.excluded.transactional_id, "commit_ms": _INSERT.excluded.commit_ms},
)
_TRIM: Final = delete(sink_batches).where(_OF_SINK, sink_batches.c.batch_id <= bindparam("through_batch_id"))


def open_writer(
    store: Store,
    run: SinkRun,
    batch_id: int,
    *,
    timeout_ms: int = TIMEOUT_MS_DEFAULT,
    retry_timeout_ms: int | None = None,
) -> TransactionWriter | None:
    """Return a writer for one attempt of a task; None if the batch is decided already and nothing is to be written.

    The first request of a run aborts what runs before it have left open, and fences them.  After `OutcomeUnknown`
    open another one: nobody will name the one that was lost.

    Raises:
        InvalidRequest, InvalidTransactionTimeout: an argument is not of the documented form.
        ProducerFenced: the run is superseded, or the batch is not the one that comes next.
    """
    check_batch_id(batch_id)
    work = partial(_open, run, batch_id, timeout_ms)
    return write_in_time(store, run.transactional_id, work, wakes_readers=True, retry_timeout_ms=retry_timeout_ms)


def decide(
    store: Store,
    run: SinkRun,
    batch_id: int,
    writers: Collection[int],
    *,
    timeout_ms: int = TIMEOUT_MS_DEFAULT,
    retry_timeout_ms: int | None = None,
) -> bool:
    """Commit a batch: the records of these writers, and what it read; False if it was decided before, and is dropped.

    Records of all other writers of the run are aborted.  Safe to repeat after `OutcomeUnknown`.

    Raises:
        InvalidRequest, InvalidTransactionTimeout: an argument is not of the documented form.
        ProducerFenced: the run is superseded, a named writer is not in the open transaction any more or has not
            reported, or what the batch read is not what comes next.  Nothing was changed; a replay is right.
    """
    check_batch_id(batch_id)
    check_writer_ids(writers)
    work = partial(_decide, run, batch_id, frozenset(writers), timeout_ms)
    return write_in_time(store, run.transactional_id, work, wakes_readers=True, retry_timeout_ms=retry_timeout_ms)


def abort(store: Store, run: SinkRun, batch_id: int, *, retry_timeout_ms: int | None = None) -> bool:
    """Abort what is open of this very run, which is over then; return whether anything was open.

    Its tasks that still work are refused whatever they ask for.  What is decided stays decided, and a newer run is
    left alone.

    Raises:
        InvalidRequest: the batch id is not of the documented form.
    """
    check_batch_id(batch_id)
    return store.write(partial(_abort, run, batch_id), wakes_readers=True, retry_timeout_ms=retry_timeout_ms)


def last_batch(connection: Connection, sink_id: str) -> int | None:
    """Return the newest batch that is decided; None if there is none."""
    last: int | None = connection.execute(_LAST, {"of_sink_id": sink_id}).scalar_one()
    return last


def _open(run: SinkRun, batch_id: int, timeout_ms: int, connection: Connection) -> TransactionWriter | None:
    transaction = enter_run(connection, run, timeout_ms)
    if _is_decided(batch_id, last_batch(connection, run.sink_id), read_inputs(connection, run, batch_id)):
        return None
    transaction.begin(transaction.known.identity)
    transaction.save("sink writer")
    return enter_writer(connection, run.transactional_id, transaction.known.identity)


def _decide(run: SinkRun, batch_id: int, writers: frozenset[int], timeout_ms: int, connection: Connection) -> bool:
    transaction = enter_run(connection, run, timeout_ms)
    last = last_batch(connection, run.sink_id)
    noted = read_inputs(connection, run, batch_id)
    if _is_decided(batch_id, last, noted):
        if _abort_open(transaction, "sink replay"):
            save_identity(connection, run, transaction.known.identity)
        forget_inputs(connection, run, batch_id)
        return False
    _check_writers(run, batch_id, writers, transaction)
    offsets = _offsets_by_group(noted)
    identity = transaction.known.identity
    for group_id, group_offsets in offsets.items():
        transaction.send_offsets(identity, SentOffsets(GroupMembership(group_id), group_offsets))
    if transaction.known.state is TransactionState.ONGOING:
        transaction.end(identity, commit=True, writers=writers)
    transaction.save("sink decision")
    save_identity(connection, run, transaction.known.identity)
    commit_inputs(connection, run, batch_id, noted)
    _insert_batch(connection, run, batch_id, last)
    return True


def _abort(run: SinkRun, batch_id: int, connection: Connection) -> bool:
    transaction = end_run(connection, run)
    return transaction is not None and _abort_open(transaction, f"sink abort of batch {batch_id}")


def _abort_open(transaction: LockedTransaction, reason: str) -> bool:
    if transaction.known.state is not TransactionState.ONGOING:
        return False
    transaction.end(transaction.known.identity, commit=False)
    transaction.save(reason)
    return True


def _is_decided(batch_id: int, last: int | None, noted: NotedInput) -> bool:
    """Return whether the batch was decided before: by what it reads if that is known, else by its number."""
    if noted.novelty is Novelty.MIXED:
        raise ProducerFenced(
            f"batch {batch_id} reads again some of what earlier batches of its query have committed, and some that they"
            f" have not ({noted.example}); nothing was changed. Its checkpoint is older than the sink: begin a new one"
            " with startingOffsets=group"
        )
    if noted.novelty is Novelty.UNKNOWN:
        return last is not None and batch_id <= last
    return noted.novelty is Novelty.REPEATED


def _check_writers(run: SinkRun, batch_id: int, writers: Collection[int], transaction: LockedTransaction) -> None:
    has_reported = transaction.participants.has_reported
    missing = sorted(writer_id for writer_id in writers if not has_reported.get(writer_id, False))
    if missing:
        why = transaction.known.fence_detail or transaction.known.state.kafka_name
        raise ProducerFenced(
            f"{len(missing)} of {len(writers)} writers of batch {batch_id} are not in the open transaction of"
            f" {run.transactional_id[:80]!r} or have not reported, {missing[0]} for one ({why}); nothing was changed"
        )


def _offsets_by_group(noted: NotedInput) -> dict[str, dict[int, OffsetAndMetadata]]:
    by_group: dict[str, dict[int, OffsetAndMetadata]] = defaultdict(dict)
    for (group_id, partition_id), offset in noted.end_offsets.items():
        by_group[group_id][partition_id] = OffsetAndMetadata(offset)
    return by_group


def _insert_batch(connection: Connection, run: SinkRun, batch_id: int, last: int | None) -> None:
    batch = {"sink_id": run.sink_id, "batch_id": batch_id, "transactional_id": run.transactional_id}
    if last is not None and batch_id <= last:
        # The numbers of an older checkpoint come again with other input.
        connection.execute(_INSERT_AGAIN, batch)
        return
    # The lock of the transactional id keeps other runs away, but not one of the same query under another name.
    if connection.execute(_INSERT_NEW, batch).one_or_none() is None:
        raise ProducerFenced(
            f"batch {batch_id} was decided this moment under another transactional id; nothing was changed"
        )
    connection.execute(_TRIM, {"of_sink_id": run.sink_id, "through_batch_id": batch_id - BATCHES_KEPT})
