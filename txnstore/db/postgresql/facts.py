"""The facts of a PostgreSQL database and its server before anything of ours is in it; nothing is changed.

Each fact is asked for by a statement of its own.  One that this role may not ask for, or that this server does not
know, is missing, with the reason; all others are there all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import psycopg
from psycopg import sql

from txnstore.db.backend import Stage
from txnstore.db.postgresql.backend import IDENTIFY, PostgreSQLBackend, connect_driver
from txnstore.db.url import DatabaseUrl

Value = TypeVar("Value")

#: A time limit of the role or the database has ended a statement, or the session.
_CUT_OFF: Final = frozenset({"57014", "25P04", "57P05"})
#: So often two sessions are asked in turn which process of the server they talk to.
_TURNS: Final = 10
#: Settings that the checks look at, in the units of pg_settings.
_SETTINGS: Final = (
    "autovacuum",
    "default_transaction_isolation",
    "default_transaction_read_only",
    "fsync",
    "full_page_writes",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
    "lock_timeout",
    "max_connections",
    "max_prepared_transactions",
    "reserved_connections",
    "statement_timeout",
    "superuser_reserved_connections",
    "synchronous_commit",
    "track_counts",
    "transaction_timeout",
)
_CLOCK: Final = "SELECT CAST(pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000 AS bigint)"
_READ_SETTINGS: Final = "SELECT name, setting FROM pg_catalog.pg_settings WHERE name = ANY(%s)"
_DATABASE: Final = """
    SELECT d.datconnlimit, pg_catalog.age(d.datfrozenxid),
        pg_catalog.has_database_privilege(d.oid, 'CREATE'), r.rolconnlimit, r.rolsuper,
        r.rolsuper OR pg_catalog.pg_has_role(r.oid, 'pg_read_all_stats', 'USAGE')
    FROM pg_catalog.pg_database d, pg_catalog.pg_roles r
    WHERE d.datname = pg_catalog.current_database() AND r.rolname = CURRENT_USER
"""
# The counts of pg_stat_database, and the names in pg_stat_activity, are for every role.
_CONNECTIONS: Final = """
    SELECT (SELECT coalesce(sum(numbackends), 0)::bigint FROM pg_catalog.pg_stat_database),
        (SELECT numbackends FROM pg_catalog.pg_stat_database WHERE datname = pg_catalog.current_database()),
        (SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE usename = CURRENT_USER)
"""
_SESSIONS: Final = """
    SELECT pid, coalesce(usename, ''), coalesce(application_name, ''), coalesce(state, backend_type, ''),
        CAST(pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - xact_start) AS bigint)
    FROM pg_catalog.pg_stat_activity
    WHERE xact_start IS NOT NULL AND backend_xmin IS NOT NULL AND pid <> pg_catalog.pg_backend_pid()
        AND backend_type <> 'autovacuum worker'
    ORDER BY xact_start LIMIT 100
"""
_PREPARED: Final = """
    SELECT gid, database, owner,
        CAST(pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - prepared) AS bigint)
    FROM pg_catalog.pg_prepared_xacts ORDER BY prepared
"""
_SLOTS: Final = """
    SELECT slot_name, active, xmin IS NOT NULL OR catalog_xmin IS NOT NULL,
        CASE WHEN NOT pg_catalog.pg_is_in_recovery()
            THEN CAST(pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_lsn(), restart_lsn) AS bigint) END
    FROM pg_catalog.pg_replication_slots
"""
# What writes the log of the server to a file elsewhere streams as well, and may be named.
_STANDBYS: Final = """
    SELECT coalesce(application_name, ''), coalesce(sync_state, '') FROM pg_catalog.pg_stat_replication
    WHERE state = 'streaming' ORDER BY 1
"""
# A role sees its own sessions, whatever else it may not see.
_WAITS_FOR_STANDBY: Final = """
    SELECT CAST(pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - min(query_start)) AS bigint)
    FROM pg_catalog.pg_stat_activity WHERE wait_event = 'SyncRep'
