"""The identity of a store: whether its tables are where they were made, or are a copy that must not act for them.

A dump that was restored elsewhere and a copied file hold the store's uuid as well.  Records are produced to them and
consumed from them as from any other.  But what reaches out to other databases in the name of that uuid would end the
original's prepared branches, and write to the members of the original's cluster.  So that is refused until `txnstore
adopt` has given the copy a uuid of its own, or has been told that it is the original, moved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from sqlalchemy import Connection, select, update

from txnstore.db.schema import SCHEMA_VERSION, stores
from txnstore.db.statements import HotStatement
from txnstore.db.store import Store
from txnstore.errors import SchemaTooNew, StoreCopied, StoreReadOnly, StoreUnavailable

_READ: Final = select(stores.c.store_uuid, stores.c.database_identity)
# An adoption either comes before it and is seen, or after it and sees what was done. FOR KEY SHARE lets new producer
# ids through, which only update the row.
_SHARE: Final = select(stores.c.store_uuid).with_for_update(read=True, key_share=True)
_SAME: Final = HotStatement(select(stores.c.store_uuid, stores.c.next_producer_id, stores.c.oldest_writer_version))
_RECORD: Final = update(stores).where(stores.c.database_identity.is_(None))
#: What becomes of a copy that is in use.
_ADOPT: Final = (
    "Run `txnstore adopt` on it, or, if the original is gone for good and this is what became of it,"
    " `txnstore adopt --same`"
)
_log = logging.getLogger(__name__)


def record_identity(store: Store, connection: Connection) -> None:
    """Write down which database the store is in, if nobody has and this role may know."""
    identity = store.backend.identity(connection)
    if identity is not None:
        connection.execute(_RECORD.values(database_identity=identity))


def check_original(store: Store, remedy: str = _ADOPT) -> None:
    """Refuse to go on if the store's tables are a copy; those that were not asked before are taken for the original.

    `remedy` is a sentence without its end: what to do about a copy.

    Raises:
        StoreCopied: they are a copy, or were moved, or nobody can tell.
        TxnStoreError: the database cannot be asked.
    """

    def is_recorded(connection: Connection) -> bool:
        store_uuid, recorded = connection.execute(_READ).one()
        _check_uuid(store, store_uuid)
        _check(store, store.backend.identity(connection), recorded, remedy)
        return recorded is not None

    if not store.read(is_recorded):
        store.write(lambda connection: record_identity(store, connection))
    store.is_original = True


def check_original_once(store: Store) -> None:
    """Do the same, if no connection was made since it was done.

    Raises:
        StoreCopied: see `check_original`.
        TxnStoreError: the database cannot be asked.
    """
    if not store.is_original:
        check_original(store)


def is_own_database(store: Store, connection: Connection) -> bool:
    """Return whether a connection of somebody else is to the database of the store, and not to a copy of that."""
    running = store.backend.running(connection)
    if store.running != running:
        # Also if its server has restarted since it was asked.
        store.running = store.read(store.backend.running)
    return store.running == running


def check_same_store(store: Store, connection: Connection) -> None:
    """Refuse to go on where another store has taken the place of this one: its topics are not those that are known.

    Also where a migration has come meanwhile, after which this code must not write any more. It is the first statement
    of its database transaction, or sees as much as that.

    Raises:
        StoreCopied: it has, or this one was given another identity, or has gone back to an older state.
        StoreUnavailable: it is a standby that shows less than was seen before.
        SchemaTooNew: the tables were brought to such a version.
    """
    check = same_store_check(store, connection)
    check(*(_SAME.row(connection) or (None, 0, 0)))


def same_store_check(store: Store, connection: Connection) -> Callable[[str | None, int, int], None]:
    """Return what does the same, given uuid, next producer id and oldest writer as it reads them from now on."""
    # Before the statement: what another thread learns from now on may be newer than what this one sees.
    newest_producer_id = store.newest_producer_id

    def check(store_uuid: str | None, next_producer_id: int, oldest_writer_version: int) -> None:
        _check_uuid(store, store_uuid)
        if oldest_writer_version > SCHEMA_VERSION:
            raise SchemaTooNew(
                f"the tables in {store.url} were upgraded while this program ran: a program that writes to them must"
                f" know version {oldest_writer_version}, this txnstore knows {SCHEMA_VERSION}; upgrade the package and"
                " restart the program"
            )
        if next_producer_id < newest_producer_id:
            what = f"its next producer id is {next_producer_id}, and was {newest_producer_id}"
            raise going_back(store, what, is_standby=store.backend.is_standby(connection))
        store.newest_producer_id = max(store.newest_producer_id, next_producer_id)

    return check


def going_back(store: Store, what: str, *, is_standby: bool = False) -> StoreCopied | StoreUnavailable:
    """Return what to raise where a store is an older state of itself, which does nothing any more from now on.

    A backup was restored, or a standby without the last commits has taken over: offsets, sequence numbers and topics
    that this program remembers may stand for something else there by now, or will.  A standby that still follows comes
    to what was seen before, so it is waited for.
    """
    if is_standby:
        return StoreUnavailable(f"the standby in {store.url} is behind what was read before: {what}")
    if store.gone_back is None:
        store.gone_back = (
            f"the store in {store.url} has gone back to an older state while this program ran, as by a backup that was"
            f" restored: {what}. Restart the program; what it had written or read since then may be missing there"
        )
        _log.error("%s", store.gone_back, extra={"event": "store_gone_back"})
    return StoreCopied(store.gone_back)


def check_not_standby(store: Store, connection: Connection) -> None:
    """Refuse to take what is not known here for what there is not: a standby may not have heard of it yet.

    Raises:
        StoreReadOnly: it is a standby.
    """
    if store.backend.is_standby(connection):
        raise StoreReadOnly(f"{store.url} is a standby, which may lag behind its primary: connect to the primary")


def check_not_adopted(store: Store, connection: Connection) -> None:
    """Refuse to act for a store that was given another identity since it was opened; nobody adopts it meanwhile.

    Raises:
        StoreCopied: it was.
    """
    _check_uuid(store, connection.execute(_SHARE).scalar_one())


def _check_uuid(store: Store, store_uuid: str | None) -> None:
    if store_uuid != store.store_uuid:
        raise StoreCopied(
            f"the store in {store.url} was given another identity while this program ran, or was replaced: restart the"
            " program"
        )


def _check(store: Store, actual: str | None, recorded: str | None, remedy: str) -> None:
    if actual is None:
        raise StoreCopied(
            f"this role may not call pg_control_system() in {store.url}, which tells whether its tables are a copy:"
            " GRANT EXECUTE ON FUNCTION pg_control_system() to it"
        )
    if recorded is not None and actual != recorded:
        raise StoreCopied(
            f"the tables in {store.url} were made in another place ({recorded}, this is {actual}): a copy must not"
            f" act for its original on other databases. {remedy}"
        )
