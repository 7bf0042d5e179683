"""The coordination of a sink that many tasks write to: each batch of a query becomes visible once.

Each attempt of a task opens a writer of its own and appends its records, in short database transactions.  The driver
then decides the batch, once: the records of the writers that it names, the row in `sink_batches` and the offsets of
what the batch read are one database transaction, so all of it is there or nothing, whatever dies when.

- A batch that is decided already, by this run or another one, is dropped: its writers write nothing.  Where no group
  says how far the query has read its number says so, of the last one, if that has read the same, as far as it is
  known: anything else is of an older checkpoint, and is refused.  An older checkpoint that comes to something new takes
  the numbers after it along: those will come again, some of them for batches that read nothing.
- Failed, retried and speculative attempts leave writers that nobody names; the decision aborts their records.
- Each run of a query has an id of its own, which its tasks and its driver know.  A run that was not seen before is the
  newest: its first request raises the epoch of the transactional id, which aborts what a dead run left open and fences
  it if it is not dead.  A run that is known and not the newest is superseded, and may do nothing any more.
- A run that its driver has aborted is over, also if it had not done anything yet: Spark ends a job while tasks of it
  still work, and one of them that came later would leave a transaction that nobody decides.
- Only the tasks know which batch they are of, so each notes its range before it reads (see `sink_inputs`); the whole
  range of the batch is what its decision commits for the group.  The decision also keeps, for each partition, how far
  the query's committed batches have read.  By that a batch is recognised whatever its number: one whose input lies
  below is a replay, one whose input lies at or past it is new.  A query that was not told offsets or times to
  begin at is refused what its group has passed without its own batches: whether that is written nobody says.
- A batch before which others are missing, and that begins past what they have left, is refused: the store was
  restored, and the checkpoint is ahead of it.
- In commit order all of that is in places (see `log.commit_order`).  A batch ends between transactions, so its group
  stands at the beginning of what is at a place.
- A version of an application that is not newer than the last one is dropped, too.  Within a streaming query only if
  that very query has written it: with a new checkpoint Spark begins to number anew.
- A dead run holds readers up until the next run comes, or its transaction's timeout is over.

Nothing here needs pyspark: any process may decide, abort or read what was decided.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from txnstore.db.cluster.catalogue import read_store_settings
from txnstore.db.schema import sink_batches, sink_runs
from txnstore.db.store import Store, must_hit, server_now_ms
from txnstore.errors import ProducerFenced
from txnstore.groups.offsets import read_offsets
from txnstore.model import NO_PRODUCER, ClientProcess, GroupMembership, OffsetAndMetadata, ProducerIdentity
from txnstore.spark.sink_inputs import (
    NO_GROUP,
    InputRange,
    NotedInput,
    Novelty,
    commit_inputs,
    forget_inputs,
    has_positions,
    read_input_of_last,
    read_inputs,
)
from txnstore.spark.sink_run import SinkRun, check_batch_id, check_number
from txnstore.transactions.coordinator import initialize, lock_or_insert
from txnstore.transactions.initialization import InitRequest
from txnstore.transactions.protocol import (
    FenceReason,
    TransactionMetadata,
    TransactionState,
    TransactionWriter,
)
from txnstore.transactions.sinks import lock_sink
from txnstore.transactions.transaction import LockedTransaction, SentOffsets, write_in_time
from txnstore.transactions.writers import enter_writer

_log = logging.getLogger(__name__)
#: So many runs of a transactional id are remembered.
RUNS_REMEMBERED: Final = 100
#: What people find who ask which client a transaction belongs to.
_CLIENT_ID: Final = "txnstore-spark"
_SUPERSEDED: Final = "is superseded by a newer run"
_RUNS_OF_ID: Final = sink_runs.c.transactional_id == bindparam("of_transactional_id")
_THIS_RUN: Final = _RUNS_OF_ID & (sink_runs.c.run_id == bindparam("of_run_id"))
# Read under the lock of the coordinator's row, which every request of a run takes first.  One that is over is not
# counted: it may never have begun, and then has superseded nobody.
_NEWEST_RUN: Final = (
    select(sink_runs)
    .where(_RUNS_OF_ID, sink_runs.c.producer_id != NO_PRODUCER.producer_id)
    .order_by(sink_runs.c.run_number.desc())
    .limit(1)
)
_LAST_NUMBER: Final = select(func.coalesce(func.max(sink_runs.c.run_number), 0)).where(_RUNS_OF_ID)
_PRODUCER_ID: Final = select(sink_runs.c.producer_id).where(_THIS_RUN)
_INSERT_RUN: Final = insert(sink_runs).values(begin_ms=server_now_ms())
_MOVE_RUN: Final = (
    update(sink_runs)
    .where(_THIS_RUN)
    .values(producer_id=bindparam("new_producer_id"), producer_epoch=bindparam("new_epoch"))
)
_TRIM_RUNS: Final = delete(sink_runs).where(_RUNS_OF_ID, sink_runs.c.run_number <= bindparam("through_number"))
#: How long a batch may stay open; transaction.max.timeout.ms of the store has the same default.
TIMEOUT_MS_DEFAULT: Final = 900_000
#: So many decided batches of a query are kept for people; a replay is recognised by the newest one.
BATCHES_KEPT: Final = 100
_LONGER: Final = (
    "A batch, and a whole batch write, may be open for transaction.timeout.ms; for one that takes longer raise the"
    " store's transaction.max.timeout.ms first"
)
_OF_SINK: Final = sink_batches.c.sink_id == bindparam("of_sink_id")
_LAST: Final = select(func.max(sink_batches.c.batch_id)).where(_OF_SINK)
_DECIDED_AS: Final = select(sink_batches.c.transactional_id).where(
    _OF_SINK, sink_batches.c.batch_id == bindparam("of_batch_id")
)
# Who repeats a version is not silent: that the query wrote it is kept for as long as that it was written at all.
_RENEW: Final = (
    update(sink_batches)
    .where(_OF_SINK, sink_batches.c.batch_id == bindparam("of_batch_id"))
    .values(commit_ms=server_now_ms())
)
_LAST_DECISION: Final = (
    select(sink_batches.c.batch_id, sink_batches.c.transactional_id, sink_batches.c.commit_ms)
    .where(_OF_SINK)
    .order_by(sink_batches.c.batch_id.desc())
    .limit(1)
)
_INSERT_BATCH: Final = upsert(sink_batches).values(commit_ms=server_now_ms())
_INSERT_NEW: Final = _INSERT_BATCH.on_conflict_do_nothing(index_elements=["sink_id", "batch_id"]).returning(
    sink_batches.c.batch_id
)
_INSERT_AGAIN: Final = _INSERT_BATCH.on_conflict_do_update(
    index_elements=["sink_id", "batch_id"],
    set_={"transactional_id": _INSERT_BATCH.excluded.transactional_id, "commit_ms": _INSERT_BATCH.excluded.commit_ms},
)
_FORGET_LATER: Final = delete(sink_batches).where(_OF_SINK, sink_batches.c.batch_id > bindparam("behind_batch_id"))
_TRIM_BATCHES: Final = delete(sink_batches).where(_OF_SINK, sink_batches.c.batch_id <= bindparam("through_batch_id"))


def enter_run(connection: Connection, run: SinkRun, timeout_ms: int | None) -> LockedTransaction:
    """Lock the transactional id of a run, which becomes the newest one if it was not seen before.

    `timeout_ms`: how long a batch may stay open; None: TIMEOUT_MS_DEFAULT, or less where the store allows no more.

    Raises:
        ProducerFenced: a newer run, or another producer, has taken over, or the run is over.
        InvalidTransactionTimeout: the timeout is not one that this store allows.
    """
    request = _request(connection, run, timeout_ms)
    # The row is there and locked before the runs are read: of two tasks that are the first ones of a run, the second
    # waits here and then finds what the first one has entered.
    transaction = lock_or_insert(connection, request)
    newest = _newest_run(connection, run.transactional_id)
    if newest is not None and newest.run_id == run.run_id:
        return _entered_again(connection, run, transaction, newest, request)
    known_as = connection.execute(_PRODUCER_ID, _of_run(run)).scalar_one_or_none()
    if known_as is not None:
        why = "is over: its driver has aborted it" if known_as == NO_PRODUCER.producer_id else _SUPERSEDED
        raise ProducerFenced(f"run {run.run_id[:80]!r} of {run.transactional_id[:80]!r} {why}; nothing was changed")
    _insert_run(connection, run, initialize(connection, request).identity)
    return LockedTransaction.lock(connection, run.transactional_id)


def end_run(connection: Connection, run: SinkRun) -> LockedTransaction | None:
    """Let a run be over: none of its tasks begins anything from now on.

    Returns its transactional id, locked, if there may be something open of it; None if there is not, if a newer run
    has taken over, or another producer.
    """
    # A run that nobody has seen is entered, so that tasks of it that come later find it over.
    transaction = lock_or_insert(connection, _request(connection, run))
    newest = _newest_run(connection, run.transactional_id)
    if newest is not None and newest.run_id == run.run_id:
        save_identity(connection, run, NO_PRODUCER)
        return transaction if transaction.known.identity == _identity_of(newest) else None
    if connection.execute(_PRODUCER_ID, _of_run(run)).scalar_one_or_none() is None:
        _insert_run(connection, run, NO_PRODUCER)
    return None


def save_identity(connection: Connection, run: SinkRun, identity: ProducerIdentity) -> None:
    """Take note of who begins the run's next transaction; nobody, once the run is over."""
    new = {"new_producer_id": identity.producer_id, "new_epoch": identity.epoch}
    must_hit(connection, _MOVE_RUN, {**_of_run(run), **new})


