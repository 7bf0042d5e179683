"""The opening of a store: the first look at a database, and its tables if there are none yet."""

from __future__ import annotations

import enum
import logging
import random
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, insert, literal_column, select
from sqlalchemy.dialects.sqlite import insert as upsert
from sqlalchemy.exc import DBAPIError

from txnstore.clock import Clock
from txnstore.db import migrating
from txnstore.db.backend import Backend, Limits
from txnstore.db.closing import Move, move_of, refuse
from txnstore.db.identity import check_same_store, record_identity
from txnstore.db.names import DEFAULT_SCHEMA, VERSION_TABLE, VIEWS
from txnstore.db.schema import (
    OLDEST_WRITER_VERSION,
    SCHEMA_VERSION,
    databases,
    metadata,
    outbox_sequencers,
    partitions,
    stores,
)
from txnstore.db.store import Store, server_now_ms
from txnstore.db.url import CurrentOptions, parse_url
from txnstore.errors import (
    ForeignSchema,
    InvalidUrl,
    PermissionDenied,
    SchemaOutdated,
    SchemaTooNew,
    StoreReadOnly,
    TxnStoreError,
)
from txnstore.late_import import collecting_later

_log: Final = logging.getLogger(__name__)

_OUR_TABLES: Final = frozenset(str(table.name) for table in metadata.tables.values())
_OUR_NAMES: Final = _OUR_TABLES | {VERSION_TABLE, *VIEWS}
#: What PostgreSQL keeps of an identifier; it cuts a longer one silently.
_IDENTIFIER_BYTES: Final = 63
#: The number of a new store's first partition is one up to this, by chance.
FIRST_PARTITION_ID_MAX = (1 << 31) - 1

#: How long a process that finds another at the tables of an SQLite file waits for it, however short its other tries.
CREATE_TIMEOUT_MS: Final = 10_000

# Somebody else's table of this name has other columns, and asking for ours would only be an error.
_ANY_COLUMNS: Final[Select[Any]] = select(literal_column("*"))
# Of two that upgrade at once, the second waits here and then finds nothing left to do.
_LOCK_VERSION: Final = select(migrating.version_table.c.version_num).with_for_update()
# DO NOTHING: of two that find the tables without a store, the second waits for the first and takes the same one.
_INSERT_STORE: Final = (
    upsert(stores)
    .values(
        singleton=1,
        schema_version=SCHEMA_VERSION,
        oldest_writer_version=OLDEST_WRITER_VERSION,
        next_producer_id=0,
        created_ms=server_now_ms(),
    )
    .on_conflict_do_nothing(index_elements=[stores.c.singleton])
)
_INSERT_SEQUENCER: Final = insert(outbox_sequencers).values(singleton=1, sequenced_count=0)
_STORE_UUID: Final = select(stores.c.store_uuid)
_ANY_DATABASE: Final = select(databases.c.database_id).limit(1)
# Alone, a database is a cluster of one.
_INSERT_DATABASE: Final = (
    upsert(databases)
    .values(database_id=1, label="main", coordinates=True, catalogue_version=0)
    .on_conflict_do_nothing(index_elements=[databases.c.database_id])
)


def backend_of(kind: str) -> Backend:
    """Return what speaks to databases of this kind; the drivers of others are not imported."""
    if kind == "sqlite":
        with collecting_later():
            from txnstore.db.sqlite.backend import SQLiteBackend
        return SQLiteBackend()
    with collecting_later():
        from txnstore.db.postgresql.backend import PostgreSQLBackend
    return PostgreSQLBackend()