"""
_RELATIONS: Final = """
    SELECT c.relname, coalesce(s.n_live_tup, 0), coalesce(s.n_dead_tup, 0),
        EXISTS (
            SELECT FROM pg_catalog.unnest(c.reloptions) AS option
            WHERE pg_catalog.lower(option) ~ '^autovacuum_enabled=(f|n|of|0)'
        ),
        ARRAY(
            SELECT p FROM pg_catalog.unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS p
            WHERE NOT pg_catalog.has_table_privilege(c.oid, p) AND (p = 'SELECT' OR c.relkind <> 'v')
                AND NOT c.relispartition
        ),
        ARRAY(
            SELECT p || ' ' || a.attname
            FROM pg_catalog.unnest(ARRAY['SELECT', 'INSERT', 'UPDATE']) AS p, pg_catalog.pg_attribute a
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND NOT c.relispartition
                AND NOT pg_catalog.has_table_privilege(c.oid, p)
                AND pg_catalog.has_column_privilege(c.oid, a.attnum, p)
        )
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_catalog.pg_stat_all_tables s ON s.relid = c.oid
    WHERE n.nspname = %s AND c.relkind IN ('r', 'p', 'v') ORDER BY c.relname
"""
# Rows as the last vacuum or analyze counted them, or as counted since; unknown without either, or once a table doubled.
# A row is as long as the statistics say if this role may see all of them; values of about two kilobytes stand aside.
_ROOMS: Final = """
    WITH stored AS (
        SELECT c.oid, c.relname, c.relnamespace, c.reltoastrelid, c.reltuples, c.relpages, c.relkind
        FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = %s AND c.relkind = 'r'
        UNION ALL
        SELECT t.oid, c.relname, t.relnamespace, 0, t.reltuples, t.relpages, t.relkind
        FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        JOIN pg_catalog.pg_class t ON t.oid = c.reltoastrelid
        WHERE n.nspname = %s AND c.relkind = 'r'
    ), counted AS (
        SELECT t.oid, t.relname, t.relkind,
            CAST(greatest(t.reltuples, pg_catalog.pg_stat_get_live_tuples(t.oid)) AS bigint) AS row_count,
            coalesce((
                SELECT sum(w.avg_width) FROM pg_catalog.pg_stats w
                JOIN pg_catalog.pg_namespace n ON n.nspname = w.schemaname AND n.oid = t.relnamespace
                WHERE w.tablename = t.relname AND t.relkind = 'r'
                HAVING count(*) = (
                    SELECT count(*) FROM pg_catalog.pg_attribute a
                    WHERE a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
                )
            ), 2048) AS row_bytes
        FROM stored t
        WHERE pg_catalog.pg_relation_size(t.oid)
            <= 2 * CAST(t.relpages AS bigint) * CAST(pg_catalog.current_setting('block_size') AS bigint)
    )
    SELECT CASE WHEN relkind = 't' THEN 'what is stored aside of ' ELSE '' END || relname,
        coalesce(pg_catalog.pg_relation_size(oid), 0), row_count, CAST(row_bytes AS bigint)
    FROM counted
    UNION ALL
    SELECT 'the index ' || i.relname, coalesce(pg_catalog.pg_relation_size(i.oid), 0), c.row_count,
        CAST(c.row_bytes AS bigint)
    FROM counted c JOIN pg_catalog.pg_index x ON x.indrelid = c.oid JOIN pg_catalog.pg_class i ON i.oid = x.indexrelid
    WHERE c.relkind = 'r'
    ORDER BY 1
"""
_SCHEMA: Final = """
    SELECT pg_catalog.has_schema_privilege(oid, 'USAGE') FROM pg_catalog.pg_namespace WHERE nspname = %s
"""
_FUNCTIONS: Final = """
    SELECT p.proname FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
    WHERE n.nspname = %s AND NOT pg_catalog.has_function_privilege(p.oid, 'EXECUTE') ORDER BY p.proname
"""
# As row-level security takes them: also those of the roles whose rights this one has. None of them bounds who has the
# owner's.
_POLICIES: Final = """
    SELECT DISTINCT p.polname, pg_catalog.obj_description(p.oid, 'pg_policy')
    FROM pg_catalog.pg_policy p JOIN pg_catalog.pg_class c ON c.oid = p.polrelid
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    CROSS JOIN pg_catalog.unnest(p.polroles) AS role(oid)
    WHERE n.nspname = %s AND c.relname = 'topics' AND pg_catalog.pg_has_role(role.oid, 'USAGE')
        AND NOT pg_catalog.pg_has_role(c.relowner, 'USAGE') ORDER BY p.polname
