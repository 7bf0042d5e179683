"""PostgreSQL databases with a fresh store each, which tests have one after the other: emptied, not recreated.

To empty a database takes the server a fraction of what it takes to copy one and to drop it. One is given out again
where nobody can tell it from a new copy. PostgreSQL's own counters show that: since they were last reset no row of the
catalogue was written, so nothing was created, altered or granted; nothing was analysed; and the tables are as small as
those that the planner takes for new ones. Any other is dropped. A database comes back under another name: under
the old URL there is nothing.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import psycopg
from psycopg import sql

from txnstore.testing.postgres_server import PostgresServer

#: As many pages the planner reckons with for a table that was never vacuumed, if it has fewer.
_PAGES_MAX: Final = 10
#: Of so many the one that came back first goes out: by then its sessions have ended.
_RESTING_COUNT: Final = 2
_FIRST_OID_OF_USERS: Final = 16_384
_NUMBERS: Final = itertools.count(1)
#: In containers each run has the same process id as the one before, which may have been killed, or as one beside it.
_RUN: Final = secrets.token_hex(4)
#: Written by ANALYZE, which is seen in `reltuples`.
_STATISTICS: Final = frozenset({"pg_statistic", "pg_statistic_ext_data"})

#: What all databases of a server share and may be about one of them.
_SHARED_STATE: Final = """
    SELECT (SELECT count(*) FROM pg_prepared_xacts WHERE database = d.datname),
           (SELECT count(*) FROM pg_shdepend WHERE dbid = d.oid),
           (SELECT count(*) FROM pg_db_role_setting WHERE setdatabase = d.oid),
           (SELECT count(*) FROM pg_shdescription WHERE objoid = d.oid AND classoid = 'pg_database'::regclass),
           d.datdba, d.datacl::text, d.datconnlimit, d.datallowconn, d.datistemplate
    FROM pg_database d WHERE d.datname = %s"""
_END_SESSIONS: Final = """
    SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
    WHERE datname = %s AND backend_type = 'client backend'"""
#: The tables that were written to since the counters were reset, or analysed ever; aborted writes count, too.
_TOUCHED: Final = """
    SELECT oid, relname, reltuples >= 0, pg_relation_size(oid) / current_setting('block_size')::int
    FROM pg_class
    WHERE relkind IN ('r', 't') AND NOT relisshared
      AND (pg_stat_get_tuples_inserted(oid) + pg_stat_get_tuples_updated(oid) + pg_stat_get_tuples_deleted(oid) > 0
           OR oid >= %s AND relkind = 'r' AND reltuples >= 0)"""
_OWN_RELATIONS: Final = """
    SELECT oid, relnamespace::regnamespace::text, relname, relkind = 'S' FROM pg_class
    WHERE oid >= %s AND relkind IN ('r', 'S')"""
#: When the counters were reset: at another time than ours if the server has crashed.
_RESET_TIME: Final = """
    SELECT pg_stat_get_db_stat_reset_time(oid)::text FROM pg_database WHERE datname = current_database()"""


def name_of_database(what: str) -> str:
    """Return a name that no other database of the server has, whichever runs use it or have left something there."""
    return f"txnstore_{what}_{os.getpid()}_{_RUN}_{next(_NUMBERS)}"


class _Touched(NamedTuple):
    """A table that was written to."""

    oid: int
    name: str
    is_analysed: bool
    page_count: int


@dataclass(frozen=True)
class _Template:
    """What makes a copy of a template one again."""

    #: By the table, which has the same oid in each copy.
    empty_table: Mapping[int, sql.Composable]
    reset_sequences: Collection[sql.Composable]


class StoreDatabases:
    """Databases of one server that are copies of one template, and are dropped with `close`."""

    def __init__(self, server: PostgresServer, template: str, *, refresh: str = "SELECT") -> None:
        """Take the name of a database in which nothing is ever changed, and a statement that renews its copies.

        Nobody may be connected to the template. Each database has run the statement when it is taken.
        """
        self._server = server
        self._refresh = sql.SQL(refresh)
        self._template_name = template
        self._maintenance = server.connect()
        self._resting: deque[str] = deque()
        #: When the counters of each database were reset by us.
        self._reset_times: dict[str, str] = {}
        self._shared_state = self._ask_shared_state(template)
        with server.connect(template) as connection:
            self._template = _read_template(connection)
            self._can_reuse = _counters_tell(connection)

    def take(self, suffix: str = "") -> str:
        """Return the name, which ends so, of a database with a fresh store: the caller's until it is given back."""
        name = name_of_database("test") + suffix
        if len(self._resting) >= _RESTING_COUNT and self._renew(self._resting.popleft(), name):
            return name
        self._server.create_database(name, template=self._template_name)
        with self._server.connect(name) as connection:
            if self._can_reuse:
                self._reset_times[name] = _reset_counters(connection)
            connection.execute(self._refresh)
        return name

    def give_back(self, name: str) -> None:
        """End all sessions in the database; drop it if it would be noticed that it is still there."""
        if name in self._reset_times and self._ask_shared_state(name) == self._shared_state:
            self._ask(_END_SESSIONS, name)
            self._resting.append(name)
        else:
            # With what was prepared in it; a test drops the roles that it has made after the databases that know them.
            self._drop(name)

    def close(self) -> None:
        """Drop all databases."""
        self._maintenance.close()
        for name in list(self._reset_times):
            self._drop(name)
        self._resting.clear()

    def _renew(self, used: str, name: str) -> bool:
        """Make a used database a fresh one of this name; where that cannot be, drop it and return False."""
        self._ask(_END_SESSIONS, used)
        try:
            self._ask(sql.SQL("ALTER DATABASE {} RENAME TO {}").format(sql.Identifier(used), sql.Identifier(name)))
        except psycopg.errors.ObjectInUse:
            self._drop(used)
            return False
        reset_time = self._reset_times.pop(used)
        with self._server.connect(name) as connection:
            touched = [_Touched(*row) for row in connection.execute(_TOUCHED, [_FIRST_OID_OF_USERS])]
            is_like_new = _read_reset_time(connection) == reset_time and not any(map(_shows, touched))
            if is_like_new:
                self._empty(connection, touched)
                self._reset_times[name] = _reset_counters(connection)
                connection.execute(self._refresh)
        if not is_like_new:
            self._drop(name)
        return is_like_new

    def _empty(self, connection: psycopg.Connection, touched: list[_Touched]) -> None:
        empty_table = self._template.empty_table
        statements = [empty_table[table.oid] for table in touched if table.oid in empty_table]
        # Otherwise this is counted after the counters were reset.
        count_now = sql.SQL("SELECT pg_stat_force_next_flush()")
        connection.execute(sql.SQL("; ").join([*statements, *self._template.reset_sequences, count_now]))

    def _drop(self, name: str) -> None:
        self._reset_times.pop(name, None)
        self._server.drop_database(name)

    def _ask_shared_state(self, name: str) -> list[tuple[Any, ...]]:
        return self._ask(_SHARED_STATE, name).fetchall()

    def _ask(self, query: str | sql.Composed, *parameters: str) -> psycopg.Cursor:
        try:
            return self._maintenance.execute(query, parameters)
        except psycopg.OperationalError:
            if not self._maintenance.closed:
                raise
            # Somebody has ended it, or the server was killed and is back.
            self._maintenance = self._server.connect()
            return self._maintenance.execute(query, parameters)


