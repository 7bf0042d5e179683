"""The coordination of a sink that many tasks write to: each batch of a query becomes visible once.

Each attempt of a task opens a writer of its own and appends its records, in short database transactions.  The driver
then decides the batch, once: the records of the writers that it names, the row in `sink_batches` and the offsets of
what the batch read are one database transaction, so all of it is there or nothing, whoever dies when.

- A batch that is decided already, by this run or another one, is dropped: its writers write nothing.
- Failed, retried and speculative attempts leave writers that nobody names; the decision aborts their records.
- Each run of a query has an id of its own, which its tasks and its driver know.  A run that was not seen before is the
  newest: its first request raises the epoch of the transactional id, which aborts what a dead run left open and fences
  it if it is not dead.  A run that is known and not the newest is superseded, and may do nothing any more.
- A run that its driver has aborted is over, also if it had not done anything yet: Spark ends a job while tasks of it
  still work, and one of them that came later would leave a transaction that nobody decides.
- Only the tasks know which batch they are of, so each notes its range before it reads; the whole range of the batch is
  what its decision commits for the group.  The decision also keeps, for each partition, how far the query's committed
  batches have read.  By that a batch is recognised whatever its number: one whose input lies below is a replay, one
  whose input lies at or past it is new.
- In commit order all of that is in places (see `log.commit_order`).  A batch ends between transactions, so its group
  stands at the beginning of what is at a place.
- A dead run holds readers up until the next run comes, or its transaction's timeout is over.

Nothing here needs pyspark: any process may decide, abort or read what was decided.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, Row, and_, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from txnstore.db.cluster.catalogue import read_store_settings
from txnstore.db.schema import sink_batches, sink_inputs, sink_positions, sink_runs
from txnstore.db.store import Store, must_hit, server_now_ms
from txnstore.errors import InvalidRequest, ProducerFenced
from txnstore.groups.commit_rules import check_group_id
from txnstore.model import (
    NAME_BYTES_MAX,
    NO_PRODUCER,
    OFFSET_MAX,
    ClientProcess,
    GroupMembership,
    OffsetAndMetadata,
    ProducerIdentity,
    is_storable_text,
)
from txnstore.transactions.coordinator import check_transactional_id, initialize, lock_or_insert
from txnstore.transactions.initialization import InitRequest
from txnstore.transactions.protocol import (
    FenceReason,
    TransactionMetadata,
    TransactionState,
    TransactionWriter,
)
from txnstore.transactions.recovery import SINK_OF_JOB
from txnstore.transactions.sinks import lock_sink
from txnstore.transactions.transaction import LockedTransaction, SentOffsets, write_in_time
from txnstore.transactions.writers import enter_writer

#: So many runs of a transactional id are remembered.
RUNS_REMEMBERED: Final = 100
#: A run's id stands in one entry of an index with a query's and a group's, each of up to NAME_BYTES_MAX.
RUN_ID_BYTES_MAX: Final = 200
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
_INPUTS_OF_BATCH: Final = and_(
    sink_inputs.c.sink_id == bindparam("of_sink_id"),
    sink_inputs.c.run_id == bindparam("of_run_id"),
    sink_inputs.c.batch_id == bindparam("of_batch_id"),
)
_INSERT_INPUT: Final = upsert(sink_inputs).values(noted_ms=server_now_ms())
_NOTE: Final = _INSERT_INPUT.on_conflict_do_update(
    index_elements=[column.name for column in sink_inputs.primary_key],
    set_={"end_offset": _INSERT_INPUT.excluded.end_offset, "noted_ms": _INSERT_INPUT.excluded.noted_ms},
)
_READ_INPUTS: Final = (
    select(
        sink_inputs.c.group_id,
        sink_inputs.c.partition_id,
        sink_inputs.c.in_commit_order,
        sink_inputs.c.start_offset,
        sink_inputs.c.end_offset,
        sink_positions.c.in_commit_order.label("was_in_commit_order"),
        sink_positions.c.next_offset,
    )
    .outerjoin(
        sink_positions,
        and_(
            sink_positions.c.sink_id == sink_inputs.c.sink_id,
            sink_positions.c.group_id == sink_inputs.c.group_id,
            sink_positions.c.partition_id == sink_inputs.c.partition_id,
        ),
    )
    .where(_INPUTS_OF_BATCH)
    .order_by(sink_inputs.c.group_id, sink_inputs.c.partition_id, sink_inputs.c.start_offset)
)
# What runs before this one have noted, and what this one is done with.
_TRIM_INPUTS: Final = delete(sink_inputs).where(
    sink_inputs.c.sink_id == bindparam("of_sink_id"),
    or_(sink_inputs.c.run_id != bindparam("of_run_id"), sink_inputs.c.batch_id <= bindparam("of_batch_id")),
)
_KEY_OF_EARLIER: Final = ("sink_id", "run_id", "batch_id", "group_id", "partition_id")
# A run comes to its next batch only once the one before is over.
_FORGET_EARLIER: Final = delete(sink_inputs).where(
    sink_inputs.c.sink_id == bindparam("of_sink_id"),
    sink_inputs.c.run_id == bindparam("of_run_id"),
    sink_inputs.c.batch_id < bindparam("of_batch_id"),
    sink_inputs.c.group_id == bindparam("of_group_id"),
    sink_inputs.c.partition_id == bindparam("of_partition_id"),
)
_INSERT_POSITION: Final = upsert(sink_positions)
_MOVE_POSITION: Final = _INSERT_POSITION.on_conflict_do_update(
    index_elements=[column.name for column in sink_positions.primary_key],
    set_={"next_offset": _INSERT_POSITION.excluded.next_offset},
)
#: How long a batch may stay open; transaction.max.timeout.ms of the store has the same default.
TIMEOUT_MS_DEFAULT: Final = 900_000
#: So many decided batches of a query are kept for people; a replay is recognised by the newest one.
BATCHES_KEPT: Final = 100
_OF_SINK: Final = sink_batches.c.sink_id == bindparam("of_sink_id")
_LAST: Final = select(func.max(sink_batches.c.batch_id)).where(_OF_SINK)
_INSERT_BATCH: Final = upsert(sink_batches).values(commit_ms=server_now_ms())
_INSERT_NEW: Final = _INSERT_BATCH.on_conflict_do_nothing(index_elements=["sink_id", "batch_id"]).returning(
    sink_batches.c.batch_id
)
_INSERT_AGAIN: Final = _INSERT_BATCH.on_conflict_do_update(
    index_elements=["sink_id", "batch_id"],
    set_={"transactional_id": _INSERT_BATCH.excluded.transactional_id, "commit_ms": _INSERT_BATCH.excluded.commit_ms},
)
_TRIM_BATCHES: Final = delete(sink_batches).where(_OF_SINK, sink_batches.c.batch_id <= bindparam("through_batch_id"))


@dataclass(frozen=True, slots=True)
class SinkRun:
    """One run of a query, or one job, that writes; it can be pickled and holds no credentials."""

    transactional_id: str
    """What it writes under; runs of one transactional id fence each other."""

    sink_id: str
    """What its batches are remembered under, whatever the transactional id."""

    run_id: str

    def __post_init__(self) -> None:
        """Refuse what cannot be stored.

        Raises:
            InvalidRequest: a name is not text, is empty or too long, or has characters that no database keeps.
        """
        check_transactional_id(self.transactional_id)
        check_names(self.sink_id, self.run_id)


def check_names(sink_or_query_id: object, run_id: object) -> None:
    """Refuse what is not the id of a query or a run.

    Raises:
        InvalidRequest: a name is not text, is empty or too long, or has characters that no database keeps.
    """
    for what, name, bytes_max in (
        ("query", sink_or_query_id, NAME_BYTES_MAX),
        ("run", run_id, RUN_ID_BYTES_MAX),
    ):
        if not isinstance(name, str) or not is_storable_text(name) or not 0 < len(name.encode()) <= bytes_max:
            raise InvalidRequest(f"the id of a {what} is text of 1 to {bytes_max} bytes of UTF-8")


def run_of_query(query_id: str, run_id: str, transactional_id: str | None = None) -> SinkRun:
    """Return a run of a streaming query; `query_id` and `run_id` are Spark's, `transactional_id` the user's own name.

    Another query id under the same transactional id is a new query, which begins at any batch id.
    """
    return SinkRun(transactional_id or f"spark-query-{query_id}", sink_id_of_query(query_id), run_id)


def run_of_job(job_id: str, *, app_id: str | None = None, transactional_id: str | None = None) -> SinkRun:
    """Return a batch write; with an `app_id` its batch id is the application's version of the data."""
    if app_id is None:
        return SinkRun(transactional_id or f"spark-job-{job_id}", f"{SINK_OF_JOB}{job_id}", job_id)
    return SinkRun(transactional_id or f"spark-app-{app_id}", f"app:{app_id}", job_id)


