"""The rows of a transaction's branches: its shares in other databases, which vote before it is decided.

A row is there, durably, before its branch may be prepared; the decision of the transaction sets its outcome in the
same database transaction; and it goes once the branch has ended in its own database.  So a client that finds a prepared
branch finds out here how it ends; one without a row was never decided to commit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Row, bindparam, delete, exists, or_, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from txnstore.db.identity import check_not_standby
from txnstore.db.row_security import check_sees_all
from txnstore.db.schema import transaction_branches, transactions
from txnstore.db.store import Store, make_durable, server_now_ms
from txnstore.model import ProducerIdentity
from txnstore.transactions import rows

_ABORT: Final = 0
_COMMIT: Final = 1
#: Decided to commit, and missing in its database.
_MISSING: Final = 2

# DO NOTHING: a registration whose answer was lost is repeated.
_INSERT: Final = (
    upsert(transaction_branches)
    .values(registered_ms=server_now_ms())
    .on_conflict_do_nothing(index_elements=[transaction_branches.c.gid])
)
# An outcome is set once and never changes.
_DECIDE: Final = (
    update(transaction_branches)
    .where(transaction_branches.c.transactional_id == bindparam("of_transactional_id"))
    .where(transaction_branches.c.producer_id == bindparam("of_producer_id"))
    .where(transaction_branches.c.producer_epoch == bindparam("of_epoch"))
    .where(transaction_branches.c.outcome.is_(None))
    .values(outcome=bindparam("decided"))
)
_BY_GID: Final = select(transaction_branches).where(transaction_branches.c.gid.in_(bindparam("gids", expanding=True)))
_BY_DATABASE: Final = (
    select(transaction_branches)
    .where(transaction_branches.c.database_identity == bindparam("of_identity"))
    .where(or_(transaction_branches.c.outcome.is_(None), transaction_branches.c.outcome != _MISSING))
    .where(transaction_branches.c.gid > bindparam("after_gid"))
    .order_by(transaction_branches.c.gid)
    .limit(bindparam("count_max"))
)
_MARK_MISSING: Final = (
    update(transaction_branches)
    .where(transaction_branches.c.gid == bindparam("of_gid"))
    .where(transaction_branches.c.outcome == _COMMIT)
    .values(outcome=_MISSING)
)
_ALL: Final = select(transaction_branches).order_by(transaction_branches.c.registered_ms, transaction_branches.c.gid)
_HAS_BRANCHES: Final = select(exists(select(transaction_branches.c.gid)))
_DELETE: Final = delete(transaction_branches).where(transaction_branches.c.gid.in_(bindparam("gids", expanding=True)))


@dataclass(frozen=True, slots=True)
class RegisteredBranch:
    """A branch as the coordinator knows it."""

    gid: str
    transactional_id: str
    producer: ProducerIdentity
    """The producer that began the transaction, with the epoch of its records."""

    database_label: str
    """The database that votes, for people."""

    database_identity: str
    """The same, as its server knows it."""

    transaction_xid8: str
    """The number of its transaction there."""

    commit: bool | None = None
    """What was decided; None: nothing yet."""

    registered_ms: int = -1

    is_missing: bool = False
    """It was to commit, and its database did not know of one: that was told, and only who finds it prepared ends it."""


def insert_branches(connection: Connection, branches: Iterable[RegisteredBranch]) -> None:
    """Register branches of an open transaction, whose row is locked; those that are known stay as they are."""
    entries = [
        {
            "gid": branch.gid,
            "transactional_id": branch.transactional_id,
            "producer_id": branch.producer.producer_id,
            "producer_epoch": branch.producer.epoch,
            "database_label": branch.database_label,
            "database_identity": branch.database_identity,
            "transaction_xid8": branch.transaction_xid8,
        }
        for branch in branches
    ]
    if entries:
        # A vote is on its disk whatever is set there: so is that it will come, and below what is decided about it.
        make_durable(connection)
        connection.execute(_INSERT, entries)


def decide_branches(connection: Connection, transactional_id: str, producer: ProducerIdentity, *, commit: bool) -> None:
    """Set the outcome of all branches of the transaction that `producer` began and that is decided now."""
    make_durable(connection)
    connection.execute(
        _DECIDE,
        {
            "of_transactional_id": transactional_id,
            "of_producer_id": producer.producer_id,
            "of_epoch": producer.epoch,
            "decided": _COMMIT if commit else _ABORT,
        },
    )


def branches_by_gid(connection: Connection, gids: Collection[str]) -> dict[str, RegisteredBranch]:
    """Return those of the branches that are known."""
    if not gids:
        return {}
    return {row.gid: _branch(row) for row in connection.execute(_BY_GID, {"gids": sorted(gids)})}


def known_branches(
    store: Store,
    gids: Collection[str],
    *,
    of_transactional_id: str | None = None,
    retry_timeout_ms: int | None = None,
) -> dict[str, RegisteredBranch]:
    """Return those of the branches that are known: the caller may take the others for aborted, or ended.

    If all are of one transactional id, it is enough that the role sees that one.

    Raises:
        StoreReadOnly: this is a standby, which may not have heard of them yet.
        PermissionDenied: row-level security may hide one that is not seen from this role.
        TxnStoreError: the store cannot be asked.
    """

    def work(connection: Connection) -> dict[str, RegisteredBranch]:
        check_not_standby(store, connection)
        known = branches_by_gid(connection, gids)
        unknown = set(gids) - known.keys()
        if unknown and (of_transactional_id is None or rows.read_row(connection, of_transactional_id).row is None):
            check_sees_branches(store, connection, min(unknown))
        return known

    return store.read(work, retry_timeout_ms=retry_timeout_ms)


def check_sees_branches(store: Store, connection: Connection, gid: str) -> None:
    """Refuse to take a branch for aborted, or ended, where this role might not be shown what says otherwise.

    Raises:
        PermissionDenied: row-level security limits this role to some transactional ids.
    """
    judgement = f"the transaction of the branch {gid} is open, or is decided to commit"
    check_sees_all(store, connection, (transaction_branches, transactions), judgement)


def branches_in_database(
    connection: Connection, database_identity: str, after_gid: str, count_max: int
) -> list[RegisteredBranch]:
    """Return the next page of the branches of a database but for those that are missing there, by gid."""
    page = {"of_identity": database_identity, "after_gid": after_gid, "count_max": count_max}
    found = connection.execute(_BY_DATABASE, page)
    return [_branch(row) for row in found]


def mark_missing(connection: Connection, gid: str) -> bool:
    """Note that a branch that was decided to commit is missing in its database; return whether nobody has before.

    Its row stays: it may have been looked for in the wrong place, and all the rest would be rolled back without it.
    """
    return connection.execute(_MARK_MISSING, {"of_gid": gid}).rowcount == 1


def all_branches(connection: Connection) -> list[RegisteredBranch]:
    """Return every branch that has not ended, or of which nobody has yet said so; the oldest first."""
    return [_branch(row) for row in connection.execute(_ALL)]


def has_branches(connection: Connection) -> bool:
    """Return whether there is a branch that has not ended, or of which nobody has yet said so."""
    return bool(connection.execute(_HAS_BRANCHES).scalar_one())


def forget_branches(connection: Connection, gids: Collection[str]) -> None:
    """Remove branches that have ended in their database, or that were decided to abort and never came to be there."""
    if gids:
        connection.execute(_DELETE, {"gids": sorted(gids)})


def _branch(row: Row[tuple[object, ...]]) -> RegisteredBranch:
    return RegisteredBranch(
        row.gid,
        row.transactional_id,
        ProducerIdentity(row.producer_id, row.producer_epoch),
        row.database_label,
        row.database_identity,
        row.transaction_xid8,
        None if row.outcome is None else row.outcome in (_COMMIT, _MISSING),
        row.registered_ms,
        row.outcome == _MISSING,
    )
