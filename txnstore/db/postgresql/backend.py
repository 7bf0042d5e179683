"""PostgreSQL's side of the seam: settings that live in one database transaction, COMMIT's tag, SQLSTATEs.

Nothing depends on the state of a session: between two database transactions a pooler such as pgbouncer may give us
another server connection.  So settings are SET LOCAL, sent together with BEGIN, and statements are not prepared.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, Text, column, create_engine, event, select, table, text
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql.psycopg import (
    PGCompiler_psycopg,
    PGDialect_psycopg,
    PGIdentifierPreparer_psycopg,
)
from sqlalchemy.exc import DBAPIError

from txnstore.clock import Clock
from txnstore.db.backend import Access, Durability, Holder, Limits, NoWholeCommits, Stage, Subjects, WholeTransaction
from txnstore.db.names import CODE_SCHEMA, DEFAULT_SCHEMA, VERSION_TABLE
from txnstore.db.postgresql import commit_function
from txnstore.db.postgresql.closing import CLOSED
from txnstore.db.postgresql.connecting import connecting_error
from txnstore.db.postgresql.connections import ListenWaiter, NotifyAnnouncer, PostgreSQLConnection
from txnstore.db.postgresql.protection import warn_of_unverified
from txnstore.db.postgresql.row_security import HIDDEN, NARROWED
from txnstore.db.statements import CompiledStatements, heard, run_on_driver
from txnstore.db.url import DatabaseUrl
from txnstore.errors import (
    ForeignSchema,
    InvalidUrl,
    OutcomeUnknown,
    PermissionDenied,
    StatementFailed,
    StatementTimedOut,
    StoreBusy,
    StoreDamaged,
    StoreFull,
    StoreMoved,
    StoreReadOnly,
    StoreUnavailable,
    TransactionPoisoned,
    TxnStoreError,
    WriteConflict,
)

#: By SQLSTATE, or by its first two characters: https://www.postgresql.org/docs/current/errcodes-appendix.html
ERRORS_BY_SQLSTATE: Final[dict[str, type[TxnStoreError]]] = {
    "08": StoreUnavailable,  # connection exceptions
    "25001": StatementFailed,  # a database transaction is open already
    "25006": StoreReadOnly,
    "25P02": TransactionPoisoned,
    "25P03": StoreUnavailable,  # idle for too long within a database transaction: the session is gone
    "25P04": StoreUnavailable,  # transaction_timeout: the session is gone
    "28": PermissionDenied,  # wrong password, or no access at all
    "3D000": InvalidUrl,  # there is no such database
    "3F000": ForeignSchema,  # there is no such schema
    "40001": WriteConflict,
    "40003": StoreUnavailable,  # statement completion unknown, says a proxy in between
    "40P01": WriteConflict,  # deadlock
    "42501": PermissionDenied,
    "42703": ForeignSchema,  # a column is missing
    "42P01": ForeignSchema,  # a table is missing
    "53100": StoreFull,
    "53": StoreUnavailable,  # out of memory or of connections
    "55P03": StoreBusy,  # lock_timeout
    "57014": StatementTimedOut,
    "57P": StoreUnavailable,  # the server shuts down, starts up or crashed
    "58": StoreUnavailable,  # the server's own disk failed
    CLOSED: StoreMoved,
    "XX001": StoreDamaged,
    "XX002": StoreDamaged,
}
#: Prefixes of SQLSTATEs that, at COMMIT, leave it open whether the server committed.
UNKNOWN_AT_COMMIT: Final = ("08", "25P03", "25P04", "40003", "57P", "58", "XX")

#: How PostgreSQL names the severity of what ends the session, or all of them: whatever the SQLSTATE, a COMMIT may stand
#: all the same. Without room for its log (53100) the server stops after what it has written, and recovers that.
_ENDS_SESSION: Final = frozenset({"FATAL", "PANIC"})

#: The class of errors whose primary line quotes the value that was refused.
DATA_EXCEPTION: Final = "22"
#: As PostgreSQL counts: 14.0.
OLDEST_SERVER_VERSION: Final = 140_000

#: Commits wait for the disk although the role or the database says that they need not; `local` waits for it, too, and
#: what waits for standbys besides is left as it is.  For the database transaction that is open.
MAKE_DURABLE: Final = (
    "SELECT pg_catalog.set_config('synchronous_commit', 'on', true)"
    " WHERE pg_catalog.current_setting('synchronous_commit') OPERATOR(pg_catalog.=) 'off'"
)

#: The first version with transaction_timeout; before it, the server asks the network whether the client is there.
_HAS_TRANSACTION_TIMEOUT: Final = 170_000

_MAY_IDENTIFY: Final = text("SELECT pg_catalog.has_function_privilege('pg_catalog.pg_control_system()', 'execute')")
# The number of the cluster is the same after a failover to its standby, and another one after a dump is restored.
IDENTIFY: Final = (
    "SELECT (SELECT system_identifier::text FROM pg_catalog.pg_control_system()), oid::text"
    " FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()"
)
# A copy within the database has other tables. It keeps its number when it, or its schema, is renamed.
_PLACE: Final = select(column("tableoid").cast(Text)).select_from(table("stores", schema=CODE_SCHEMA))
# For those who may not call pg_control_system(): no two servers have come up within the same microsecond.
_RUNNING: Final = (
    "SELECT EXTRACT(EPOCH FROM pg_catalog.pg_postmaster_start_time())::pg_catalog.text, oid::pg_catalog.text"
    " FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()"
)

_SIZES: Final = (
    "SELECT pg_database_size(current_database()), sum(pg_total_relation_size(oid))"
    " FROM pg_catalog.pg_class WHERE relkind = 'r' AND relnamespace ="
    " (SELECT oid FROM pg_catalog.pg_namespace WHERE nspname = %s)"
)
_SCHEMAS: Final = text(
    "SELECT n.nspname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
    " WHERE c.relname = ANY(CAST(:names AS pg_catalog.text[])) AND c.relkind = 'r'"
    " GROUP BY n.nspname HAVING count(*) = 2 ORDER BY n.nspname"
)
_SEQUENCE: Final = text("SELECT pg_catalog.pg_get_serial_sequence(:of_table, :of_column)")
_CHECKED: Final = text(
    "SELECT i.relname FROM pg_catalog.pg_extension e"
    " JOIN pg_catalog.pg_proc f ON f.pronamespace = e.extnamespace AND f.proname = 'bt_index_check' AND f.pronargs = 2"
    " AND pg_catalog.has_function_privilege(f.oid, 'EXECUTE'),"
    " pg_catalog.pg_namespace n JOIN pg_catalog.pg_class i ON i.relnamespace = n.oid AND i.relkind = 'i'"
    " JOIN pg_catalog.pg_am a ON a.oid = i.relam AND a.amname = 'btree'"
    " JOIN pg_catalog.pg_index x ON x.indexrelid = i.oid AND x.indisvalid AND x.indisready"
    " WHERE e.extname = 'amcheck' AND n.nspname = :schema ORDER BY i.relname"
)
# With the extension's own schema, wherever that is.
_CHECK: Final = text(
    "SELECT pg_catalog.format('SELECT %I.bt_index_check(CAST(%s AS pg_catalog.oid), true)', m.nspname, i.oid)"
    " FROM pg_catalog.pg_extension e JOIN pg_catalog.pg_namespace m ON m.oid = e.extnamespace,"
    " pg_catalog.pg_namespace n JOIN pg_catalog.pg_class i ON i.relnamespace = n.oid"
    " WHERE e.extname = 'amcheck' AND n.nspname = :schema AND i.relname = :name"
)
# A segment is known by the whole that it is a part of. PostgreSQL 18 says attnotnull as well of what rows of before
# may not meet, and has a constraint for it, which is not validated then.
_RULES: Final = text("""
    SELECT c.relname, coalesce(w.relname, c.relname), ARRAY(
        SELECT concat('NOT NULL ', a.attname) FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND a.attnotnull AND NOT a.attisdropped AND NOT EXISTS (
            SELECT FROM pg_constraint k
            WHERE k.conrelid = c.oid AND k.contype = 'n' AND k.conkey[1] = a.attnum AND NOT k.convalidated
        )
        UNION ALL SELECT concat('IDENTITY ', a.attname) FROM pg_attribute a
        WHERE a.attrelid = c.oid AND a.attidentity <> '' AND NOT a.attisdropped
        UNION ALL SELECT concat(CASE k.contype WHEN 'c' THEN 'CHECK ' ELSE 'UNIQUE ' END, k.conname)
        FROM pg_constraint k WHERE k.conrelid = c.oid AND k.contype IN ('c', 'u') AND k.convalidated
        UNION ALL SELECT concat('PRIMARY KEY (', string_agg(a.attname, ', ' ORDER BY o.place), ')')
        FROM pg_constraint k, unnest(k.conkey) WITH ORDINALITY AS o (attnum, place), pg_attribute a
        WHERE k.conrelid = c.oid AND k.contype = 'p' AND a.attrelid = c.oid AND a.attnum = o.attnum
        GROUP BY k.oid
    )
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_inherits i ON i.inhrelid = c.oid LEFT JOIN pg_class w ON w.oid = i.inhparent
    WHERE n.nspname = :schema AND c.relkind = 'r' ORDER BY c.relname