def _entered_again(
    connection: Connection, run: SinkRun, transaction: LockedTransaction, newest: Row[Any], request: InitRequest
) -> LockedTransaction:
    row, expected = transaction.known, _identity_of(newest)
    if row.identity == expected:
        return transaction
    if row.producer_epoch < 0:
        # Its transactional id has expired meanwhile, and was just created again.
        save_identity(connection, run, initialize(connection, request).identity)
        return LockedTransaction.lock(connection, run.transactional_id)
    if not _was_aborted_from_outside(row, expected):
        raise ProducerFenced(
            f"another producer uses the transactional id {run.transactional_id[:80]!r}: it is {row.identity} now, not"
            f" {expected}; nothing was changed"
        )
    # Nobody has taken the run's place: it may begin again.
    save_identity(connection, run, row.identity)
    return transaction


def _was_aborted_from_outside(row: TransactionMetadata, expected: ProducerIdentity) -> bool:
    return row.fence_reason in (FenceReason.TIMEOUT, FenceReason.ADMIN) and row.is_repetition(expected)


def _request(connection: Connection, run: SinkRun, timeout_ms: int | None = None) -> InitRequest:
    longest_ms: int = read_store_settings(connection)["transaction.max.timeout.ms"]
    return InitRequest(
        run.transactional_id,
        min(TIMEOUT_MS_DEFAULT, longest_ms) if timeout_ms is None else timeout_ms,
        longest_ms,
        client=ClientProcess.here(_CLIENT_ID),
    )