"""
# Whoever has done some of a duty notes when; in a new store nobody had to yet, and of one that moves nobody has to.
# What was noted while the clock was ahead says nothing.
_UNMAINTAINED: Final = """
    SELECT (now_ms - greatest(created_ms, (SELECT max(turn_ms) FROM {duties} WHERE turn_ms <= now_ms + 60000)))
        / 1000
    FROM {stores} CROSS JOIN (
        SELECT CAST(pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000 AS bigint) AS now_ms
    ) AS clock WHERE move_state IS NULL
"""
# One that failed has a pause, which nobody holds.  What nobody has tried for hours may be given up, as a participant.
_FAILING: Final = """
    SELECT duty, (now_ms - begun_ms) / 1000 FROM {duties} CROSS JOIN (
        SELECT CAST(pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000 AS bigint) AS now_ms
    ) AS clock WHERE holder IS NULL AND held_until_ms > now_ms - 7200000 ORDER BY duty
"""


@dataclass(frozen=True, slots=True)
class LongSession:
    """A session within a database transaction that keeps a snapshot."""

    pid: int
    role: str
    application: str
    state: str
    age_seconds: int


@dataclass(frozen=True, slots=True)
class PreparedTransaction:
    """A prepared transaction of the server's."""

    gid: str
    database: str
    owner: str | None
    """None: the role has been dropped since."""

    age_seconds: int


@dataclass(frozen=True, slots=True)
class ReplicationSlot:
    """A replication slot of the server's."""

    name: str
    is_active: bool
    keeps_rows: bool
    """Whether dead rows stay for it."""

    kept_wal_bytes: int | None


@dataclass(frozen=True, slots=True)
class Standby:
    """A standby that follows the server."""

    name: str
    sync_state: str
    """`sync` or `quorum`: commits wait for it, if their synchronous_commit says so."""


@dataclass(frozen=True, slots=True)
class Relation:
    """A table or view in the schema of the store."""

    name: str
    live_rows: int
    dead_rows: int
    is_not_vacuumed: bool
    """Whether autovacuum is switched off for it."""

    missing_rights: Sequence[str]
    """Of SELECT, INSERT, UPDATE and DELETE, what this role may not."""

    column_rights: Sequence[str] = ()
    """What it may of these with single columns, as `UPDATE next_offset`."""


@dataclass(frozen=True, slots=True)
class RelationRoom:
    """What a table, an index, or what is stored aside of a table's long values takes on the disk."""

    name: str
    size_bytes: int
    rows: int
    """How many live rows the table has, about; of an index it may be fewer."""

    row_bytes: int
    """How long one of them is, about; of an index it is less."""


@dataclass(slots=True)
class PostgreSQLFacts:
    """What is known of a database; None is what is not, and `unknown` says why, by the fact's name."""

    schema: str
    host: str = ""
    """Where the server is; empty or a path: a socket on this machine."""

    sslmode: str = ""
    server_version: int = 0
    """As 170002."""

    encoding: str = "UTF8"
    unknown: dict[str, str] = field(default_factory=dict)
    cut_off: str | None = None
    """What the server said when a time limit ended a question."""

    is_replica: bool | None = None
    settings: Mapping[str, str] | None = None
    """As this role has them in this database."""

    server_ms: int | None = None
    """What the server's clock showed, in milliseconds since 1970."""

    clock_ahead_ms: int | None = None
    """How far the server's clock is ahead of this machine's, less what the way there may explain."""

    sessions_are_shared: bool | None = None
    """Whether two clients were given the same session of the server: a pooler gives them out for a transaction."""

    connection_limit: int | None = None
    """Of this database; -1: none."""

    role_connection_limit: int | None = None
    """Of this role; -1: none."""

    is_superuser: bool | None = None
    connections: int | None = None
    """In use on the server; also those of this look."""

    database_connections: int | None = None
    role_connections: int | None = None
    oldest_xid_age: int | None = None
    may_create: bool | None = None
    """Whether this role may make schemas in the database."""

    long_sessions: Sequence[LongSession] | None = None
    prepared: Sequence[PreparedTransaction] | None = None
    slots: Sequence[ReplicationSlot] | None = None
    standbys: Sequence[Standby] | None = None
    standby_wait_seconds: int | None = None
    """For how long the commit waits for a standby that has waited longest; None also if none does."""

    relations: Sequence[Relation] | None = None
    """What is in the schema of the store; empty: there is no store."""

    rooms: Sequence[RelationRoom] | None = None
    """Of what is in the schema of the store, as far as the server has counted rows lately."""

    may_use_schema: bool | None = None
    """None also if there is no such schema."""

    refused_functions: Sequence[str] | None = None
    """Functions of the schema that this role may not call."""

    policies: Sequence[tuple[str, str | None]] = ()
    """Those of the table of topics that are for this role, with their comments; empty for the owner or a superuser."""

    table_version: str | None = None
    """What stands in the version table."""

    unmaintained_seconds: int | None = None
    """For how long nobody has done any of the maintenance; None also if there is no store, or one that moves."""

    failing_duties: Sequence[Sequence[Any]] = ()
    """Of the maintenance, those that failed the last time, and how many seconds ago somebody last did some of each."""

    recorded_identity: str | None = None
    """Where the tables were made; None also if that was never known."""

    identity: str | None = None
    """Where they are."""