def sink_id_of_query(query_id: str) -> str:
    """Return what the batches of a streaming query are remembered under."""
    return f"query:{query_id}"


def enter_run(connection: Connection, run: SinkRun, timeout_ms: int) -> LockedTransaction:
    """Lock the transactional id of a run, which becomes the newest one if it was not seen before.

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
        # Its transactional id has expired meanwhile, and was made anew just now.
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
        longest_ms if timeout_ms is None else timeout_ms,
        longest_ms,
        client=ClientProcess.here(_CLIENT_ID),
    )


def _insert_run(connection: Connection, run: SinkRun, identity: ProducerIdentity) -> None:
    # Whoever finds the sink silent, and forgets it, comes before or after.
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


@dataclass(frozen=True, slots=True)
class SinkInput:
    """A range of a partition that a batch reads; a batch may read several ranges of one partition."""

    query_id: str
    run_id: str
    batch_id: int
    group_id: str
    """The consumer group that the query reads as; two readers in one query have groups of their own."""

    partition_id: int
    start_offset: int
    end_offset: int
    """The offset behind the range: what the group commits."""

    in_commit_order: bool = False
    """Whether these are places; the group commits that it stands before what is at the last one."""


class Novelty(enum.Enum):
    """What the ranges of a batch are to the batches that the query has committed."""

    UNKNOWN = "unknown"
    """Nothing was noted, or only empty ranges."""

    NEW = "new"
    """All of it lies at or past what they have read."""

    REPEATED = "repeated"
    """All of it lies below."""

    MIXED = "mixed"
    """Some of it they have read, and some of it not."""


@dataclass(frozen=True, slots=True)
class NotedInput:
    """The ranges of one batch."""

    novelty: Novelty
    ends: Mapping[tuple[str, int], OffsetAndMetadata]
    """By group and partition id: what to commit."""

    example: str = ""
    """Of what is mixed: one range, for people."""


def note_inputs(store: Store, inputs: Sequence[SinkInput], *, retry_timeout_ms: int | None = None) -> None:
    """Note what a task is about to read; its batch's decision commits it for the group.

    Safe to repeat.

    Raises:
        InvalidGroupId, InvalidRequest: an id or an offset is not of the documented form.
    """
    entries = [_input_entry(noted) for noted in inputs]

    def work(connection: Connection) -> None:
        connection.execute(_NOTE, entries)
        # Where the query writes elsewhere nobody decides its batches, and nobody else would forget them.
        connection.execute(
            _FORGET_EARLIER, [{f"of_{name}": entry[name] for name in _KEY_OF_EARLIER} for entry in entries]
        )

    if entries:
        store.write(work, retry_timeout_ms=retry_timeout_ms)


def read_inputs(connection: Connection, run: SinkRun, batch_id: int) -> NotedInput:
    """Return what the tasks of the run have noted for a batch.

    Raises:
        InvalidRequest: they have read a partition in both orders of delivery for one group, or earlier batches have
            read it in the other one.
    """
    ranges = connection.execute(_READ_INPUTS, _of_batch(run, batch_id)).all()
    ends: dict[tuple[str, int], OffsetAndMetadata] = {}
    kinds: set[Novelty] = set()
    example = ""
    for row in ranges:
        key = (row.group_id, row.partition_id)
        end = OffsetAndMetadata(row.end_offset, offset_in_transaction=0 if row.in_commit_order else None)
        before = ends.setdefault(key, end)
        _check_order(row, before)
        ends[key] = max(before, end, key=lambda each: each.offset)
        kind = _novelty(row)
        if kind is Novelty.UNKNOWN:
            continue
        kinds.add(kind)
        if kind is not Novelty.NEW:
            example = (
                f"partition id {row.partition_id}, offsets {row.start_offset} to {row.end_offset}, read up to"
                f" {row.next_offset}"
            )
    novelty = Novelty.UNKNOWN if not kinds else kinds.pop() if len(kinds) == 1 else Novelty.MIXED
    return NotedInput(novelty, ends, example)


def commit_inputs(connection: Connection, run: SinkRun, batch_id: int, noted: NotedInput) -> None:
    """Take note that a batch with this input is committed, and forget what nobody needs any more."""
    entries = [
        {
            "sink_id": run.sink_id,
            "group_id": group_id,
            "partition_id": partition_id,
            "in_commit_order": _is_place(end),
            "next_offset": end.offset,
        }
        for (group_id, partition_id), end in sorted(noted.ends.items(), key=lambda each: each[0])
    ]
    if entries:
        connection.execute(_MOVE_POSITION, entries)
    forget_inputs(connection, run, batch_id)


def forget_inputs(connection: Connection, run: SinkRun, batch_id: int) -> None:
    """Forget what was noted by runs before this one, and for batches that are decided."""
    connection.execute(_TRIM_INPUTS, _of_batch(run, batch_id))


def check_batch_id(batch_id: object) -> None:
    """Refuse what is not the number of a batch.

    Raises:
        InvalidRequest: it is not a whole number from 0 to 2**63 - 1.
    """
    _check_number(batch_id, "a batch id")


def check_writer_ids(writer_ids: Collection[object]) -> None:
    """Refuse what is not a producer id.

    Raises:
        InvalidRequest: one is not a whole number from 0 to 2**63 - 1.
    """
    for writer_id in writer_ids:
        _check_number(writer_id, "a writer id")


def _novelty(row: Any) -> Novelty:
    if row.start_offset == row.end_offset:
        return Novelty.UNKNOWN
    if row.next_offset is None or row.start_offset >= row.next_offset:
        return Novelty.NEW
    return Novelty.REPEATED if row.end_offset <= row.next_offset else Novelty.MIXED


def _check_order(row: Any, end: OffsetAndMetadata) -> None:
    # A place and an offset are not to be compared.
    if row.in_commit_order != _is_place(end) or row.was_in_commit_order not in (None, row.in_commit_order):
        raise InvalidRequest(
            f"the query has read partition id {row.partition_id} in both orders of delivery as group"
            f" {row.group_id[:80]!r}; nothing was changed. Each reader of a query has a kafka.group.id of its own, and"
            " a query that reads in another order than before begins with a checkpointLocation of its own"
        )


def _is_place(end: OffsetAndMetadata) -> bool:
    return end.offset_in_transaction is not None


def _input_entry(noted: SinkInput) -> dict[str, object]:
    check_group_id(noted.group_id)
    check_names(noted.query_id, noted.run_id)
    check_batch_id(noted.batch_id)
    for number in _offsets_of_input(noted):
        _check_number(number, "an offset")
    if noted.start_offset > noted.end_offset:
        raise InvalidRequest(f"a range of offsets begins at {noted.start_offset} and ends at {noted.end_offset}")
    return {
        "sink_id": sink_id_of_query(noted.query_id),
        "run_id": noted.run_id,
        "batch_id": noted.batch_id,
        "group_id": noted.group_id,
        "partition_id": noted.partition_id,
        "in_commit_order": noted.in_commit_order,
        "start_offset": noted.start_offset,
        "end_offset": noted.end_offset,
    }


def _offsets_of_input(noted: SinkInput) -> Iterable[object]:
    return (noted.start_offset, noted.end_offset)


def _check_number(number: object, what: str) -> None:
    if type(number) is not int or not 0 <= number <= OFFSET_MAX:
        raise InvalidRequest(f"{what} is a whole number from 0 to {OFFSET_MAX}, not {number!r:.40}")


def _of_batch(run: SinkRun, batch_id: int) -> dict[str, object]:
    return {"of_sink_id": run.sink_id, "of_run_id": run.run_id, "of_batch_id": batch_id}


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
    return write_in_time(store, None, run.transactional_id, work, wakes_readers=True, retry_timeout_ms=retry_timeout_ms)


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
        InvalidRequest: what the batch read is in another order of delivery than what the group has committed, or than
            the query has read before.  Nothing was changed.
        ProducerFenced: the run is superseded, a named writer is not in the open transaction any more or has not
            reported, or what the batch read is not what comes next.  Nothing was changed; a replay is right.
    """
    check_batch_id(batch_id)
    check_writer_ids(writers)
    work = partial(_decide, run, batch_id, frozenset(writers), timeout_ms)
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


def last_batch(connection: Connection, sink_id: str) -> int | None:
    """Return the newest batch that is decided; None before the first one."""
    last: int | None = connection.execute(_LAST, {"of_sink_id": sink_id}).scalar_one()
    return last


def _open(run: SinkRun, batch_id: int, timeout_ms: int, connection: Connection) -> TransactionWriter | None:
    transaction = enter_run(connection, run, timeout_ms)
    if _is_decided(batch_id, last_batch(connection, run.sink_id), read_inputs(connection, run, batch_id)):
        return None
    transaction.begin(transaction.known.identity)
    transaction.save("sink writer")
    return enter_writer(connection, run.transactional_id, transaction.known.identity, ClientProcess.here(_CLIENT_ID))


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
        # The numbers of an older checkpoint come again with other input.
        connection.execute(_INSERT_AGAIN, batch)
        return
    # The lock of the transactional id keeps other runs away, but not one of the same query under another name.
    if connection.execute(_INSERT_NEW, batch).one_or_none() is None:
        raise ProducerFenced(
            f"batch {batch_id} has just been decided under another transactional id; nothing was changed"
        )
    connection.execute(_TRIM_BATCHES, {"of_sink_id": run.sink_id, "through_batch_id": batch_id - BATCHES_KEPT})