def _insert_run(connection: Connection, run: SinkRun, identity: ProducerIdentity) -> None:
    # A client that finds the sink silent, and forgets it, comes before or after.
    lock_sink(connection, run.sink_id)
    number = 1 + int(connection.execute(_LAST_NUMBER, {"of_transactional_id": run.transactional_id}).scalar_one())
    connection.execute(
        _INSERT_RUN,
        {
            "transactional_id": run.transactional_id,
            "run_number": number,
            "run_id": run.run_id,
            "sink_id": run.sink_id,
            "producer_id": identity.producer_id,
            "producer_epoch": identity.epoch,
        },
    )
    through = {"of_transactional_id": run.transactional_id, "through_number": number - RUNS_REMEMBERED}
    connection.execute(_TRIM_RUNS, through)


def _newest_run(connection: Connection, transactional_id: str) -> Row[Any] | None:
    return connection.execute(_NEWEST_RUN, {"of_transactional_id": transactional_id}).one_or_none()


def _identity_of(run: Row[Any]) -> ProducerIdentity:
    return ProducerIdentity(run.producer_id, run.producer_epoch)


def _of_run(run: SinkRun) -> dict[str, str]:
    return {"of_transactional_id": run.transactional_id, "of_run_id": run.run_id}


def check_writer_ids(writer_ids: Collection[object]) -> None:
    """Refuse what is not a producer id.

    Raises:
        InvalidRequest: one is not a whole number from 0 to 2**63 - 1.
    """
    for writer_id in writer_ids:
        check_number(writer_id, "a writer id")


def open_writer(
    store: Store,
    run: SinkRun,
    batch_id: int,
    *,
    timeout_ms: int | None = None,
    retry_timeout_ms: int | None = None,
) -> TransactionWriter | None:
    """Return a writer for one attempt of a task; None if the batch is decided already and nothing is to be written.

    The first request of a run aborts what runs before it have left open, and fences them.  After `OutcomeUnknown`
    open another one: nobody will name the one that was lost.

    Raises:
        InvalidRequest, InvalidTransactionTimeout: an argument is not of the documented form.
        ProducerFenced: the run is superseded, or the batch is not the one that comes next; or it is an application's
            version that another query has written, or may have.
    """
    check_batch_id(batch_id)
    work = partial(_open, run, batch_id, timeout_ms)
    return write_in_time(store, None, run.transactional_id, work, wakes_readers=True, retry_timeout_ms=retry_timeout_ms)


