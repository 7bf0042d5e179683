"""The identity of a store: whether its tables are where they were made, or are a copy that must not act for them.

A dump that was restored elsewhere and a copied file hold the store's uuid as well.  Records are produced to them and
consumed from them as from any other.  But what reaches out to other databases in the name of that uuid would end the
original's prepared branches, and write to the members of the original's cluster.  So that is refused until `txnstore
adopt` has given the copy a uuid of its own, or has been told that it is the original, moved.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, select, update

from txnstore.db.schema import stores
from txnstore.db.store import Store
from txnstore.errors import StoreCopied

_READ: Final = select(stores.c.store_uuid, stores.c.database_identity)
# An adoption either comes before it and is seen, or after it and sees what was done. FOR KEY SHARE lets new producer
# ids through, which only update the row.
_SHARE: Final = select(stores.c.store_uuid).with_for_update(read=True, key_share=True)
_RECORD: Final = update(stores).where(stores.c.database_identity.is_(None))


def record_identity(store: Store, connection: Connection) -> None:
    """Write down which database the store is in, if nobody has and this role may know."""
    identity = store.backend.identity(connection)
    if identity is not None:
        connection.execute(_RECORD.values(database_identity=identity))


def check_original(store: Store) -> None:
    """Refuse to go on if the store's tables are a copy; those that were never asked are taken for the original.

    Raises:
        StoreCopied: they are a copy, or were moved, or nobody can tell.
        TxnStoreError: the database cannot be asked.
    """

    def is_recorded(connection: Connection) -> bool:
        store_uuid, recorded = connection.execute(_READ).one()
        _check_uuid(store, store_uuid)
        if recorded is not None:
            _check(store, store.backend.identity(connection), recorded)
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
    if store.identity is None:
        store.identity = store.read(store.backend.identity)
    identities = {store.identity, store.backend.identity(connection)}
    # If one of the two roles may not ask, all that is known is that the store's uuid is the same.
    return None in identities or len(identities) == 1


def check_not_adopted(store: Store, connection: Connection) -> None:
    """Refuse to act for a store that was given another identity since it was opened; nobody adopts it meanwhile.

    Raises:
        StoreCopied: it was.
    """
    _check_uuid(store, connection.execute(_SHARE).scalar_one())


def _check_uuid(store: Store, store_uuid: str) -> None:
    if store_uuid != store.store_uuid:
        raise StoreCopied(
            f"the store in {store.url} was given another identity while this program ran: restart the program"
        )


def _check(store: Store, actual: str | None, recorded: str) -> None:
    if actual is None:
        raise StoreCopied(
            f"this role may not call pg_control_system() in {store.url}, which tells whether its tables are a copy:"
            " GRANT EXECUTE ON FUNCTION pg_control_system() to it"
        )
    if actual != recorded:
        raise StoreCopied(
            f"the tables in {store.url} were made in another database ({recorded}, this is {actual}): a copy must not"
            " act for its original on other databases. Run `txnstore adopt` on it, or, if the original is gone for"
            " good and this is what became of it, `txnstore adopt --same`"
        )
