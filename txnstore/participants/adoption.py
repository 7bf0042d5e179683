"""The adoption: a copy of a store becomes a store of its own, or is told that it is the original, moved.

    adopt([store])                             # of a cluster: all of its databases
    adopt([store], same=True)

Until then a copy does nothing in other databases in its original's name: see `db.identity`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, bindparam, delete, select, update

from txnstore.db.closing import read_move, refuse
from txnstore.db.cluster.membership import Database, read_databases
from txnstore.db.schema import databases, stores, transaction_branches
from txnstore.db.store import Store
from txnstore.errors import InvalidRequest, PermissionDenied, StoreCopied, WrongCluster
from txnstore.log.outbox.rows import lock_outbox, tell_callers_apart
from txnstore.transactions.branch_rows import all_branches
from txnstore.transactions.recovery import abort_by_administrator

# Of two that adopt at once the second waits; so does a client that registers a branch.
_LOCK: Final = select(stores.c.store_uuid, stores.c.database_identity).with_for_update()
_SET: Final = update(stores).values(store_uuid=bindparam("new_uuid"), database_identity=bindparam("new_identity"))
_RENAME: Final = (
    update(databases).where(databases.c.database_id == bindparam("of_id")).values(store_uuid=bindparam("new_uuid"))
)
_FORGET_BRANCHES: Final = delete(transaction_branches)


@dataclass(frozen=True, slots=True)
class Adopted:
    """What became of one store."""

    store: Store
    uuid_before: str
    uuid_after: str


@dataclass(frozen=True, slots=True)
class _FoundStore:
    """A store as it was found."""

    store: Store
    recorded: str | None
    actual: str
    members: Mapping[int, Database]

    @property
    def database_id(self) -> int:
        return next(member.database_id for member in self.members.values() if member.is_own)

    @property
    def is_moved(self) -> bool:
        return self.recorded is not None and self.recorded != self.actual


def adopt(given: Sequence[Store], *, same: bool = False, force: bool = False) -> list[Adopted]:
    """Give copies uuids of their own; with `same`, keep the uuids: these are the originals, and they have moved.

    Their clients are to be stopped before.  A copy forgets the branches that its original has registered in other
    databases, and aborts their open transactions: they are the original's to end.  Records, offsets, producers and
    what waits in the outbox stay.  May be repeated after a crash in the middle.  With `force`, also what seems to be
    where it was made: a physical copy of a whole server, or of a disk.

    Raises:
        StoreMoved: a copy has closed it, or fills it: of two that say so of themselves, each would go on with the copy.
        InvalidRequest: it is where its tables were made, so nothing shows that it is a copy.
        WrongCluster: of several databases not all were given, or one of them is not a copy.
        PermissionDenied: this role may not ask which database it is.
        TxnStoreError: a database refuses or cannot be reached.
    """
    found = [_look(store) for store in given]
    if same:
        return [_confirm(standing) for standing in found]
    pending = [standing for standing in found if force or standing.is_moved]
    if not pending:
        raise InvalidRequest(
            f"{found[0].store.url} is the database in which its tables were made, so nothing shows that it is a"
            " copy; a physical copy of a whole server, or of a disk, is adopted with --force"
        )
    _check_complete(found)
    uuids = _new_uuids(found, pending)
    return [_adopt(standing, uuids) for standing in pending]


def _look(store: Store) -> _FoundStore:
    def work(connection: Connection) -> _FoundStore:
        recorded = connection.execute(select(stores.c.database_identity)).scalar_one()
        actual = store.backend.identity(connection)
        if actual is None:
            raise PermissionDenied(
                f"this role may not ask which database {store.url} is: GRANT EXECUTE ON FUNCTION pg_control_system()"
            )
        members = {member.database_id: member for member in read_databases(connection)}
        return _FoundStore(store, recorded, actual, members)

    return store.read(work)


def _confirm(standing: _FoundStore) -> Adopted:
    def work(connection: Connection) -> None:
        connection.execute(_LOCK)
        move = read_move(connection)
        if move is not None:
            # It was opened before. Taken for the original by a word, a copy of either side would open beside it.
            raise refuse(standing.store.url, move)
        lock_outbox(connection, waits=True)
        connection.execute(update(stores).values(database_identity=standing.actual))
        tell_callers_apart(connection)

    standing.store.write(work)
    return Adopted(standing.store, standing.store.store_uuid, standing.store.store_uuid)


def _check_complete(found: Sequence[_FoundStore]) -> None:
    """Refuse a part of a cluster: the rest, if it is the original's, would go on to belong to it."""
    wanted = {member.label for member in found[0].members.values()}
    known = {database_id for standing in found for database_id in standing.members}
    if known != {standing.database_id for standing in found}:
        raise WrongCluster(
            f"the cluster consists of the databases {', '.join(sorted(wanted))}: restore all of them, and give all"
            " their URLs,"
            " the controller's first. If only one of them has moved, and its original is gone for good, adopt it with"
            " --same"
        )


def _new_uuids(found: Sequence[_FoundStore], pending: Sequence[_FoundStore]) -> dict[int, str]:
    """Return the uuid of each database once all are adopted: those of an adoption that was broken off stay."""
    uuids: dict[int, str] = {}
    settled = [standing for standing in found if standing not in pending]
    for standing in settled:
        uuids[standing.database_id] = standing.store.store_uuid
    for standing in pending:
        told = {other.members[standing.database_id].store_uuid for other in settled}
        if standing.store.store_uuid in told:
            raise WrongCluster(
                f"{settled[0].store.url}, one of the databases that were given, is not a copy: it belongs to the"
                " original"
            )
        uuids[standing.database_id] = told.pop() if told else str(uuid.uuid4())
    return uuids


def _adopt(standing: _FoundStore, uuids: Mapping[int, str]) -> Adopted:
    store = standing.store
    if len(uuids) == 1:
        # A producer that is still at it finds out. In a cluster their time limit ends them.
        undecided = {branch.transactional_id for branch in store.read(all_branches) if branch.commit is None}
        for transactional_id in sorted(undecided):
            abort_by_administrator(store, transactional_id, "the store is a copy and was adopted")
    new_uuid = uuids[standing.database_id]

    def work(connection: Connection) -> None:
        if connection.execute(_LOCK).one() != (store.store_uuid, standing.recorded):
            raise StoreCopied(f"another process is adopting the store in {store.url}")
        lock_outbox(connection, waits=True)
        connection.execute(_SET, {"new_uuid": new_uuid, "new_identity": standing.actual})
        connection.execute(_RENAME, [{"of_id": number, "new_uuid": of_it} for number, of_it in uuids.items()])
        connection.execute(_FORGET_BRANCHES)
        tell_callers_apart(connection)

    store.write(work)
    return Adopted(store, store.store_uuid, new_uuid)
