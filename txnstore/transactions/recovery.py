"""This file is the help that any client gives: finish what is decided, abort what is open for too long, forget the old.

Every function may be run by anyone, at any time, by several at once, and again after a crash: each step locks the
row it is about and looks again before it does anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, Final

from sqlalchemy import BindParameter, Connection, bindparam, delete, select

from txnstore.db.portions import ROWS_AT_ONCE, chunks, write_portion
from txnstore.db.schema import MINUTE_MS, transaction_log, transactions
from txnstore.db.server_time import server_now_ms
from txnstore.db.settings import read_store_settings
from txnstore.db.store import Store
from txnstore.errors import TxnStoreError
from txnstore.groups.offsets_elsewhere import forget_offset_producers
from txnstore.log.producers import forget_producers
from txnstore.transactions import protocol, rows
from txnstore.transactions.completion import complete_decided, complete_if_possible
from txnstore.transactions.locked import LockedTransaction
from txnstore.transactions.metadata import FenceReason
from txnstore.transactions.sink_runs import forget_jobs
from txnstore.transactions.states import DECIDED, EXPIRABLE, TransactionState
from txnstore.transactions.timeouts import abort_if_timed_out

__all__ = [
    "Recovered",
    "abort_by_administrator",
    "abort_if_timed_out",
    "abort_timed_out",
    "complete_all_decided",
    "expire_producers",
    "expire_transactional_ids",
    "recover",
    "trim_journal",
]

#: How many rows one look finds; what is left is found by the next one.
FOUND_MAX: Final = 500

# As numbers in the statement's text: SQLite takes no partial index for parameters.
_DECIDED_STATES: Final[BindParameter[Any]] = bindparam(
    "states", sorted(int(state) for state in DECIDED), expanding=True, literal_execute=True
)
_DECIDED: Final = (
    select(transactions.c.transactional_id)
    .where(transactions.c.state.in_(_DECIDED_STATES), transactions.c.transactional_id > bindparam("after_id"))
    .order_by(transactions.c.transactional_id)
    .limit(FOUND_MAX)
)
_TIMED_OUT: Final = (
    select(transactions.c.transactional_id)
    # The time as a subquery, which is asked once: the index then ends at what has timed out.
    .where(transactions.c.deadline_ms >= 0, transactions.c.deadline_ms < select(server_now_ms()).scalar_subquery())
    .order_by(transactions.c.deadline_ms)
    .limit(FOUND_MAX)
)
_EXPIRED: Final = (
    select(transactions.c.transactional_id)
    .where(
        transactions.c.last_update_minute <= bindparam("before_minute"),
        transactions.c.last_update_ms <= bindparam("before_ms"),
        transactions.c.state.in_(sorted(int(state) for state in EXPIRABLE)),
    )
    .order_by(transactions.c.last_update_minute)
    .limit(FOUND_MAX)
)
_NOW: Final = select(server_now_ms())
# In the order of their numbers, which is about that of their age. The journal of a transaction that is not complete is
# kept, however old; one that is complete stays so, whatever its transactional id begins next.
_OLDEST: Final = (
    select(
        transaction_log.c.entry_id,
        transaction_log.c.update_ms,
        # Its state by a look for each entry: for EXISTS, PostgreSQL may read all transactional ids.
        select(transactions.c.state)
        .where(
            transactions.c.transactional_id == transaction_log.c.transactional_id,
            transactions.c.transaction_number == transaction_log.c.transaction_number,
        )
        .scalar_subquery()
        .label("state_now"),
    )
    .where(transaction_log.c.entry_id > bindparam("after_entry_id"))
    .order_by(transaction_log.c.entry_id)
    .limit(FOUND_MAX)
)
#: None: the transactional id has gone on, or is gone.
_COMPLETE: Final = {None, *map(int, EXPIRABLE)}
_TRIM: Final = delete(transaction_log).where(transaction_log.c.entry_id.in_(bindparam("entry_ids", expanding=True)))


@dataclass(frozen=True, slots=True)
class Recovered:
    """What one round of recovery has done."""

    completed: tuple[str, ...]
    """Transactional ids whose decided transaction was completed."""

    aborted: tuple[str, ...]
    """Transactional ids whose open transaction was aborted for its age."""


def recover(store: Store) -> Recovered:
    """Complete what is decided and abort what is open for longer than its timeout.

    Raises:
        TxnStoreError: some of it could not be done now; all else is.
    """
    try:
        completed = complete_all_decided(store)
    except TxnStoreError:
        # What waits for a database that is away keeps no other transaction open.
        abort_timed_out(store)
        raise
    return Recovered(completed, abort_timed_out(store))


def complete_all_decided(store: Store) -> tuple[str, ...]:
    """Complete every decided transaction; return their transactional ids.

    Raises:
        TxnStoreError: some of them could not be completed, for a database that takes part is away; all others are.
    """
    return _each(_all_decided(store), lambda transactional_id: bool(complete_decided(store, transactional_id)))


def abort_timed_out(store: Store) -> tuple[str, ...]:
    """Abort every transaction that is open for longer than its timeout; return their transactional ids."""
    found = store.read(lambda connection: connection.execute(_TIMED_OUT).scalars().all())
    return _each(found, partial(abort_if_timed_out, store))


def abort_by_administrator(store: Store, transactional_id: str, detail: str = "by an administrator") -> bool:
    """Abort the open transaction whatever its age; its producer is told and may go on.

    Returns False if none is open, or if nobody has used the transactional id.
    """

    def work(connection: Connection) -> bool:
        transaction = LockedTransaction.lock(connection, transactional_id, store.home)
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
        expiration_ms, before_ms = _age_of(connection, "transactional.id.expiration.ms")
        of = {"before_ms": before_ms, "before_minute": before_ms // MINUTE_MS}
        return expiration_ms, list(connection.execute(_EXPIRED, of).scalars())

    expiration_ms, found = store.read(find)
    return tuple(name for name in found if write_portion(store, partial(_expire, name, expiration_ms)))


def expire_producers(store: Store) -> int:
    """Forget the sequence numbers of producers that were silent for producer.id.expiration.ms; return how many.

    At least FOUND_MAX, or all that there are.
    """
    _, before_ms = store.read(lambda connection: _age_of(connection, "producer.id.expiration.ms"))
    forgotten = forget_producers(store, before_ms=before_ms, rows_max=FOUND_MAX)
    return forgotten + forget_offset_producers(store, before_ms=before_ms, rows_max=FOUND_MAX)


def trim_journal(store: Store) -> int:
    """Delete journal entries of completed transactions beyond their retention; return how many.

    At least FOUND_MAX, or all that there are.
    """
    _, before_ms = store.read(lambda connection: _age_of(connection, "txnstore.transaction.log.retention.ms"))
    trimmed, after_entry_id = 0, -1
    while trimmed < FOUND_MAX:
        of = {"after_entry_id": after_entry_id}
        found = store.read(lambda connection, of=of: connection.execute(_OLDEST, of).all())  # type: ignore[misc]
        # From the old end on, never out of the middle: outcomes are told by what is left of an identity's entries.
        old = list(takewhile(lambda entry: entry.update_ms < before_ms, found))
        for some in chunks([entry.entry_id for entry in old if entry.state_now in _COMPLETE], ROWS_AT_ONCE):
            trimmed += write_portion(store, partial(_trim, some))
        if len(old) < FOUND_MAX:
            break
        after_entry_id = old[-1].entry_id
    return trimmed


def _age_of(connection: Connection, setting: str) -> tuple[int, int]:
    """Return the age at which something is forgotten, and the time before which it is old enough now."""
    age_ms: int = read_store_settings(connection)[setting]
    return age_ms, connection.execute(_NOW).scalar_one() - age_ms


def _trim(entry_ids: Sequence[int], connection: Connection) -> int:
    return connection.execute(_TRIM, {"entry_ids": entry_ids}).rowcount


def _all_decided(store: Store) -> Iterator[str]:
    """Yield the ids of decided transactions, page by page: those that cannot be completed now stand before no other."""
    found: Sequence[str] = ("",)
    while found:
        after = {"after_id": found[-1]}
        found = store.read(lambda connection, after=after: connection.execute(_DECIDED, after).scalars().all())  # type: ignore[misc]
        yield from found


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
    transaction = LockedTransaction.lock(connection, transactional_id)
    row = transaction.row
    if row is None or not protocol.may_expire(row, transaction.now_ms, expiration_ms):
        return False
    rows.journal(
        connection, [replace(row, state=TransactionState.DEAD, last_update_ms=transaction.now_ms)], reason="expiry"
    )
    rows.delete_row(connection, row)
    forget_jobs(connection, transactional_id)
    return True
