"""The rules of branches: what other databases have prepared, beside what the coordinator knows of it.

A branch is registered before it may be prepared, and struck off only after it has ended.  So what is prepared in two
looks, and is not known in between, is nobody's: it keeps its locks until somebody ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from sqlalchemy import Connection, select, text

from txnstore.db.postgresql.branches import connect_participant, list_prepared
from txnstore.db.schema import stores
from txnstore.db.store import Store
from txnstore.db.url import DatabaseUrl
from txnstore.model import ControlType
from txnstore.participants.branch_rules import gid_prefix
from txnstore.transactions import rows
from txnstore.transactions.branch_rows import RegisteredBranch, all_branches
from txnstore.transactions.protocol import TransactionState
from txnstore.verification.invariants import Invariant, Place, Violation
from txnstore.verification.journal import begun_by
from txnstore.verification.reading import Snapshot

# Every role may list what is prepared in all databases of the server.
_PREPARED_HERE: Final = text(
    "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE pg_catalog.starts_with(gid, :prefix) ORDER BY gid"
)
_RECORDED: Final = select(stores.c.database_identity)


def branch_violations(store: Store, participants: Sequence[DatabaseUrl] = ()) -> list[Violation]:
    """Return what is wrong with the branches of transactions that this database coordinates.

    Looked at are the databases of its own server, where that is PostgreSQL, and `participants`.  Of a copy nothing is
    asked: what is prepared under its name is its original's.
    """
    if store.read(partial(_is_copy, store)):
        return []
    before = _prepared(store, participants)
    known = store.read(_read_known)
    after = _prepared(store, participants)
    found = [
        Violation(Invariant.BRANCHES_KNOWN, Place(gid=gid), "it is prepared, and nobody knows its transaction")
        for gid in sorted((before & after) - known.keys())
    ]
    for branch, seen in known.values():
        if seen is not None:
            place = Place(gid=branch.gid, transactional_id=branch.transactional_id, database=branch.database_label)
            found.append(Violation(Invariant.BRANCHES_KNOWN, place, seen))
    return found


def _read_known(connection: Connection) -> dict[str, tuple[RegisteredBranch, str | None]]:
    """Return the branches that are registered, by gid, and what is wrong with the transaction of each.

    One that has ended may be there still: its client strikes it off with its next transaction.
    """
    branches = all_branches(connection)
    identities = {(branch.producer.producer_id, branch.producer.epoch) for branch in branches}
    begun = begun_by(Snapshot((connection,)), identities)
    known: dict[str, tuple[RegisteredBranch, str | None]] = {}
    for branch in branches:
        seen = None
        of = begun.get((branch.producer.producer_id, branch.producer.epoch))
        if branch.commit is None:
            row = rows.read_row(connection, branch.transactional_id).row
            if row is None or row.state is not TransactionState.ONGOING or row.begin_identity != branch.producer:
                seen = "it may go either way, and its transaction is over"
        elif of is not None and of.decision is not ControlType(branch.commit):
            decided = "not decided" if of.decision is None else f"decided to {of.decision.name}"
            seen = f"it is to {ControlType(branch.commit).name}, and its transaction is {decided}"
        known[branch.gid] = branch, seen
    return known


def _is_copy(store: Store, connection: Connection) -> bool:
    identities = {connection.execute(_RECORDED).scalar_one(), store.backend.identity(connection)}
    return None not in identities and len(identities) > 1


def _prepared(store: Store, participants: Sequence[DatabaseUrl]) -> set[str]:
    """Return the gids of this store that are prepared in the databases that can be asked."""
    prefix = gid_prefix(store.store_uuid)
    gids: set[str] = set()
    if store.backend.keeps_prepared:
        gids.update(store.read(lambda connection: connection.execute(_PREPARED_HERE, {"prefix": prefix}).scalars()))
    for url in participants:
        driver = connect_participant(url)
        try:
            gids.update(branch.gid for branch in list_prepared(driver, prefix))
        finally:
            driver.close()
    return gids
