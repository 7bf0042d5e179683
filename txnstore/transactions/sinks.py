"""The forgetting of Spark's sinks: of queries that were silent for so long that nobody asks for a replay any more.

It is here and not with the sink, for maintenance has to do it in processes without Spark too.  What a sink has
committed goes as a whole, so that it is either recognised or unknown.  A batch that is replayed later than that is
written again.  What was noted for a batch that nobody decides goes sooner: it is needed while the batch is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from sqlalchemy import BindParameter, Connection, bindparam, delete, func, select, union, union_all

from txnstore.db.cluster.catalogue import read_store_settings
from txnstore.db.portions import FOUND_MAX, Portions
from txnstore.db.schema import sink_batches, sink_inputs, sink_positions, sink_runs
from txnstore.db.store import Store, server_now_ms
from txnstore.transactions.protocol import EXPIRABLE
from txnstore.transactions.transaction import LockedTransaction

#: In place of a run in `sink_inputs`: what the last batch read that was decided.
OF_LAST_BATCH: Final = ""
#: No limit: kept for ever.
FOR_EVER: Final = -1

_NOW: Final = select(server_now_ms())
_BEFORE: Final[BindParameter[int]] = bindparam("before_ms")
_OF_SINK: Final[BindParameter[str]] = bindparam("of_sink_id")
_ACTIVITY: Final = union_all(
    select(sink_batches.c.sink_id, sink_batches.c.commit_ms.label("at_ms")),
    select(sink_runs.c.sink_id, sink_runs.c.begin_ms),
).subquery("activity")
# Few rows are kept of each sink: to pass all of them, where nobody waits, is cheaper than an index on their age that
# every batch would change.
_SILENT: Final = (
    select(_ACTIVITY.c.sink_id)
    .group_by(_ACTIVITY.c.sink_id)
    .having(func.max(_ACTIVITY.c.at_ms) <= _BEFORE)
    .order_by(func.max(_ACTIVITY.c.at_ms))
    .limit(FOUND_MAX)
)
_IDS_OF_SINK: Final = union(
    select(sink_batches.c.transactional_id).where(sink_batches.c.sink_id == _OF_SINK),
    select(sink_runs.c.transactional_id).where(sink_runs.c.sink_id == _OF_SINK),
)
# The entry of a new run takes these locks, too: it may come under a transactional id that the sink never had.
_LOCK: Final = [
    select(*table.primary_key).where(table.c.sink_id == _OF_SINK).order_by(*table.primary_key).with_for_update()
    for table in (sink_runs, sink_batches)
]
_LAST_ACTIVITY: Final = select(func.max(_ACTIVITY.c.at_ms)).where(_ACTIVITY.c.sink_id == _OF_SINK)
_FORGET: Final = [
    *(delete(table).where(table.c.sink_id == _OF_SINK) for table in (sink_batches, sink_positions, sink_runs)),
    # A run that comes just now has noted what it reads before anything else.
    delete(sink_inputs).where(sink_inputs.c.sink_id == _OF_SINK, sink_inputs.c.noted_ms <= _BEFORE),
]
_OLD_INPUTS: Final = (
    select(*sink_inputs.primary_key)
    .where(sink_inputs.c.noted_ms <= _BEFORE, sink_inputs.c.run_id != OF_LAST_BATCH)
    .order_by(sink_inputs.c.noted_ms)
    .limit(bindparam("rows_max"))
)
# One by one: SQLite finds tuples of so many columns by the first ones alone.
_FORGET_INPUT: Final = delete(sink_inputs).where(
    *(column == bindparam(f"of_{column.name}") for column in sink_inputs.primary_key),
    sink_inputs.c.noted_ms <= _BEFORE,
)


def forget_silent_sinks(store: Store, portions: Portions | None = None) -> int:
    """Forget sinks that have been silent for txnstore.sink.retention.ms, and what was noted for batches long over.

    Returns how many sinks and notes: at least FOUND_MAX, or all that there are, or what there is time for.

    Raises:
        TxnStoreError: the database refused; what was forgotten before stays so.
    """
    portions = portions or Portions()
    sinks_before_ms, inputs_before_ms = store.read(_ages)
    silent: Sequence[str] = ()
    if sinks_before_ms is not None:
        of = {"before_ms": sinks_before_ms}
        silent = store.read(lambda connection: connection.execute(_SILENT, of).scalars().all())
    forgotten = 0
    for sink_id in silent:
        forgotten += portions.write_unless_busy(store, partial(_forget_sink, sink_id, sinks_before_ms or 0), busy=False)
        if portions.is_over:
            return forgotten
    page = {"before_ms": inputs_before_ms, "rows_max": FOUND_MAX}
    return forgotten + portions.forget(
        store,
        lambda connection: {None: connection.execute(_OLD_INPUTS, page).all()},
        lambda _, some: partial(_forget_inputs, some, inputs_before_ms),
        rows_max=FOUND_MAX,
    )


def lock_sink(connection: Connection, sink_id: str) -> None:
    """Let nobody forget the sink before this database transaction ends; locked after transactional ids."""
    for statement in _LOCK:
        connection.execute(statement, {"of_sink_id": sink_id})


def _ages(connection: Connection) -> tuple[int | None, int]:
    """Return since when a sink has to be silent, None: for ever; and since when a note has to be there."""
    settings = read_store_settings(connection)
    now_ms: int = connection.execute(_NOW).scalar_one()
    retention_ms: int = settings["txnstore.sink.retention.ms"]
    # No batch is under way for longer than its transaction may be open.
    noted_ms: int = settings["transactional.id.expiration.ms"] + settings["transaction.max.timeout.ms"]
    return None if retention_ms == FOR_EVER else now_ms - retention_ms, now_ms - noted_ms


def _forget_sink(sink_id: str, before_ms: int, connection: Connection) -> bool:
    of = {"of_sink_id": sink_id}
    # In the order in which everybody locks them: the decision of a batch holds the lock of its id.
    for transactional_id in sorted(connection.execute(_IDS_OF_SINK, of).scalars()):
        row = LockedTransaction.lock(connection, transactional_id).row
        if row is not None and row.state not in EXPIRABLE:
            return False
    lock_sink(connection, sink_id)
    last_ms = connection.execute(_LAST_ACTIVITY, of).scalar()
    if last_ms is None or last_ms > before_ms:
        # It has woken up meanwhile, or somebody else was faster.
        return False
    for statement in _FORGET:
        connection.execute(statement, {**of, "before_ms": before_ms})
    return True


def _forget_inputs(keys: Sequence[Any], before_ms: int, connection: Connection) -> int:
    names = [f"of_{column.name}" for column in sink_inputs.primary_key]
    each = [{"before_ms": before_ms, **dict(zip(names, key, strict=True))} for key in keys]
    return connection.execute(_FORGET_INPUT, each).rowcount