def read_postgresql_facts(url: DatabaseUrl, schema: str, *, version_table: str) -> PostgreSQLFacts:
    """Return what is known of the database at `url` and the tables in `schema`.

    Raises:
        TxnStoreError: it cannot be connected to.
    """
    connection = _connect(url)
    try:
        asked = _Asked(connection, PostgreSQLFacts(schema))
        asked.server()
        asked.database()
        asked.others()
        asked.store(version_table)
        asked.facts.sessions_are_shared = asked.value("sessions_are_shared", lambda: _are_shared(url, connection))
        return asked.facts
    finally:
        connection.close()


def _connect(url: DatabaseUrl) -> psycopg.Connection[Any]:
    try:
        return connect_driver(url)
    except psycopg.Error as error:
        raise PostgreSQLBackend().translate_driver_error(error, Stage.CONNECT) from None


class _Asked:
    """The facts of one database as they are asked for."""

    def __init__(self, connection: psycopg.Connection[Any], facts: PostgreSQLFacts) -> None:
        self._connection = connection
        self.facts = facts

    def value(self, name: str, ask: Callable[[], Value]) -> Value | None:
        """Return what `ask` answers; None, with the reason under `name`, if the server refuses."""
        try:
            return ask()
        except psycopg.Error as error:
            told = error.diag.message_primary if error.sqlstate else "the connection to PostgreSQL broke"
            self.facts.unknown[name] = told or type(error).__name__
            if error.sqlstate in _CUT_OFF:
                self.facts.cut_off = self.facts.cut_off or told
            return None

    def rows(self, name: str, statement: str | sql.Composed, *parameters: Any) -> list[tuple[Any, ...]] | None:
        """Return the rows of a statement, or None as `value` does."""
        return self.value(name, lambda: self._connection.execute(statement, parameters or None).fetchall())

    def server(self) -> None:
        """Ask about the server."""
        facts, info = self.facts, self._connection.info
        facts.host = info.host
        # libpq's own default, unless the URL or the environment says something else.
        facts.sslmode = info.get_parameters().get("sslmode", "prefer")
        facts.server_version = info.server_version
        facts.encoding = info.parameter_status("server_encoding") or ""
        if found := self.rows("is_replica", "SELECT pg_catalog.pg_is_in_recovery()"):
            facts.is_replica = found[0][0]
        if found := self.rows("settings", _READ_SETTINGS, list(_SETTINGS)):
            facts.settings = dict(found)
        before = time.time_ns() // 1_000_000
        if found := self.rows("clock_ahead_ms", _CLOCK):
            after = time.time_ns() // 1_000_000
            facts.server_ms = found[0][0]
            facts.clock_ahead_ms = _beyond(found[0][0], before, after)

    def database(self) -> None:
        """Ask about the database and the role."""
        facts = self.facts
        if found := self.rows("oldest_xid_age", _DATABASE):
            facts.connection_limit, facts.oldest_xid_age, facts.may_create = found[0][:3]
            facts.role_connection_limit, facts.is_superuser, sees_all = found[0][3:]
            if not sees_all:
                reason = "this role does not see what sessions of other roles do: GRANT pg_read_all_stats TO it"
                facts.unknown |= {"long_sessions": reason, "standbys": reason}
        if found := self.rows("connections", _CONNECTIONS):
            facts.connections, facts.database_connections, facts.role_connections = found[0]

    def others(self) -> None:
        """Ask for what others keep open."""
        facts = self.facts
        if (found := self.rows("long_sessions", _SESSIONS)) is not None:
            facts.long_sessions = [LongSession(*row) for row in found]
        if (found := self.rows("prepared", _PREPARED)) is not None:
            facts.prepared = [PreparedTransaction(*row) for row in found]
        if (found := self.rows("slots", _SLOTS)) is not None:
            facts.slots = [ReplicationSlot(*row) for row in found]
        if (found := self.rows("standbys", _STANDBYS)) is not None:
            facts.standbys = [Standby(*row) for row in found]
        if found := self.rows("standby_wait_seconds", _WAITS_FOR_STANDBY):
            facts.standby_wait_seconds = found[0][0]

    def store(self, version_table: str) -> None:
        """Ask about the tables, if there are any."""
        facts = self.facts
        if found := self.rows("may_use_schema", _SCHEMA, facts.schema):
            facts.may_use_schema = found[0][0]
        if (found := self.rows("relations", _RELATIONS, facts.schema)) is not None:
            facts.relations = [Relation(*row) for row in found]
        if (found := self.rows("rooms", _ROOMS, facts.schema, facts.schema)) is not None:
            facts.rooms = [RelationRoom(*row) for row in found]
        if (found := self.rows("refused_functions", _FUNCTIONS, facts.schema)) is not None:
            facts.refused_functions = [name for (name,) in found]
        if not facts.is_superuser:
            facts.policies = self.rows("policies", _POLICIES, facts.schema) or ()
        self._inside(version_table, {relation.name for relation in facts.relations or ()})

    def _inside(self, version_table: str, names: set[str]) -> None:
        """Ask for what stands in the tables of these names."""
        facts = self.facts
        if version_table in names:
            statement = sql.SQL("SELECT version_num FROM {}").format(sql.Identifier(facts.schema, version_table))
            found = self.rows("table_version", statement)
            facts.table_version = None if found is None else ", ".join(str(row[0]) for row in found)
        if {"stores", "maintenance_duties"} <= names:
            duties = sql.Identifier(facts.schema, "maintenance_duties")
            statement = sql.SQL(_UNMAINTAINED).format(duties=duties, stores=sql.Identifier(facts.schema, "stores"))
            if found := self.rows("unmaintained_seconds", statement):
                facts.unmaintained_seconds = found[0][0]
                facts.failing_duties = self.rows("unmaintained_seconds", sql.SQL(_FAILING).format(duties=duties)) or ()
        if "stores" in names:
            statement = sql.SQL("SELECT database_identity, tableoid::pg_catalog.text FROM {}").format(
                sql.Identifier(facts.schema, "stores")
            )
            if stores := self.rows("recorded_identity", statement):
                facts.recorded_identity = stores[0][0]
            if stores and (found := self.rows("identity", IDENTIFY)):
                facts.identity = ":".join((*found[0], stores[0][1]))


def _beyond(server_ms: int, before_ms: int, after_ms: int) -> int:
    """Return how far the server's time is outside of the time in which it was asked."""
    return max(0, server_ms - after_ms) or min(0, server_ms - before_ms)


def _are_shared(url: DatabaseUrl, connection: psycopg.Connection[Any]) -> bool:
    def session(of: psycopg.Connection[Any]) -> int:
        row = of.execute("SELECT pg_catalog.pg_backend_pid()").fetchone()
        assert row is not None
        return int(row[0])

    if session(connection) == connection.info.backend_pid:
        # The process that has greeted us is the one that answers.
        return False
    with connect_driver(url) as other:
        own, others = set(), set()
        for _ in range(_TURNS):
            own.add(session(connection))
            others.add(session(other))
    return len(own) > 1 or len(others) > 1 or bool(own & others)