def decide(
    store: Store,
    run: SinkRun,
    batch_id: int,
    writers: Collection[int],
    *,
    is_left_out: bool = False,
    timeout_ms: int | None = None,
    retry_timeout_ms: int | None = None,
) -> bool:
    """Commit a batch: the records of these writers, and what it read; False if it was decided before, and is dropped.

    Records of all other writers of the run are aborted.  `is_left_out`: a task was told that the batch is decided.
    Safe to repeat after `OutcomeUnknown`.

    Raises:
        InvalidRequest, InvalidTransactionTimeout: an argument is not of the documented form.
        InvalidRequest: what the batch read is in another order of delivery than what the group has committed, or than
            the query has read before.  Nothing was changed.
        ProducerFenced: the run is superseded, a named writer is not in the open transaction any more or has not
            reported, or what the batch read is not what comes next.  Nothing was changed; a replay is right.
        ProducerFenced: it is an application's version that another query has written, or may have.
    """
    check_batch_id(batch_id)
    check_writer_ids(writers)
    work = partial(_decide, run, batch_id, frozenset(writers), timeout_ms, is_left_out=is_left_out)
    return write_in_time(store, None, run.transactional_id, work, wakes_readers=True, retry_timeout_ms=retry_timeout_ms)


def abort(store: Store, run: SinkRun, batch_id: int, *, retry_timeout_ms: int | None = None) -> bool:
    """Abort what is open of this very run, which is over then; return whether anything was open.

    Its tasks that still work are refused whatever they ask for.  What is decided stays decided, and a newer run is
    left alone.

    Raises:
        InvalidRequest: the batch id is not of the documented form.
    """
    check_batch_id(batch_id)
    return store.write(partial(_abort, run, batch_id), wakes_readers=True, retry_timeout_ms=retry_timeout_ms)


class Decision(NamedTuple):
    """A batch that is decided."""

    batch_id: int
    transactional_id: str
    commit_ms: int


def last_decision(connection: Connection, sink_id: str) -> Decision | None:
    """Return the decision of the newest batch; None before the first one."""
    row = connection.execute(_LAST_DECISION, {"of_sink_id": sink_id}).one_or_none()
    return None if row is None else Decision(*row)


def last_batch(connection: Connection, sink_id: str) -> int | None:
    """Return the newest batch that is decided; None before the first one."""
    last: int | None = connection.execute(_LAST, {"of_sink_id": sink_id}).scalar_one()
    return last


def _open(run: SinkRun, batch_id: int, timeout_ms: int | None, connection: Connection) -> TransactionWriter | None:
    transaction = enter_run(connection, run, timeout_ms)
    last = last_batch(connection, run.sink_id)
    noted = read_inputs(connection, run, batch_id, last)
    if _is_decided(connection, run, batch_id, last, noted):
        return None
    transaction.begin(transaction.known.identity)
    transaction.save("sink writer")
    return enter_writer(connection, run.transactional_id, transaction.known.identity, ClientProcess.here(_CLIENT_ID))


def _decide(
    run: SinkRun,
    batch_id: int,
    writers: frozenset[int],
    timeout_ms: int | None,
    connection: Connection,
    *,
    is_left_out: bool,
) -> bool:
    transaction = enter_run(connection, run, timeout_ms)
    last = last_batch(connection, run.sink_id)
    noted = read_inputs(connection, run, batch_id, last)
    if _is_decided(connection, run, batch_id, last, noted, at_decision=transaction.known.state):
        if _abort_open(transaction, "sink replay"):
            save_identity(connection, run, transaction.known.identity)
        # The answer may be lost, and the batch is then compared once more.
        forget_inputs(connection, run, batch_id, keeps_own=True)
        return False
    if is_left_out:
        raise ProducerFenced(
            f"a task of batch {batch_id} wrote nothing because the batch looked committed already, but other tasks read"
            " new data. Nothing was changed"
        )
    _check_follows(connection, batch_id, last, noted)
    _check_writers(run, batch_id, writers, transaction)
    offsets = _offsets_by_group(noted)
    identity = transaction.known.identity
    for group_id, group_offsets in offsets.items():
        transaction.send_offsets(identity, SentOffsets(GroupMembership(group_id), group_offsets))
    if transaction.known.state is not TransactionState.ONGOING:
        # Nobody has written anything. Its end says all the same that the decision was this run's (`_is_decided`).
        transaction.begin(identity)
    transaction.end(identity, commit=True, writers=writers)
    transaction.save("sink decision")
    save_identity(connection, run, transaction.known.identity)
    _insert_batch(connection, run, batch_id, last)
    commit_inputs(connection, run, batch_id, noted)
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


