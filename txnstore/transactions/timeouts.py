"""Transactions whose time is up: whoever meets one aborts it, by the clock of the database that coordinates it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, Final, TypeVar

from sqlalchemy import BindParameter, Connection, bindparam, select

from txnstore.db.cluster.membership import coordinator_of_producer
from txnstore.db.schema import pending_group_offsets, producer_states, transactions
from txnstore.db.server_time import server_now_ms
from txnstore.db.store import Store
from txnstore.errors import TransactionAbortable, TxnStoreError
from txnstore.transactions import protocol, rows
from txnstore.transactions.completion import complete_if_possible
from txnstore.transactions.locked import LockedTransaction
from txnstore.transactions.metadata import FenceReason

Result = TypeVar("Result")

_log = logging.getLogger(__name__)

#: How many transactions one look aborts; what is left is found by the next one.
ABORTED_MAX: Final = 20
#: When to look again at what could not be aborted now.
AGAIN_MS: Final = 1_000

_IDS: Final[BindParameter[Any]] = bindparam("partition_ids", expanding=True)
# At least zero, as every deadline is: SQLite takes the partial index for that, though not for IS NOT NULL.
_NEXT: Final = (
    select(transactions.c.transactional_id, (transactions.c.deadline_ms - server_now_ms()).label("left_ms"))
    .where(transactions.c.deadline_ms >= 0)
    .order_by(transactions.c.deadline_ms)
    .limit(ABORTED_MAX + 1)
)
# Who has records of an open transaction in the partitions, the oldest first, or offsets for them.
_OPEN: Final = (
    select(producer_states.c.producer_id)
    .where(producer_states.c.partition_id.in_(_IDS), producer_states.c.transaction_first_offset >= 0)
    .order_by(producer_states.c.transaction_first_offset)
    .limit(ABORTED_MAX)
)
_PENDING: Final = (
    select(pending_group_offsets.c.producer_id).where(pending_group_offsets.c.partition_id.in_(_IDS)).limit(ABORTED_MAX)
)


def abort_if_timed_out(
    store: Store, transactional_id: str, *, waits: bool = True, retry_timeout_ms: int | None = None
) -> bool:
    """Abort the open transaction if its time is up; its producer is told so and may begin a new one.

    Returns False if its time is not up or, unless it `waits`, if somebody else is at work on it.
    """

    def work(connection: Connection) -> bool:
        if not waits and not rows.try_lock(connection, transactional_id):
            return False
        transaction = LockedTransaction.lock(connection, transactional_id, store.home)
        row = transaction.row
        if row is None or not protocol.has_timed_out(row, transaction.now_ms):
            return False
        transaction.fence_and_abort(FenceReason.TIMEOUT, protocol.timeout_detail(row, transaction.now_ms))
        transaction.save("timeout")
        return True

    aborted = store.write(work, wakes_readers=True, retry_timeout_ms=retry_timeout_ms)
    if aborted:
        complete_if_possible(store, transactional_id)
    return aborted


def write_in_time(
    store: Store,
    transactional_id: str,
    work: Callable[[Connection], Result],
    *,
    wakes_readers: bool = False,
    retry_timeout_ms: int | None = None,
) -> Result:
    """Run a request of the transactional id, as `Store.write`; if its transaction's time is up, abort that first.

    What comes after the deadline is refused, and its database transaction rolled back: so the abort is one of its
    own.  The request is then made again, and told what is true, as if somebody else had been here before.

    Raises:
        TxnStoreError: see `Store.write` and the request; or the transaction could not be aborted.
    """
    try:
        return store.write(work, wakes_readers=wakes_readers, retry_timeout_ms=retry_timeout_ms)
    except TransactionAbortable:
        abort_if_timed_out(store, transactional_id, retry_timeout_ms=retry_timeout_ms)
    return store.write(work, wakes_readers=wakes_readers, retry_timeout_ms=retry_timeout_ms)


def abort_overdue(store: Store) -> int | None:
    """Abort the transactions coordinated in this database whose time is up, those first that have waited longest.

    Returns in how many milliseconds there may be something to do again; None: no transaction with a deadline is open.
    One statement if there is nothing to do, whatever is open.

    Raises:
        TxnStoreError: the database cannot be read.
    """
    found = store.read(lambda connection: connection.execute(_NEXT).all(), retry_timeout_ms=0)
    again_ms = None
    for row in found[:ABORTED_MAX]:
        if row.left_ms >= 0:
            # A transaction has timed out once it is open for longer than its timeout.
            left_ms = int(row.left_ms) + 1
            return left_ms if again_ms is None else min(left_ms, again_ms)
        try:
            # Whoever has its lock, perhaps for long, is at work on it: the reader that is helped here does not wait.
            if not abort_if_timed_out(store, row.transactional_id, waits=False, retry_timeout_ms=0):
                again_ms = AGAIN_MS
        except TxnStoreError as error:
            # Others can, or the next look.
            _log.debug("the transaction of %.80r could not be aborted for its age: %s", row.transactional_id, error)
            return AGAIN_MS
    return 0 if len(found) > ABORTED_MAX else again_ms


def abort_overdue_in(store: Store, partition_ids: Collection[int]) -> int | None:
    """Do the same for the transactions that hold partitions of this database back, wherever they are coordinated.

    Raises:
        TxnStoreError: the database cannot be read.
    """
    cluster = store.cluster
    if cluster is None:
        return abort_overdue(store)

    def producers(connection: Connection) -> set[int]:
        of = {"partition_ids": sorted(partition_ids)}
        return {number for statement in (_OPEN, _PENDING) for number in connection.execute(statement, of).scalars()}

    coordinators = {coordinator_of_producer(number) for number in store.read(producers, retry_timeout_ms=0)}
    due_ms: list[int | None] = []
    for database_id in sorted(coordinators):
        try:
            due_ms.append(abort_overdue(cluster.own(database_id)))
        except TxnStoreError as error:
            _log.debug("database %s could not be asked for transactions whose time is up: %s", database_id, error)
            due_ms.append(AGAIN_MS)
    return min((left_ms for left_ms in due_ms if left_ms is not None), default=None)