class Found(enum.Enum):
    """What stands where our tables would be."""

    NOTHING = "nothing"
    TABLES = "tables without a store: made by SQL that `txnstore migrate --sql` printed"
    STORE = "a store"
    FOREIGN = "something else"


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What the first look saw."""

    found: Found
    schema_version: int = 0
    store_uuid: str = ""
    why_foreign: str = ""
    move: Move | None = None
    """Where the store has gone, or comes from; None: it is in use."""

    made_beside: Sequence[str] | None = None
    """The schemas that held a store when this client made it; None: it was there."""


def check_schema_name(schema: object) -> None:
    """Refuse a name that PostgreSQL would cut, or that is a part of PostgreSQL.

    Raises:
        InvalidUrl: the name cannot be the schema of a store.
    """
    if not isinstance(schema, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", schema):
        raise InvalidUrl(
            "the schema's name is made of letters, digits and underscores, and does not begin with a digit"
        )
    if len(schema) > _IDENTIFIER_BYTES:
        raise InvalidUrl(f"the schema's name is longer than PostgreSQL's {_IDENTIFIER_BYTES} bytes")
    if schema.lower().startswith("pg_") or schema.lower() == "information_schema":
        raise InvalidUrl(f"the schema {schema} belongs to PostgreSQL itself; choose another one")


def connect_store(
    url: str,
    *,
    schema: str = DEFAULT_SCHEMA,
    clock: Clock | None = None,
    limits: Limits | None = None,
    pool_size: int = 5,
    current_options: CurrentOptions | None = None,
) -> Store:
    """Return a store on the database at `url` before anybody has looked at it: for those who look after its tables.

    Raises:
        InvalidUrl: the URL cannot be understood or names no database.
    """
    address = replace(parse_url(url), current_options=current_options)
    check_schema_name(schema)
    backend = backend_of(address.kind)
    limits = limits or Limits()
    engine = backend.create_engine(address, schema=schema, clock=clock, limits=limits, pool_size=pool_size)
    return Store(backend, address, engine, schema=schema, limits=limits, clock=clock)


def open_store(
    url: str,
    *,
    schema: str = DEFAULT_SCHEMA,
    clock: Clock | None = None,
    limits: Limits | None = None,
    pool_size: int = 5,
    create: bool = True,
    moving: bool = False,
    current_options: CurrentOptions | None = None,
) -> Store:
    """Open the store in the database at `url`; an empty database gets its tables first.

    `schema` names the PostgreSQL schema that holds the tables.  `clock` stands in for the database server's clock.
    Several processes may open an empty database at once: one creates the tables, the others wait for it.
    `moving` is for those who look after a store that has gone elsewhere, or is being filled.  `current_options` are
    what each connection to PostgreSQL is given besides the URL.

    Raises:
        InvalidUrl: the URL cannot be understood or names no database.
        StoreMoved: it has gone elsewhere, or is being filled.
        SchemaOutdated, SchemaTooNew, ForeignSchema: the tables there are not those of this version.
        TxnStoreError: the database cannot be reached or refuses.
    """
    store = connect_store(
        url, schema=schema, clock=clock, limits=limits, pool_size=pool_size, current_options=current_options
    )
    try:
        store.store_uuid = ensure_tables(store, create=create, moving=moving)
        if not moving:
            # A store that moves changes its uuid.
            store.check_new_connection = check_same_store
        store.prepare_announcements()
    except BaseException:
        store.close()
        raise
    return store


def ensure_tables(store: Store, *, create: bool, moving: bool = False) -> str:
    """Return the uuid of the store, whose tables are there and of this version; create them in an empty database.

    Raises:
        StoreMoved: the store has gone elsewhere, or is being filled; not with `moving`.
        SchemaOutdated, SchemaTooNew, ForeignSchema: the tables there are not those of this version.
        TxnStoreError: the database refuses or cannot be reached.
    """
    is_there = create or store.backend.exists(store.url)
    finding = look(store) if is_there else FirstLook(Found.NOTHING)
    if finding.found is Found.NOTHING:
        if not create:
            if store.url.is_in_memory:
                raise SchemaOutdated(f"{store.url} is a database in memory, which never holds a store from before")
            others = store.read(store.backend.schemas_of_stores) if is_there else []
            what = f"has no tables of txnstore{_in_schema(store, others)}" if is_there else "leads to no file"
            raise SchemaOutdated(f"{store.url} {what}; run `txnstore migrate` on it to make a store there")
        finding = _create(store)
        if finding.made_beside is not None:
            _tell_of_new(store, finding.store_uuid, finding.made_beside)
    _check(store, finding)
    if finding.found is Found.TABLES:
        return store.write(lambda connection: _enter_store(store, connection))
    if finding.move is not None and not moving:
        raise refuse(store.url, finding.move)
    return finding.store_uuid


def look(store: Store) -> FirstLook:
    """Return what stands where our tables would be.

    Raises:
        InvalidUrl: the database cannot hold a store at all.
    """

    def work(connection: Connection) -> FirstLook:
        store.backend.check_database(connection, _OUR_NAMES)
        return _look(store, connection)

    return store.read(work)


def upgrade(store: Store) -> FirstLook:
    """Bring the tables to this version, from whatever they are, and return what was there before.

    Raises:
        SchemaTooNew, ForeignSchema: the tables are not ours to change.
    """
    before = look(store)
    if before.found is Found.NOTHING:
        _check(store, _create(store))
    elif before.found is Found.FOREIGN or before.schema_version > SCHEMA_VERSION:
        _check(store, before)
    elif before.schema_version < SCHEMA_VERSION:
        store.write(lambda connection: _upgrade(store, connection))
    # Tables that were made by printed SQL get their store.
    ensure_tables(store, create=False, moving=True)
    return before


def _look(store: Store, connection: Connection) -> FirstLook:
    names = store.backend.table_names(connection, store.schema) & _OUR_NAMES
    if not names:
        return FirstLook(Found.NOTHING)
    if not {"stores", VERSION_TABLE} <= names:
        return _foreign("txnstore did not make them")
    hidden = store.backend.hidden_tables(connection, store.schema) & _OUR_NAMES
    if hidden:
        raise PermissionDenied(
            f"this role may read {', '.join(sorted(hidden))} in {store.url}, but row-level security is on there, and no"
            " policy shows it any row: it would take these tables for empty. Nothing was changed. If the role is to use"
            " them, let the owner of the tables grant it its kind (`txnstore roles grant`); if not, revoke its right"
            " to read them, which it may also have by a membership such as pg_read_all_data. Switching"
            " row-level security off there would lift the limits of all roles"
        )
    try:
        return _look_inside(connection, names)
    except DBAPIError as error:
        refused = store.translated(error)
        if isinstance(refused, PermissionDenied):
            raise PermissionDenied(
                f"{refused}. Let the owner of the tables grant this role its kind: `txnstore roles grant`"
            ) from error
        raise


def _look_inside(connection: Connection, names: frozenset[str]) -> FirstLook:
    version = _read_version(connection)
    if version is None:
        return _foreign("they record no version of txnstore")
    if version == SCHEMA_VERSION and (missing := _OUR_TABLES - names):
        return _foreign(f"some are missing: {', '.join(sorted(missing))}")
    rows = connection.execute(_ANY_COLUMNS.select_from(stores)).all()
    if not rows:
        return _without_store(connection, version)
    if len(rows) > 1 or not _is_store(rows[0], version):
        return _foreign("the table stores is not as txnstore writes it")
    # An older version's tables may lack the mark.
    move = move_of(rows[0]) if version == SCHEMA_VERSION else None
    return FirstLook(Found.STORE, version, str(rows[0].store_uuid), move=move)


def _without_store(connection: Connection, version: int) -> FirstLook:
    """Tell tables that have never had a store from those that have lost its row, which has a log to be told apart."""
    if version != SCHEMA_VERSION or connection.execute(_ANY_DATABASE).first() is None:
        return FirstLook(Found.TABLES, version)
    # Entered with the row of the store, which may have come since we looked for it.
    if connection.execute(_STORE_UUID).first() is not None:
        return FirstLook(Found.TABLES, version)
    return _foreign("the row of `stores` is missing, though there is a store: restore it from a backup")


def _foreign(why: str) -> FirstLook:
    return FirstLook(Found.FOREIGN, why_foreign=why)


def _read_version(connection: Connection) -> int | None:
    rows = connection.execute(_ANY_COLUMNS.select_from(migrating.version_table)).all()
    name = getattr(rows[0], "version_num", None) if len(rows) == 1 else None
    return int(name) if isinstance(name, str) and re.fullmatch(r"[0-9]{4}", name) else None


def _is_store(row: Row[Any], version: int) -> bool:
    wanted: tuple[str, ...] = ("store_uuid", "schema_version", "oldest_writer_version", "next_producer_id")
    if version == SCHEMA_VERSION:
        wanted += ("move_state", "move_uuid", "move_peer", "move_position")
    return all(hasattr(row, name) for name in wanted) and bool(row.schema_version == version)


def _check(store: Store, finding: FirstLook) -> None:
    if finding.found is Found.FOREIGN:
        hint = "; open the store with another schema" if store.backend.name == "postgresql" else ""
        raise ForeignSchema(
            f"{store.url} has tables with the same names as txnstore's, but {finding.why_foreign}{hint}"
        )
    if finding.schema_version > SCHEMA_VERSION:
        raise SchemaTooNew(
            f"the tables in {store.url} are of version {finding.schema_version},"
            f" this txnstore knows {SCHEMA_VERSION}; upgrade the package"
        )
    if finding.schema_version < SCHEMA_VERSION:
        raise SchemaOutdated(
            f"the tables in {store.url} are of version {finding.schema_version}, this txnstore needs"
            f" {SCHEMA_VERSION}; run `txnstore migrate` on it"
        )


def _in_schema(store: Store, others: Sequence[str]) -> str:
    """Return in which schema, where the database has such, and in which other ones there are stores."""
    if store.backend.name != "postgresql":
        return ""
    has = f" (there is a store in {', '.join(others)})" if others else ""
    return f" in the schema {store.schema}{has}"


def _tell_of_new(store: Store, store_uuid: str, others: Sequence[str]) -> None:
    """Say once that there is a new store: its address may be that of another one, mistyped.

    Where the database has one in another schema that is more likely, and a warning.
    """
    _log.log(
        logging.WARNING if others else logging.INFO,
        "made a new store in %s%s",
        store.url,
        _in_schema(store, others),
        extra={"event": "store_made", "store": store_uuid},
    )


def _create(store: Store) -> FirstLook:
    """Create the tables, or wait for a process that is doing so."""
    try:
        retry_timeout_ms = max(CREATE_TIMEOUT_MS, store.limits.retry_timeout_ms)
        return store.write(lambda connection: _create_if_empty(store, connection), retry_timeout_ms=retry_timeout_ms)
    except StoreReadOnly:
        raise
    except TxnStoreError as error:
        # PostgreSQL lets two creators begin and fails the second one when the first commits.
        finding = look(store)
        if finding.found is not Found.NOTHING:
            return finding
        if isinstance(error, PermissionDenied):
            raise PermissionDenied(
                f"{error}. There is no store in {store.url} yet: run `txnstore migrate` as a role that may make one"
                f" there, or let the owner of the database CREATE SCHEMA {store.schema} AUTHORIZATION this role"
            ) from error
        raise


def _create_if_empty(store: Store, connection: Connection) -> FirstLook:
    # On SQLite a second creator comes here once the first has committed, and finds its tables.
    finding = _look(store, connection)
    if finding.found is not Found.NOTHING:
        return finding
    others = store.backend.schemas_of_stores(connection)
    store.backend.prepare_place(connection, store.schema)
    _make_tables(connection)
    # A client of another store that stood here before knows partitions by numbers that this one does not give out.
    store.backend.set_next_key(
        connection,
        store.schema,
        partitions.name,
        partitions.c.partition_id.name,
        random.SystemRandom().randint(1, FIRST_PARTITION_ID_MAX),
    )
    return FirstLook(Found.STORE, SCHEMA_VERSION, _enter_store(store, connection), made_beside=others)


def _make_tables(connection: Connection) -> None:
    """Make the tables as all migrations do, where there are none.

    Without Alembic: a migration has its context from Alembic's module variables, and one of the application's may be
    running, in this thread or another one.
    """
    metadata.create_all(connection, checkfirst=False)
    migrating.make_version_table(connection, SCHEMA_VERSION)
    connection.execute(_INSERT_SEQUENCER)


def _enter_store(store: Store, connection: Connection) -> str:
    """Give the tables their store, unless somebody else just did; return its uuid."""
    connection.execute(_INSERT_STORE, {"store_uuid": str(uuid.uuid4())})
    record_identity(store, connection)
    store_uuid: str = connection.execute(_STORE_UUID).scalar_one()
    connection.execute(_INSERT_DATABASE, {"store_uuid": store_uuid})
    return store_uuid


def _upgrade(store: Store, connection: Connection) -> None:
    connection.execute(_LOCK_VERSION)
    if _look(store, connection).schema_version < SCHEMA_VERSION:
        migrating.upgrade(connection, kind=store.backend.name, schema=store.schema)
        record_identity(store, connection)