""")
_MAY_READ_SEQUENCE: Final = text("SELECT pg_catalog.has_sequence_privilege(CAST(:sequence AS regclass), 'SELECT')")
_SET_SEQUENCE: Final = text("SELECT pg_catalog.setval(CAST(:sequence AS regclass), :key, false)")

#: There is no function of this name and with these parameters, or this role may not call it.
_NO_FUNCTION: Final = frozenset({"42883", "42501"})


class _StorePreparer(PGIdentifierPreparer_psycopg):
    """Puts the configured schema in the place of the one that stands in the code."""

    def schema_for_object(self, obj: Any) -> str | None:  # type: ignore[override]  # declared as an attribute
        dialect: Any = self.dialect
        schema: str | None = dialect.store_schema if obj.schema == CODE_SCHEMA else obj.schema
        return schema


#: 180004 is version 18.4.
_VERSION_OF_MAJOR: Final = 10_000


class _StoreCompiler(PGCompiler_psycopg):
    """Renders the upserts of SQLite's dialect, of which ours are made: nobody on SQLite imports PostgreSQL's for them.

    The syntax is the same, but that PostgreSQL's may name a constraint.
    """

    def visit_on_conflict_do_nothing(self, on_conflict: Any, **keywords: Any) -> Any:
        """Render ON CONFLICT DO NOTHING."""
        vars(on_conflict).setdefault("constraint_target", None)
        untyped: Any = super()
        return untyped.visit_on_conflict_do_nothing(on_conflict, **keywords)

    def visit_on_conflict_do_update(self, on_conflict: Any, **keywords: Any) -> Any:
        """Render ON CONFLICT DO UPDATE."""
        vars(on_conflict).setdefault("constraint_target", None)
        untyped: Any = super()
        return untyped.visit_on_conflict_do_update(on_conflict, **keywords)


class StorePostgreSQLDialect(PGDialect_psycopg):
    """SQLAlchemy's own dialect with our schema and our clock."""

    preparer = _StorePreparer
    statement_compiler = _StoreCompiler
    supports_statement_cache = True
    store_schema = DEFAULT_SCHEMA
    clock: Clock | None = None

    def _get_server_version_info(self, connection: Connection) -> tuple[int, int]:
        """Return what the server has said of itself when the connection was made; SQLAlchemy would ask it again."""
        return divmod(_driver_connection(connection).info.server_version, _VERSION_OF_MAJOR)

    def get_default_isolation_level(self, dbapi_conn: Any) -> Any:
        """Return one without asking: nobody goes back to it, each transaction names its own."""
        return "READ COMMITTED"

    def _set_backslash_escapes(self, connection: Connection) -> None:
        """Go by what the server has said as well; a later SET is not ours."""
        said = _driver_connection(connection).info.parameter_status("standard_conforming_strings")
        self._backslash_escapes = said == "off"

    def _get_default_schema_name(self, connection: Connection) -> Any:
        """Ask as SQLAlchemy does, but not a stranger's function that the role's search path may find first."""
        return connection.exec_driver_sql("SELECT pg_catalog.current_schema()").scalar()

    def do_execute(self, cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
        """Run a statement; with the option `binary_rows` its rows come in PostgreSQL's binary form.

        The answer ROLLBACK to COMMIT, which comes without an error, is refused.
        """
        if context is not None and context.execution_options.get("binary_rows"):
            cursor.execute(statement, parameters, binary=True)
            return
        cursor.execute(statement, parameters)
        if statement == "COMMIT" and cursor.statusmessage != "COMMIT":
            raise TransactionPoisoned(f"PostgreSQL answered COMMIT with {cursor.statusmessage}; nothing was changed")

    def connect(self, *arguments: Any, **options: Any) -> PostgreSQLConnection:  # type: ignore[override]  # it is one
        """Return a new connection, whose waits are bounded."""
        return PostgreSQLConnection.connect(*arguments, **options)


registry.register("postgresql.txnstore", __name__, "StorePostgreSQLDialect")


class PostgreSQLBackend:
    """PostgreSQL 14 and newer."""

    name = "postgresql"
    has_one_writer = False
    keeps_prepared = True
    every_commit_wakes_readers = False

    def create_engine(
        self, url: DatabaseUrl, *, schema: str, clock: Clock | None, limits: Limits, pool_size: int
    ) -> Engine:
        """Return an engine that keeps no state in sessions."""
        warn_of_unverified(url)
        engine = create_engine(
            url.url.set(drivername="postgresql+txnstore"),
            pool_size=pool_size,
            max_overflow=pool_size,
            pool_timeout=limits.retry_timeout_ms / 1000,
            isolation_level="AUTOCOMMIT",
            hide_parameters=True,
            execution_options={"compiled_cache": CompiledStatements()},
            use_native_hstore=False,
            connect_args=connect_arguments(url),
        )
        if url.current_options is not None:
            event.listen(engine, "do_connect", lambda _dialect, _record, _, given: given.update(_current_options(url)))
        engine.dialect.store_schema = schema  # type: ignore[attr-defined]  # our own dialect class
        engine.dialect.clock = clock  # type: ignore[attr-defined]  # our own dialect class
        # For `store.make_durable`.
        engine.dialect.waits_for_disk = limits.durability is Durability.FULL  # type: ignore[attr-defined]  # the same
        return engine

    def close_before_fork(self, holder: Holder, let_go: Callable[[Holder], None]) -> None:
        """Do nothing: a child leaves the parent's connections alone."""

    def let_go(self, engine: Engine) -> None:
        """Do nothing: there is nothing beside the pool."""

    def begin(self, connection: Connection, access: Access, limits: Limits) -> None:
        """Begin and set every limit in the same message.

        READ COMMITTED for writers: a statement that waited for a row lock must see what the holder committed.  Not
        READ WRITE: a server that was made read-only, because its disk is nearly full, means it.
        The idle limit frees the locks of a process that was stopped in the middle.  The search path keeps a
        stranger's functions and operators out.
        """
        driver = _driver_connection(connection)
        driver.expect_answers_within(limits)
        run_on_driver(connection, _beginning(driver, access, limits))

    def commit(self, connection: Connection) -> None:
        """Commit; refused if a statement had failed, for then the server would answer ROLLBACK, without an error."""
        if _driver_connection(connection).info.transaction_status != TransactionStatus.INTRANS:
            raise TransactionPoisoned
        run_on_driver(connection, "COMMIT")

    def rollback(self, connection: Connection) -> None:
        """Roll back if a database transaction is open."""
        driver = _driver_connection(connection)
        if not driver.closed and driver.info.transaction_status != TransactionStatus.IDLE:
            run_on_driver(connection, "ROLLBACK")

    def write_at_once(self, connection: Connection, statements: Sequence[tuple[str, Any]], limits: Limits) -> list[int]:
        """Send the beginning, the statements with their values, and the end in one message."""
        driver = _driver_connection(connection)
        driver.refuse_if_ended()
        driver.expect_answers_within(limits)
        cursor = psycopg.ClientCursor(driver)
        try:
            texts = [cursor.mogrify(text, values) for text, values in statements]
            message = ";".join([_beginning(driver, Access.WRITE, limits), *texts, "COMMIT"])
            with heard(connection, message):
                answers = driver.run_at_once(message)
        except psycopg.Error as error:
            translated = self.translate_driver_error(error, Stage.COMMIT)
            if not translated.outcome_unknown:
                self.rollback(connection)
            raise translated from None
        # A statement that had failed would have kept the server from COMMIT.
        assert answers[-1].command_status == b"COMMIT", answers[-1].command_status
        return [answer.command_tuples or 0 for answer in answers[-1 - len(statements) : -1]]

    def commit_whole(
        self,
        connection: Connection,
        schema: str,
        whole: WholeTransaction,
        limits: Limits,
        clock: Clock | None,
    ) -> list[int] | None:
        """Call the function; it is a database transaction of its own."""
        driver = _driver_connection(connection)
        driver.refuse_if_ended()
        driver.expect_answers_within(limits)
        began = time.monotonic()
        try:
            return _call_commit_function(connection, schema, whole, limits, clock)
        except psycopg.Error as error:
            self._refuse_whole(error, is_early=time.monotonic() - began < limits.statement_timeout_ms / 1000)
            return None

    def commit_whole_in(
        self,
        connection: Connection,
        schema: str,
        whole: WholeTransaction,
        limits: Limits,
        clock: Clock | None,
    ) -> list[int] | None:
        """Call the function within the database transaction that is open; None: it has to be rolled back."""
        try:
            return _call_commit_function(connection, schema, whole, limits, clock)
        except psycopg.Error as error:
            if _has_no_function(error):
                raise NoWholeCommits from None
            if error.sqlstate == commit_function.NOT_USUAL:
                return None
            raise DBAPIError(commit_function.NAME, None, error, hide_parameters=True) from None

    def _refuse_whole(self, error: psycopg.Error, *, is_early: bool) -> None:
        """Return if the server has undone everything and the general way may explain; else raise what happened.

        NoWholeCommits if there is no such function, or not for this role.
        """
        sqlstate = error.sqlstate
        # What failed within the function came before its commit.
        stage = Stage.STATEMENT if error.diag.context else Stage.COMMIT
        translated = self.translate_driver_error(error, stage)
        if translated.outcome_unknown or sqlstate is None:
            raise translated
        if _has_no_function(error):
            raise NoWholeCommits
        if isinstance(translated, StatementTimedOut) and not is_early:
            raise translated
        if isinstance(translated, WriteConflict | StoreBusy | StoreUnavailable | StoreReadOnly | StoreFull):
            raise translated

    def translate(self, error: DBAPIError, stage: Stage) -> TxnStoreError:
        """Return our error by SQLSTATE; of the server's text only the primary line, which has no values."""
        return self.translate_driver_error(error.orig, stage)

    def translate_driver_error(self, error: BaseException | None, stage: Stage) -> TxnStoreError:
        """Return the same for what the driver raised."""
        sqlstate = getattr(error, "sqlstate", None)
        diagnosis = getattr(error, "diag", None)
        told = (getattr(diagnosis, "message_primary", None) or "") if sqlstate else ""
        if sqlstate and sqlstate.startswith(DATA_EXCEPTION):
            told = "a value is out of range or of the wrong type for its column"
        what = f"PostgreSQL answered {sqlstate} ({told})" if sqlstate else "the connection to PostgreSQL broke"
        if stage is Stage.CONNECT and not sqlstate:
            return connecting_error(str(error))
        detail = f"{what} while {stage.value}"
        if stage is Stage.COMMIT and may_have_committed(sqlstate, getattr(diagnosis, "severity_nonlocalized", None)):
            return OutcomeUnknown(f"{detail}: the change may or may not have been made")
        if sqlstate is None and not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            # The driver did not even send it: the database has no type for one of its values.
            return StatementFailed(f"the driver refused a statement ({type(error).__name__}); nothing was changed")
        kind = _kind_of(sqlstate)
        if kind is StoreMoved:
            return StoreMoved(f"{told}; nothing was changed")
        return kind(f"{detail}; nothing was changed")

    def is_contended(self, error: DBAPIError) -> bool:
        """Return False: PostgreSQL waits by itself, within lock_timeout."""
        del error
        return False

    def after_commit(self, engine: Engine) -> None:
        """Nothing: the server looks after itself."""

    def reclaim(self, engine: Engine, url: DatabaseUrl, *, schema: str) -> int:
        """Empty the segments that are over and vacuum the tables that are due, on a connection of its own."""
        # A client that lives for a moment only does not wait for these imports.
        from txnstore.db.postgresql.rotation import rotate_segments
        from txnstore.db.postgresql.vacuuming import vacuum_due_tables

        try:
            with connect_driver(url) as connection:
                # Statistics and vacuuming take longer than a notification.
                connection.expect_answers_within(Limits(statement_timeout_ms=0))
                return rotate_segments(connection, engine, schema) + vacuum_due_tables(connection, engine, schema)
        except psycopg.Error as error:
            raise self.translate_driver_error(error, Stage.STATEMENT) from None

    def waiter(self, engine: Engine, url: DatabaseUrl, subjects: Subjects, *, channel: str) -> ListenWaiter:
        """Return what listens for the writers' notifications."""
        return ListenWaiter(lambda: connect_driver(url), channel, subjects, engine.dialect)

    def announcer(self, url: DatabaseUrl, *, channel: str) -> NotifyAnnouncer:
        """Return what tells waiting readers that something was committed."""
        return NotifyAnnouncer(lambda: connect_driver(url), channel)

    def exists(self, url: DatabaseUrl) -> bool:
        """Return True: what is not there shows when connecting."""
        del url
        return True

    def identity(self, connection: Connection) -> str | None:
        """Return system identifier:oid:oid of the table `stores`."""
        if not connection.execute(_MAY_IDENTIFY).scalar_one():
            return None
        return ":".join((*connection.exec_driver_sql(IDENTIFY).one(), connection.execute(_PLACE).scalar_one()))

    def running(self, connection: Connection) -> str:
        """Return the moment at which the server came up, and the oid of the database: every role may know them."""
        return ":".join(connection.exec_driver_sql(_RUNNING).one())

    def is_standby(self, connection: Connection) -> bool:
        """Return whether the server is in recovery."""
        return bool(connection.exec_driver_sql("SELECT pg_catalog.pg_is_in_recovery()").scalar_one())

    def is_known_standby(self, connection: Connection) -> bool:
        """Return what the server has said as the connection was made."""
        return _driver_connection(connection).is_of_standby

    def check_database(self, connection: Connection, names: Collection[str]) -> None:
        """Refuse an old server, and a database whose encoding has no place for some text; the server told both."""
        del names
        server = _driver_connection(connection).info
        if server.server_version < OLDEST_SERVER_VERSION:
            raise InvalidUrl(
                f"the server is PostgreSQL {server.server_version // 10_000}; txnstore needs"
                f" {OLDEST_SERVER_VERSION // 10_000} or newer"
            )
        encoding = server.parameter_status("server_encoding")
        if encoding != "UTF8":
            raise InvalidUrl(
                f"the database has the encoding {encoding}, which does not hold all text; txnstore needs a database"
                " made with ENCODING 'UTF8'"
            )

    def version(self, connection: Connection) -> str:
        """Return the server's version."""
        return f"PostgreSQL {connection.exec_driver_sql('SHOW server_version').scalar_one()}"

    def storage_sizes(self, connection: Connection, schema: str) -> dict[str, int]:
        """Return the sizes of the database, and of the tables with their indexes."""
        database, tables = connection.exec_driver_sql(_SIZES, (schema,)).one()
        return {"database": int(database), "tables": int(tables or 0)}

    def prepare_place(self, connection: Connection, schema: str) -> None:
        """Create the schema unless it is there."""
        # CREATE SCHEMA IF NOT EXISTS asks for the right to create schemas even if there is nothing to create.
        present = connection.execute(
            text("SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = :schema"), {"schema": schema}
        ).one_or_none()
        if present is None:
            connection.exec_driver_sql(f"CREATE SCHEMA {connection.dialect.identifier_preparer.quote(schema)}")

    def table_names(self, connection: Connection, schema: str) -> frozenset[str]:
        """Return the tables and views of the schema."""
        rows = connection.execute(
            text(
                "SELECT c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace"
                " WHERE n.nspname = :schema AND c.relkind IN ('r', 'p', 'f', 'v', 'm') AND NOT c.relispartition"
            ),
            {"schema": schema},
        )
        return frozenset(name for (name,) in rows)

    def schemas_of_stores(self, connection: Connection) -> list[str]:
        """Return the schemas with the two tables that every version has; the catalogue shows them to every role."""
        return list(connection.execute(_SCHEMAS, {"names": ["stores", VERSION_TABLE]}).scalars())

    def hidden_tables(self, connection: Connection, schema: str) -> frozenset[str]:
        """Return those whose rows row-level security keeps from this role."""
        return frozenset(connection.execute(HIDDEN, {"schema": schema}).scalars())

    def narrowed_tables(
        self, connection: Connection, schema: str, names: Collection[str], *, when_locking: bool = False
    ) -> list[str]:
        """Return those of which row-level security shows this role not every row, whoever's it is."""
        commands = ["r", "w"] if when_locking else ["r"]
        of = {"schema": schema, "names": list(names), "commands": commands}
        return list(connection.execute(NARROWED, of).scalars())

    def checked_relations(self, connection: Connection, schema: str) -> list[str]:
        """Return the indexes, where the extension amcheck is there and this role may use it."""
        return list(connection.execute(_CHECKED, {"schema": schema}).scalars())

    def check_relation(self, connection: Connection, schema: str, name: str) -> None:
        """Let amcheck compare an index with its table; one that has gone meanwhile is right."""
        for statement in connection.execute(_CHECK, {"schema": schema, "name": name}).scalars().all():
            connection.exec_driver_sql(statement)

    def table_rules(self, connection: Connection, schema: str) -> list[tuple[str, str, frozenset[str]]]:
        """Return what the catalogue says of tables and segments; any role may read it."""
        rows = connection.execute(_RULES, {"schema": schema})
        return [(name, of_table, frozenset(rules)) for name, of_table, rules in rows]

    def next_key(self, connection: Connection, schema: str, table: str, column: str) -> int | None:
        """Return what the column's sequence gives out next, if this role may read it."""
        sequence = _sequence_of(connection, schema, table, column)
        if not connection.execute(_MAY_READ_SEQUENCE, {"sequence": sequence}).scalar_one():
            return None
        # PostgreSQL itself has quoted the name.
        statement = f"SELECT last_value, is_called FROM {sequence}"  # noqa: S608
        last, is_called = connection.exec_driver_sql(statement).one()
        return int(last) + (1 if is_called else 0)

    def set_next_key(self, connection: Connection, schema: str, table: str, column: str, key: int) -> None:
        """Set the column's sequence, at once: a sequence is in no database transaction."""
        sequence = _sequence_of(connection, schema, table, column)
        connection.execute(_SET_SEQUENCE, {"sequence": sequence, "key": key})


def _sequence_of(connection: Connection, schema: str, table: str, column: str) -> str:
    """Return the name, as it stands in SQL, of the sequence behind an identity column."""
    quoted = connection.dialect.identifier_preparer.quote_identifier
    of_table = f"{quoted(schema)}.{quoted(table)}"
    sequence: str = connection.execute(_SEQUENCE, {"of_table": of_table, "of_column": column}).scalar_one()
    return sequence


def connect_arguments(url: DatabaseUrl) -> dict[str, Any]:
    """Return what every connection gets: bounded waits for a silent network, unless the URL says otherwise."""
    defaults: dict[str, Any] = {
        "connect_timeout": 10,
        "tcp_user_timeout": 30_000,
        "keepalives_idle": 30,
        "application_name": "txnstore",
    }
    arguments = {name: value for name, value in defaults.items() if name not in url.url.query}
    # Whatever the role's own setting is, text is Unicode.
    arguments["client_encoding"] = "UTF8"
    # Prepared statements belong to a session, and a pooler may change it under us.
    arguments["prepare_threshold"] = None
    arguments.update(url.secret_options)
    return arguments


def connect_driver(url: DatabaseUrl) -> PostgreSQLConnection:
    """Open a connection outside the pool, in autocommit mode, for listening and notifying.

    Raises:
        psycopg.Error: it cannot be made, or nobody says what it takes to make it.
    """
    dialect: Any = StorePostgreSQLDialect
    _, options = dialect().create_connect_args(url.url)
    options |= connect_arguments(url)
    try:
        options |= _current_options(url)
    except TxnStoreError as error:
        # Threads of ours go on, and try again.
        raise psycopg.OperationalError(str(error)) from error
    return PostgreSQLConnection.connect(**options, autocommit=True)


def _current_options(url: DatabaseUrl) -> Mapping[str, str]:
    """Return what a connection that is made now is given besides the URL."""
    try:
        return url.current_options() if url.current_options is not None else {}
    except TxnStoreError:
        raise
    except Exception as error:
        # Of the application's, where a password is fetched, say: it is as if the database were away.
        what = f"the application's engine does not say what to connect with ({type(error).__name__})"
        raise StoreUnavailable(f"{what}; nothing was changed") from error


def _beginning(driver: PostgreSQLConnection, access: Access, limits: Limits) -> str:
    mode = "ISOLATION LEVEL READ COMMITTED" if access is Access.WRITE else "ISOLATION LEVEL REPEATABLE READ READ ONLY"
    is_lasting = access is Access.WRITE and limits.durability is Durability.FULL
    # With the setting off, NULL in an array is the text of that name.
    has_arrays = access is Access.WRITE
    return (
        f"BEGIN {mode};"
        f"SET LOCAL statement_timeout = {int(limits.statement_timeout_ms)};"
        f"SET LOCAL lock_timeout = {int(limits.lock_timeout_ms)};"
        f"SET LOCAL idle_in_transaction_session_timeout = {int(limits.idle_timeout_ms)};"
        f"{_bound_of_silence(driver, limits)};"
        "SET LOCAL search_path = pg_catalog, pg_temp"
        f"{';SET LOCAL array_nulls = on' if has_arrays else ''}"
        f"{f';{MAKE_DURABLE}' if is_lasting else ''}"
    )


def _driver_connection(connection: Connection) -> PostgreSQLConnection:
    driver: Any = connection.connection.driver_connection
    assert isinstance(driver, PostgreSQLConnection)
    return driver


def _call_commit_function(
    connection: Connection, schema: str, whole: WholeTransaction, limits: Limits, clock: Clock | None
) -> list[int] | None:
    driver = _driver_connection(connection)
    try:
        parameters = commit_function.arguments(
            whole,
            limits,
            now_ms=None if clock is None else clock.now_ms(),
            has_transaction_timeout=driver.info.server_version >= _HAS_TRANSACTION_TIMEOUT,
            is_lasting=limits.durability is Durability.FULL,
        )
    except (ValueError, struct.error):
        return None
    statement = commit_function.call_function(schema)
    with heard(connection, statement):
        answer = driver.call(statement, parameters, commit_function.TYPES, commit_function.FORMATS)
    return None if answer is None else commit_function.places_of(answer)


def _has_no_function(error: psycopg.Error) -> bool:
    """Return whether there is no function for this role; what was refused within it was about one transaction."""
    return error.sqlstate in _NO_FUNCTION and not error.diag.context


def _bound_of_silence(driver: PostgreSQLConnection, limits: Limits) -> str:
    """Return the setting that frees the locks of a client that fell silent in the middle of a request.

    It is not idle then, nor is a statement running, so none of the other limits ends it.
    """
    if driver.info.server_version >= _HAS_TRANSACTION_TIMEOUT:
        return f"SET LOCAL transaction_timeout = {int(limits.transaction_timeout_ms)}"
    return "SET LOCAL tcp_keepalives_idle = 10;SET LOCAL tcp_keepalives_interval = 5;SET LOCAL tcp_keepalives_count = 4"


def may_have_committed(sqlstate: str | None, severity: str | None) -> bool:
    """Return whether a COMMIT, or the end of a prepared transaction, that was answered so may stand all the same."""
    return sqlstate is None or sqlstate.startswith(UNKNOWN_AT_COMMIT) or severity in _ENDS_SESSION


def _kind_of(sqlstate: str | None) -> type[TxnStoreError]:
    if sqlstate is None:
        return StoreUnavailable
    for length in (5, 3, 2):
        kind = ERRORS_BY_SQLSTATE.get(sqlstate[:length])
        if kind is not None:
            return kind
    return StatementFailed