def _is_decided(
    connection: Connection,
    run: SinkRun,
    batch_id: int,
    last: int | None,
    noted: NotedInput,
    *,
    at_decision: TransactionState | None = None,
) -> bool:
    """Return whether the batch was decided before: by what it reads if that is known, else by its number.

    `at_decision`, when all tasks of the batch have read, is the state of the transaction; before that, what is noted is
    not complete, and the decision has the last word.
    """
    if noted.novelty is Novelty.MIXED:
        raise ProducerFenced(
            f"batch {batch_id} reads again part of what earlier batches of its query have committed, together with data"
            f" that they have not ({noted.example}); nothing was changed. Its checkpoint is older than the sink:"
            " begin a new one with startingOffsets=group"
        )
    if noted.novelty is not Novelty.UNKNOWN and not noted.unplaced:
        return noted.novelty is Novelty.REPEATED
    if run.query_sink_id is not None:
        return _is_written_by_query(connection, run, run.query_sink_id, batch_id, last)
    if last is None or batch_id > last:
        if noted.novelty is Novelty.REPEATED:
            raise _older_checkpoint(batch_id, "is committed as to one reader's part, and perhaps as to the others'")
        return False
    if batch_id < last:
        if noted.unplaced or (run.is_of_query and not has_positions(connection, run)):
            raise _older_checkpoint(batch_id, f"is committed, and so are those up to {last}")
        return True
    if at_decision is None or _may_be_last(noted, read_input_of_last(connection, run, batch_id)):
        return True
    # A run begins with an empty transaction: if one is committed, that was this run's own last decision, of which the
    # answer was lost.  What it had noted was forgotten with that.
    if at_decision is TransactionState.COMPLETE_COMMIT and _was_decided_as(connection, run, batch_id):
        return True
    raise _older_checkpoint(batch_id, "is committed, but read something else then")


def _check_follows(connection: Connection, batch_id: int, last: int | None, noted: NotedInput) -> None:
    """Refuse a batch before which others are missing: what they read is not in this store, and does not come again.

    A store that was restored is behind the checkpoint, and its log may have grown past that since.  Spark counts one by
    one; but numbers that were dropped as replays are missing, too, and batches whose tasks Spark has left out, because
    nothing could come of them, have not moved the positions.  All tasks have to have noted what they read.
    """
    if batch_id <= (-1 if last is None else last) + 1 or not noted.skips:
        return
    if last is None:
        which = "is the first one that this store knows, and those before it are missing"
    else:
        which = f"comes after batch {last} in this store, and those between are missing"
    what = (
        f"batch {batch_id} of the query {which}: the database was restored to an earlier state, or another sink has"
        " written them"
    )
    # Without a group nothing tells a store from before the first batch from one that has forgotten the query.
    if noted.fails_on_loss and (last is not None or _is_past_groups(connection, noted)):
        raise ProducerFenced(
            f"{what}. What they read would be left out; nothing was changed. Begin a new checkpoint, with"
            " startingOffsets=group where the source has had a group, or set failOnDataLoss=false on it to go on"
        )
    _log.warning("%s; the query goes on without what they read", what, extra={"event": "sink_batches_missing"})


def _is_past_groups(connection: Connection, noted: NotedInput) -> bool:
    """Return whether the batch begins past what one of its groups has committed."""
    by_group: dict[str, dict[int, int]] = defaultdict(dict)
    for (group_id, partition_id), begin in noted.begins.items():
        by_group[group_id][partition_id] = begin
    for group_id, begins in by_group.items():
        committed = read_offsets(connection, group_id, begins).offsets
        for partition_id, begin in begins.items():
            if begin > (committed[partition_id].offset if partition_id in committed else 0):
                return True
    return False


