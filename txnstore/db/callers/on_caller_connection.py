"""Our statements within a database transaction of the caller's, on the caller's connection.

    callers = callers_connection(given)
    run_joined(store, callers, lambda connection: commit_offsets(connection, ...))

The statements are the same as on the store's own connections, with its names and its clock, and so are the errors.
Nothing is begun, committed, rolled back, closed or set: what `work` has done stands once the caller commits.  Waits
for locks are bounded by the connection's own settings, and locks are held until the caller's database transaction ends.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final, TypeVar

import psycopg
from sqlalchemy import Connection, column, select, text
from sqlalchemy.exc import DBAPIError

from txnstore.db.backend import Stage, WholeTransaction
from txnstore.db.callers.attached_files import check_one_commit
from txnstore.db.callers.connections import CallersConnection, unprepared
from txnstore.db.identity import is_own_database
from txnstore.db.names import SQLITE_PREFIX
from txnstore.db.postgresql import commit_function
from txnstore.db.schema import stores
from txnstore.db.statements import HotStatement, heard, run_on_driver
from txnstore.db.store import Store
from txnstore.errors import InvalidRequest, PermissionDenied, WriteConflict

Result = TypeVar("Result")

# Both ask in a way that raises no error anywhere: an error would spoil the caller's database transaction on PostgreSQL.
_HAS_TABLE: Final = {
    "postgresql": HotStatement(
        text(
            "SELECT EXISTS (SELECT FROM pg_catalog.pg_proc p WHERE p.pronamespace = n.oid"  # noqa: S608 - our own names
            f" AND p.proname = '{commit_function.NAME_WITHIN}' AND p.pronargs = {len(commit_function.TYPES_WITHIN)}"
            " AND pg_catalog.has_function_privilege(p.oid, 'EXECUTE')),"
            " pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_table_privilege(c.oid, 'SELECT')"
            " FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = :schema AND c.relname = 'stores'"
        ).columns(column("has_function"), column("may_read"))
    ),
    "sqlite": HotStatement(
        text(f"SELECT 0, 1 FROM main.sqlite_master WHERE type = 'table' AND name = '{SQLITE_PREFIX}stores'").columns(  # noqa: S608 - our own prefix
            column("has_function"), column("may_read")
        )
    ),
}
_STORE: Final = HotStatement(select(stores.c.store_uuid, stores.c.schema_version))

#: By driver's connection: the schema and uuid of the stores that were read through it, and whether the function that
#: commits whole transactions may be called on it.
_known: Final[weakref.WeakKeyDictionary[Any, dict[tuple[str, str], bool]]] = weakref.WeakKeyDictionary()


def run_joined(
    store: Store, callers: CallersConnection, work: Callable[[Connection], Result], *, why_there: str = ""
) -> Result:
    """Run `work` within the caller's database transaction, and return what it returned.

    Who hands over a connection to another database is told `why_there` it is to be done.

    After an error the caller has to roll back: a commit would keep what `work` had done until then.

    Raises:
        InvalidRequest: the connection cannot be used as it is, or is on another database than `store`, or on more
            SQLite files than it commits at once.
        TransactionPoisoned: the caller's database transaction has failed before.
        TxnStoreError: the database refuses; nothing of it is committed.
    """
    callers.check_usable()
    if not is_same_store(store, callers):
        raise InvalidRequest(
            f"this connection is on another database than {store.url}{why_there}: hand over a connection to the same"
            " database"
        )
    if callers.backend_name == "sqlite":
        _run(store, callers, check_files)
    return _run(store, callers, work)


def is_same_store(store: Store, callers: CallersConnection) -> bool:
    """Return whether the connection reaches the tables of this very store; the connection must be usable.

    Raises:
        PermissionDenied: it is the same database, and its role may not read them.
        TxnStoreError: the database cannot be asked, or nothing is done there any more (`Store.check_usable`).
    """
    store.check_usable()
    if callers.backend_name != store.backend.name:
        return False
    # A connection stays where it is: it is asked once. (SQLite's C type cannot be remembered, and is quick to ask.)
    driver = getattr(callers.driver, "driver_connection", callers.driver)
    this = (store.schema, store.store_uuid)
    is_lasting = callers.backend_name == "postgresql"
    if is_lasting and this in _known.get(driver, ()):
        return True
    has_function = False

    def is_same(connection: Connection) -> bool:
        nonlocal has_function
        found = _HAS_TABLE[store.backend.name].row(connection, {"schema": store.schema} if is_lasting else {})
        if found is None:
            return False
        if not found.may_read:
            # What is not read cannot be told from another store; but the server is asked which database it is.
            if is_own_database(store, connection):
                raise PermissionDenied(
                    f"the role of this connection may not read {store.schema}.stores in {store.url}, where the log is:"
                    " it needs the rights of a producer (`txnstore roles grant producer`; USAGE on the schema, SELECT"
                    " on that table and more), or hand over a connection of a role that has them"
                )
            return False
        has_function = found.has_function
        # A copy of the database has the same uuid.
        return _read_store_uuid(connection) == store.store_uuid and is_own_database(store, connection)

    if not _run(store, callers, is_same):
        return False
    if is_lasting:
        _known.setdefault(driver, {})[this] = has_function
    return True


def commit_whole_within(
    store: Store, callers: CallersConnection, connection: Connection, name: str, whole: WholeTransaction
) -> list[int] | None:
    """Call the function that commits a whole transaction, in the caller's database transaction of this name.

    Returns what `Store.commit_whole` returns.  None: nothing was changed, perhaps because it is another one by now.

    Raises:
        DBAPIError: it failed; the database transaction can only be rolled back.
    """
    this = (store.schema, store.store_uuid)
    driver = getattr(callers.driver, "driver_connection", callers.driver)
    if not _known.get(driver, {}).get(this, False):
        return None
    try:
        parameters = commit_function.arguments_within(name, whole, store.limits, store.clock)
    except (ValueError, struct.error):
        return None
    statement = commit_function.call_function_within(store.schema)
    try:
        with heard(connection, statement):
            answer = callers.call(statement, parameters, commit_function.TYPES_WITHIN)
    except psycopg.Error as error:
        # If this role is another one now, it is asked again what it may do.
        _known.pop(driver, None)
        raise DBAPIError(statement, None, error, hide_parameters=True) from None
    return None if answer is None else commit_function.places_of(answer)


def _read_store_uuid(connection: Connection) -> str | None:
    row = _STORE.row(connection)
    if row is None:
        return None
    if type(row.store_uuid) is not str or type(row.schema_version) is not int:
        raise InvalidRequest(
            "this connection turns columns into types of its own (sqlite3's detect_types with a converter for TEXT"
            " or INTEGER): hand over one that does not"
        )
    return row.store_uuid


def _run(store: Store, callers: CallersConnection, work: Callable[[Connection], Result]) -> Result:
    with joined_connection(store, callers) as connection:
        return work(connection)


def check_files(connection: Connection) -> None:
    """Refuse an SQLite connection whose files are not all committed at once.

    Raises:
        InvalidRequest: see `check_one_commit`.
    """
    check_one_commit(lambda statement: run_on_driver(connection, statement).rows)


@contextmanager
def joined_connection(
    store: Store, callers: CallersConnection, stage: Callable[[], Stage] = lambda: Stage.STATEMENT
) -> Iterator[Connection]:
    """Give the caller's connection as one of the store's, without asking what it is; errors become TxnStoreErrors.

    `stage` says how far the database transaction had come when an error struck.
    """
    driver = getattr(callers.driver, "driver_connection", callers.driver)
    handle: Any = _Handle(callers)
    with unprepared(driver) if callers.backend_name == "postgresql" else nullcontext():
        # The store's own engine: its dialect, its events and its compiled statements; its pool is not asked.
        connection = Connection(store.engine, connection=handle)
        try:
            yield connection
        except DBAPIError as error:
            told = store.backend.translate(error, stage())
            # Who repeats database transactions goes by the driver's error, whose text has no values then.
            raise told from error if isinstance(told, WriteConflict) else None
        finally:
            # SQLAlchemy's view of it ends; at the driver it ends nothing.
            if (transaction := connection.get_transaction()) is not None:
                transaction.rollback()
            connection.close()


class _Handle:
    """What SQLAlchemy takes for a connection from its pool: whatever would end something does nothing."""

    is_valid = True
    is_detached = False

    def __init__(self, callers: CallersConnection) -> None:
        self._callers = callers
        self.info: dict[Any, Any] = {}
        self.record_info: dict[Any, Any] = {}
        self.dbapi_connection = self.driver_connection = callers.driver

    @property
    def closed(self) -> bool:
        return self._callers.is_closed

    @property
    def broken(self) -> bool:
        return self._callers.is_closed

    def cursor(self, *_: Any, **__: Any) -> Any:
        return self._callers.cursor()

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Leave it to the caller."""

    commit = rollback = close = invalidate = detach = reset = _nothing