def _shows(table: _Touched) -> bool:
    """Return whether a database can be told from a new one by this table, though it will be empty."""
    if table.oid < _FIRST_OID_OF_USERS:
        # What a catalogue keeps out of line is counted with its row.
        return table.name not in _STATISTICS and not table.name.startswith("pg_toast_")
    return table.is_analysed or table.page_count > _PAGES_MAX


def _read_template(connection: psycopg.Connection) -> _Template:
    empty_table: dict[int, sql.Composable] = {}
    reset_sequences: list[sql.Composable] = []
    for oid, schema, name, is_sequence in connection.execute(_OWN_RELATIONS, [_FIRST_OID_OF_USERS]):
        relation = sql.Identifier(schema, name)
        if is_sequence:
            state = connection.execute(sql.SQL("SELECT last_value, is_called FROM {}").format(relation)).fetchone()
            reset_sequences.append(sql.SQL("SELECT setval({}, {}, {})").format(oid, *(state or ())))
            continue
        statement = sql.SQL("DELETE FROM {}").format(relation)
        ((rows,),) = connection.execute(sql.SQL("SELECT json_agg(t)::text FROM {} t").format(relation))
        if rows is not None:
            insert = "INSERT INTO {} OVERRIDING SYSTEM VALUE SELECT * FROM json_populate_recordset(NULL::{}, {})"
            statement += sql.SQL("; " + insert).format(relation, relation, sql.Literal(rows))
        empty_table[oid] = statement
    return _Template(empty_table, reset_sequences)


def _counters_tell(connection: psycopg.Connection) -> bool:
    """Return whether the server counts what is written, and lets us bring the counters up to date and reset them."""
    counted = {oid for oid, *_ in connection.execute(_TOUCHED, [_FIRST_OID_OF_USERS])}
    # PostgreSQL 14 counts some time later, and cannot be told to do it now.
    ((may_reset,),) = connection.execute(
        "SELECT has_function_privilege('pg_stat_reset()', 'EXECUTE')"
        " AND to_regproc('pg_catalog.pg_stat_force_next_flush') IS NOT NULL"
    )
    return may_reset and any(oid < _FIRST_OID_OF_USERS for oid in counted)


def _reset_counters(connection: psycopg.Connection) -> str:
    connection.execute("SELECT pg_stat_reset()")
    return _read_reset_time(connection)


def _read_reset_time(connection: psycopg.Connection) -> str:
    ((reset_time,),) = connection.execute(_RESET_TIME)
    return str(reset_time)