def _is_written_by_query(
    connection: Connection, run: SinkRun, query_sink_id: str, version: int, last: int | None
) -> bool:
    """Return whether the query has written this version of an application; what it has not is to be newer than all."""
    if last is None or version > last:
        return False
    of_version = {"of_sink_id": query_sink_id, "of_batch_id": version}
    if connection.execute(_RENEW, of_version).rowcount == 0:
        raise ProducerFenced(
            f"version {version} of {run.sink_id[:80]!r} is not newer than {last}, the last one that was written, and"
            f" whether this query wrote it is not known (the last {BATCHES_KEPT} numbers are remembered); nothing was"
            " changed. With a new checkpoint Spark numbers batches from 0 again, so this may well be new: give each new"
            " checkpoint, and each query, a txnAppId of its own. With an older copy of the checkpoint, or where this"
            " version was written by hand, do not change txnAppId: what was written would be written again. A version"
            " written by hand is skipped by hand, in the function of foreachBatch"
        )
    return True


def _was_decided_as(connection: Connection, run: SinkRun, batch_id: int) -> bool:
    """Return whether the batch was decided under the run's transactional id."""
    of_batch = {"of_sink_id": run.sink_id, "of_batch_id": batch_id}
    return connection.execute(_DECIDED_AS, of_batch).scalar_one_or_none() == run.transactional_id


def _may_be_last(noted: NotedInput, last: Sequence[tuple[str, InputRange]]) -> bool:
    """Return whether a batch with the number of the last one may be that very batch, by what both read."""
    if not (noted.unplaced or any(group_id == NO_GROUP for group_id, _ in last)):
        return True
    if last:
        return sorted(each for _, each in noted.ranges) == sorted(each for _, each in last)
    # A reader without a group cannot always say what it reads.
    return noted.unplaced == {NO_GROUP} and noted.novelty is not Novelty.NEW


def _older_checkpoint(batch_id: int, what: str) -> ProducerFenced:
    return ProducerFenced(
        f"batch {batch_id} of the query {what}; nothing was changed. Spark repeats the last one alone, as it was, so"
        " the query's checkpoint is older than what it has written, and what it reads now may be new: begin with a"
        " checkpointLocation of its own and startingOffsets. Where txnstore's source has had the same kafka.group.id"
        " from the first batch on, the sink sees itself what is new"
    )


def _check_writers(run: SinkRun, batch_id: int, writers: frozenset[int], transaction: LockedTransaction) -> None:
    has_reported = transaction.participants.has_reported
    missing = sorted(writer_id for writer_id in writers if not has_reported.get(writer_id, False))
    if missing:
        why = transaction.known.fence_detail or transaction.known.state.kafka_name
        if transaction.known.state is TransactionState.ONGOING and not writers <= has_reported.keys():
            why = f"theirs was aborted before it began; did the batch take too long? {_LONGER}"
        elif transaction.known.fence_reason is FenceReason.TIMEOUT:
            why = f"{why}. {_LONGER}"
        raise ProducerFenced(
            f"{len(missing)} of {len(writers)} writers of batch {batch_id} are not in the open transaction of"
            f" {run.transactional_id[:80]!r} or have not reported, {missing[0]} for example ({why}); nothing was"
            " changed"
        )


def _offsets_by_group(noted: NotedInput) -> dict[str, dict[int, OffsetAndMetadata]]:
    by_group: dict[str, dict[int, OffsetAndMetadata]] = defaultdict(dict)
    for (group_id, partition_id), end in noted.ends.items():
        by_group[group_id][partition_id] = end
    return by_group


def _insert_batch(connection: Connection, run: SinkRun, batch_id: int, last: int | None) -> None:
    batch = {"sink_id": run.sink_id, "batch_id": batch_id, "transactional_id": run.transactional_id}
    if last is not None and batch_id <= last:
        # The numbers of an older checkpoint come again with other input, and so will those after this one: some for
        # batches that read nothing and write what the query has kept, of which only the number says that they are new.
        connection.execute(_INSERT_AGAIN, batch)
        connection.execute(_FORGET_LATER, {"of_sink_id": run.sink_id, "behind_batch_id": batch_id})
        return
    # The lock of the transactional id keeps other runs away, but not one of the same query under another name.
    if connection.execute(_INSERT_NEW, batch).one_or_none() is None:
        raise ProducerFenced(
            f"batch {batch_id} has just been decided under another transactional id; nothing was changed"
        )
    sink_ids = [run.sink_id]
    if run.query_sink_id is not None:
        sink_ids.append(run.query_sink_id)
        connection.execute(_INSERT_AGAIN, {**batch, "sink_id": run.query_sink_id})
    for sink_id in sink_ids:
        connection.execute(_TRIM_BATCHES, {"of_sink_id": sink_id, "through_batch_id": batch_id - BATCHES_KEPT})
