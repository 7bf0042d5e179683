"""This file is who writes for a query: its runs, of which the newest one fences those before it.

Each run of a query has an id of its own, which its tasks and its driver know.  A run that was not seen before is the
newest: its first request raises the epoch of the transactional id, which aborts what a dead run left open and fences
it if it is not dead.  A run that is known and not the newest is superseded, and may do nothing any more.

A run that its driver has aborted is over, also if it had not done anything yet: Spark ends a job while tasks of it
still work, and one of them that came later would leave a transaction that nobody decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select, update

from txnstore.db.row_counts import must_hit
from txnstore.db.schema import sink_batches, sink_runs
from txnstore.db.server_time import server_now_ms
from txnstore.db.settings import read_store_settings
from txnstore.errors import InvalidRequest, ProducerFenced
from txnstore.groups.commit_rules import is_storable_text
from txnstore.model import NO_PRODUCER, ProducerIdentity
from txnstore.transactions.coordinator import check_transactional_id, initialize, lock_or_insert
from txnstore.transactions.locked import LockedTransaction
from txnstore.transactions.metadata import FenceReason, TransactionMetadata
from txnstore.transactions.protocol import InitRequest

#: So many runs of a transactional id are remembered.
RUNS_REMEMBERED: Final = 100
NAME_LENGTH_MAX: Final = 1000
_JOB: Final = "job:"
_SUPERSEDED: Final = "is superseded by a newer run"

_OF_ID: Final = sink_runs.c.transactional_id == bindparam("of_transactional_id")
_THIS: Final = _OF_ID & (sink_runs.c.run_id == bindparam("of_run_id"))
# Read under the lock of the coordinator's row, which every request of a run takes first.  One that is over is not
# counted: it may never have begun, and then has superseded nobody.
_NEWEST: Final = (
    select(sink_runs)
    .where(_OF_ID, sink_runs.c.producer_id != NO_PRODUCER.producer_id)
    .order_by(sink_runs.c.run_number.desc())
    .limit(1)
)
_LAST_NUMBER: Final = select(func.coalesce(func.max(sink_runs.c.run_number), 0)).where(_OF_ID)
_PRODUCER_ID: Final = select(sink_runs.c.producer_id).where(_THIS)
_INSERT: Final = insert(sink_runs).values(begin_ms=server_now_ms())
_MOVE: Final = (
    update(sink_runs)
    .where(_THIS)
    .values(producer_id=bindparam("new_producer_id"), producer_epoch=bindparam("new_epoch"))
)
_TRIM: Final = delete(sink_runs).where(_OF_ID, sink_runs.c.run_number <= bindparam("through_number"))
_FORGET_JOBS: Final = delete(sink_runs).where(_OF_ID, sink_runs.c.sink_id.startswith(_JOB))
_FORGET_BATCHES_OF_JOBS: Final = delete(sink_batches).where(
    sink_batches.c.transactional_id == bindparam("of_transactional_id"), sink_batches.c.sink_id.startswith(_JOB)
)


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


def check_names(*names: object) -> None:
    """Refuse what is no id of a query or a run.

    Raises:
        InvalidRequest: a name is not text, is empty or too long, or has characters that no database keeps.
    """
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= NAME_LENGTH_MAX or not is_storable_text(name):
            raise InvalidRequest(f"the id of a query or a run is text of 1 to {NAME_LENGTH_MAX} characters")


def run_of_query(query_id: str, run_id: str, transactional_id: str | None = None) -> SinkRun:
    """Return a run of a streaming query; `query_id` and `run_id` are Spark's, `transactional_id` the user's own name.

    Another query id under the same transactional id is a new query, which begins at any batch id.
    """
    return SinkRun(transactional_id or f"spark-query-{query_id}", sink_id_of_query(query_id), run_id)


def run_of_job(job_id: str, *, app_id: str | None = None, transactional_id: str | None = None) -> SinkRun:
    """Return a batch write; with an `app_id` its batch id is the application's version of the data."""
    if app_id is None:
        return SinkRun(transactional_id or f"spark-job-{job_id}", f"{_JOB}{job_id}", job_id)
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
    newest = _newest(connection, run.transactional_id)
    if newest is not None and newest.run_id == run.run_id:
        return _entered_again(connection, run, transaction, newest, request)
    known_as = connection.execute(_PRODUCER_ID, _of(run)).scalar_one_or_none()
    if known_as is not None:
        why = "is over: its driver has aborted it" if known_as == NO_PRODUCER.producer_id else _SUPERSEDED
        raise ProducerFenced(f"run {run.run_id[:80]!r} of {run.transactional_id[:80]!r} {why}; nothing was changed")
    _insert(connection, run, initialize(connection, request).identity)
    return LockedTransaction.lock(connection, run.transactional_id)


def end_run(connection: Connection, run: SinkRun) -> LockedTransaction | None:
    """Let a run be over: none of its tasks begins anything from now on.

    Returns its transactional id, locked, if there may be something open of it; None if there is not, if a newer run
    has taken over, or another producer.
    """
    # A run that nobody has seen is entered, so that tasks of it that come later find it over.
    transaction = lock_or_insert(connection, _request(connection, run))
    newest = _newest(connection, run.transactional_id)
    if newest is not None and newest.run_id == run.run_id:
        save_identity(connection, run, NO_PRODUCER)
        return transaction if transaction.known.identity == _identity(newest) else None
    if connection.execute(_PRODUCER_ID, _of(run)).scalar_one_or_none() is None:
        _insert(connection, run, NO_PRODUCER)
    return None


def forget_jobs(connection: Connection, transactional_id: str) -> None:
    """Forget what jobs have left under a transactional id that has expired; queries may come back to what they left."""
    connection.execute(_FORGET_JOBS, {"of_transactional_id": transactional_id})
    connection.execute(_FORGET_BATCHES_OF_JOBS, {"of_transactional_id": transactional_id})


def save_identity(connection: Connection, run: SinkRun, identity: ProducerIdentity) -> None:
    """Take note of who the run's next transaction is begun by; by nobody: the run is over."""
    must_hit(connection, _MOVE, {**_of(run), "new_producer_id": identity.producer_id, "new_epoch": identity.epoch})


def _entered_again(
    connection: Connection, run: SinkRun, transaction: LockedTransaction, newest: Row[Any], request: InitRequest
) -> LockedTransaction:
    row, expected = transaction.known, _identity(newest)
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
    return InitRequest(run.transactional_id, longest_ms if timeout_ms is None else timeout_ms, longest_ms)


def _insert(connection: Connection, run: SinkRun, identity: ProducerIdentity) -> None:
    number = 1 + int(connection.execute(_LAST_NUMBER, {"of_transactional_id": run.transactional_id}).scalar_one())
    connection.execute(
        _INSERT,
        {
            "transactional_id": run.transactional_id,
            "run_number": number,
            "run_id": run.run_id,
            "sink_id": run.sink_id,
            "producer_id": identity.producer_id,
            "producer_epoch": identity.epoch,
        },
    )
    connection.execute(_TRIM, {"of_transactional_id": run.transactional_id, "through_number": number - RUNS_REMEMBERED})


def _newest(connection: Connection, transactional_id: str) -> Row[Any] | None:
    return connection.execute(_NEWEST, {"of_transactional_id": transactional_id}).one_or_none()


def _identity(run: Row[Any]) -> ProducerIdentity:
    return ProducerIdentity(run.producer_id, run.producer_epoch)


def _of(run: SinkRun) -> dict[str, str]:
    return {"of_transactional_id": run.transactional_id, "of_run_id": run.run_id}
