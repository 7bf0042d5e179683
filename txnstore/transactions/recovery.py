"""This file is the help that any client gives: finish what is decided, abort what is open for too long, forget the old.

Every function may be run by anyone, at any time, by several at once, and again after a crash: each step locks the
row it is about and looks again before it does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from sqlalchemy import Connection, bindparam, delete, select

from txnstore.db.schema import transaction_log, transactions
from txnstore.db.server_time import server_now_ms
from txnstore.db.settings import read_store_settings
from txnstore.db.store import Store
from txnstore.errors import TxnStoreError
from txnstore.groups.offsets_elsewhere import forget_offset_producers
from txnstore.log.producers import forget_producers
from txnstore.transactions import protocol, rows
from txnstore.transactions.completion import complete_decided, complete_if_possible
from txnstore.transactions.metadata import FenceReason
from txnstore.transactions.sink_runs import forget_jobs
from txnstore.transactions.states import DECIDED, EXPIRABLE, TransactionState
from txnstore.transactions.work import TransactionWork

#: How many rows one look finds; what is left is found by the next one.
FOUND_MAX: Final = 500

_DECIDED: Final = (
    select(transactions.c.transactional_id)
    .where(transactions.c.state.in_(sorted(int(state) for state in DECIDED)))
    .order_by(transactions.c.transactional_id)
    .limit(FOUND_MAX)
)
_TIMED_OUT: Final = (
    select(transactions.c.transactional_id)
    .where(transactions.c.deadline_ms.is_not(None), transactions.c.deadline_ms < server_now_ms())
    .order_by(transactions.c.deadline_ms)
    .limit(FOUND_MAX)
)
_EXPIRED: Final = (
    select(transactions.c.transactional_id)
    .where(
        transactions.c.last_update_ms <= server_now_ms() - bindparam("expiration_ms"),
        transactions.c.state.in_(sorted(int(state) for state in EXPIRABLE)),
    )
    .order_by(transactions.c.last_update_ms)
    .limit(FOUND_MAX)
)
_NOW: Final = select(server_now_ms())
# The journal of a transaction that is not complete is kept, however old.
_TRIM: Final = delete(transaction_log).where(
    transaction_log.c.update_ms < bindparam("before_ms"),
    transaction_log.c.transactional_id.not_in(
        select(transactions.c.transactional_id).where(
            transactions.c.state.not_in(sorted(int(state) for state in EXPIRABLE))
        )
    ),
)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What one round of recovery has done."""

    completed: tuple[str, ...]
    """Transactional ids whose decided transaction was completed."""

    aborted: tuple[str, ...]
    """Transactional ids whose open transaction was aborted for its age."""


def recover(store: Store) -> Recovered:
    """Complete what is decided and abort what is open for longer than its timeout."""
    return Recovered(complete_all_decided(store), abort_timed_out(store))


def complete_all_decided(store: Store) -> tuple[str, ...]:
    """Complete every decided transaction; return their transactional ids."""
    found = store.read(lambda connection: connection.execute(_DECIDED).scalars().all())
    return _each(found, lambda transactional_id: bool(complete_decided(store, transactional_id)))


def abort_timed_out(store: Store) -> tuple[str, ...]:
    """Abort every transaction that is open for longer than its timeout; return their transactional ids."""
    found = store.read(lambda connection: connection.execute(_TIMED_OUT).scalars().all())
    return _each(found, partial(abort_if_timed_out, store))


def abort_if_timed_out(store: Store, transactional_id: str) -> bool:
    """Abort the open transaction if its time is up; its producer is told so and may begin a new one."""

    def work(connection: Connection) -> bool:
        transaction = TransactionWork.lock(connection, transactional_id, store.home)
        row = transaction.row
        if row is None or not protocol.has_timed_out(row, transaction.now_ms):
            return False
        age_ms = transaction.now_ms - row.start_ms
        transaction.fence_and_abort(
            FenceReason.TIMEOUT, f"it was open for {age_ms} ms, longer than its timeout of {row.timeout_ms} ms"
        )
        transaction.save("timeout")
        return True

    aborted = store.write(work, wakes_readers=True)
    if aborted:
        complete_if_possible(store, transactional_id)
    return aborted


def abort_by_administrator(store: Store, transactional_id: str, detail: str = "by an administrator") -> bool:
    """Abort the open transaction whatever its age; its producer is told and may go on.

    Returns False if none is open, or if nobody has used the transactional id.
    """

    def work(connection: Connection) -> bool:
        transaction = TransactionWork.lock(connection, transactional_id, store.home)
        if transaction.row is None or transaction.row.state is not TransactionState.ONGOING:
            return False
        transaction.fence_and_abort(FenceReason.ADMIN, detail)
        transaction.save("administrator")
        return True

    aborted = store.write(work, wakes_readers=True)
    if aborted:
        complete_if_possible(store, transactional_id)
    return aborted


def expire_transactional_ids(store: Store) -> tuple[str, ...]:
    """Forget transactional ids that were not used for transactional.id.expiration.ms; return them."""

    def find(connection: Connection) -> tuple[int, list[str]]:
        expiration_ms = read_store_settings(connection)["transactional.id.expiration.ms"]
        return expiration_ms, list(connection.execute(_EXPIRED, {"expiration_ms": expiration_ms}).scalars())

    expiration_ms, found = store.read(find)
    return tuple(name for name in found if store.write(partial(_expire, name, expiration_ms)))


def expire_producers(store: Store) -> int:
    """Forget the sequence numbers of producers that were silent for producer.id.expiration.ms; return how many."""

    def work(connection: Connection) -> int:
        expiration_ms = read_store_settings(connection)["producer.id.expiration.ms"]
        before_ms = connection.execute(_NOW).scalar_one() - expiration_ms
        return forget_producers(connection, before_ms=before_ms) + forget_offset_producers(
            connection, before_ms=before_ms
        )

    return store.write(work)


def trim_journal(store: Store) -> int:
    """Delete journal entries of completed transactions beyond their retention; return how many."""

    def work(connection: Connection) -> int:
        retention_ms = read_store_settings(connection)["txnstore.transaction.log.retention.ms"]
        before_ms = connection.execute(_NOW).scalar_one() - retention_ms
        return connection.execute(_TRIM, {"before_ms": before_ms}).rowcount

    return store.write(work)


def _each(transactional_ids: Iterable[str], help_with: Callable[[str], bool]) -> tuple[str, ...]:
    """Return those that could be helped; one that cannot keeps no other one from it, and its error comes last."""
    helped: list[str] = []
    failed: TxnStoreError | None = None
    for transactional_id in transactional_ids:
        try:
            if help_with(transactional_id):
                helped.append(transactional_id)
        except TxnStoreError as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return tuple(helped)


def _expire(transactional_id: str, expiration_ms: int, connection: Connection) -> bool:
    transaction = TransactionWork.lock(connection, transactional_id)
    row = transaction.row
    if row is None or not protocol.may_expire(row, transaction.now_ms, expiration_ms):
        return False
    rows.journal(
        connection, [replace(row, state=TransactionState.DEAD, last_update_ms=transaction.now_ms)], reason="expiry"
    )
    rows.delete_row(connection, row)
    forget_jobs(connection, transactional_id)
    return True
