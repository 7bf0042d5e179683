"""What the tests of the migrations share: a database's catalogue as one value that can be compared."""

from __future__ import annotations

import os

import pytest
from sqlalchemy import text

from txnstore.db.migrating import upgrade
from txnstore.db.names import VERSION_TABLE
from txnstore.db.opening import connect_store

SCHEMA = "(SELECT oid FROM pg_namespace WHERE nspname = :schema)"
# Each query gives rows of one kind of thing, without object ids, for the schema that is asked for. What PostgreSQL
# prints of a definition names the schema; it is replaced by a mark.
POSTGRESQL_QUERIES = {
    "relations": """
        SELECT c.relname, c.relkind, c.relpersistence, c.reloptions, c.relrowsecurity, c.relreplident,
               (SELECT t.reloptions FROM pg_class t WHERE t.oid = c.reltoastrelid),
               obj_description(c.oid, 'pg_class')
        FROM pg_class c WHERE c.relnamespace = {schema} AND c.relkind IN ('r', 'p', 'v', 'm', 'S')""",
    "columns": """
        SELECT c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
               a.attgenerated, a.attstorage, a.attcompression, a.attcollation, pg_get_expr(d.adbin, d.adrelid),
               col_description(c.oid, a.attnum)
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE c.relnamespace = {schema} AND c.relkind IN ('r', 'p', 'v')
          AND a.attnum > 0 AND NOT a.attisdropped""",
    "constraints": """
        SELECT c.relname, k.conname, k.contype, k.condeferrable, k.convalidated, pg_get_constraintdef(k.oid),
               obj_description(k.oid, 'pg_constraint')
        FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid WHERE k.connamespace = {schema}""",
    "indexes": """
        SELECT t.relname, c.relname, c.reloptions, i.indisunique, i.indisprimary, i.indisvalid,
               pg_get_indexdef(i.indexrelid), pg_get_expr(i.indpred, i.indrelid)
        FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_class t ON t.oid = i.indrelid
        WHERE c.relnamespace = {schema}""",
    "sequences": """
        SELECT s.sequencename, s.data_type::text, s.start_value, s.min_value, s.max_value, s.increment_by, s.cycle,
               s.cache_size
        FROM pg_sequences s WHERE s.schemaname = :schema""",
    "views": """
        SELECT c.relname, pg_get_viewdef(c.oid)
        FROM pg_class c WHERE c.relnamespace = {schema} AND c.relkind = 'v'""",
    "triggers": """
        SELECT c.relname, t.tgname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
        WHERE c.relnamespace = {schema}""",
    "functions": "SELECT p.proname FROM pg_proc p WHERE p.pronamespace = {schema}",
    "types": """
        SELECT t.typname FROM pg_type t
        WHERE t.typnamespace = {schema} AND t.typtype <> 'c' AND t.typelem = 0""",
}


def postgresql_catalogue(connection, schema):
    connection.execute(text("SET LOCAL search_path = pg_catalog"))
    return {
        kind: sorted(
            repr(
                tuple(
                    part.replace(f"{quoted(schema)}.", "<schema>.") if isinstance(part, str) else part for part in row
                )
            )
            for row in connection.execute(text(query.replace("{schema}", SCHEMA)), {"schema": schema})
            if VERSION_TABLE not in str(row[0])
        )
        for kind, query in POSTGRESQL_QUERIES.items()
    }


def quoted(schema):
    return schema if schema.islower() else f'"{schema}"'


def sqlite_catalogue(connection):
    def rows(statement):
        return [tuple(row) for row in connection.exec_driver_sql(statement)]

    listed = [row for row in rows("SELECT type, name, tbl_name, sql FROM sqlite_master") if VERSION_TABLE not in row[1]]
    tables = [row[1] for row in listed if row[0] == "table"]
    indexes = [
        (table, named(index[1]), *index[2:], rows(f"PRAGMA index_xinfo('{index[1]}')"))
        for table in tables
        for index in rows(f"PRAGMA index_list('{table}')")
    ]
    return {
        "master": sorted((kind, named(name), of, ordered_clauses(sql)) for kind, name, of, sql in listed),
        "table_list": sorted(row for row in rows("PRAGMA table_list") if row[1] in tables),
        "columns": {table: rows(f"PRAGMA table_xinfo('{table}')") for table in tables},
        "indexes": sorted(indexes, key=repr),
    }


def named(index):
    """The name, but for those that SQLite numbers in the order of the constraints, which means nothing."""
    return "by a constraint" if index.startswith("sqlite_autoindex") else index


def ordered_clauses(sql):
    """The lines of a statement, constraints in any order; SQLite writes a column that was added behind another one."""
    lines = [line.strip().rstrip(",") for line in (sql or "").strip().splitlines()]
    clauses = [part for line in lines for part in ([line] if line.startswith("CONSTRAINT") else line.split(", "))]
    first = next((n for n, clause in enumerate(clauses) if clause.startswith("CONSTRAINT")), len(clauses))
    return (*clauses[:first], *sorted(clauses[first:]))


def catalogue_of(connection, schema):
    if connection.dialect.name == "sqlite":
        return sqlite_catalogue(connection)
    return postgresql_catalogue(connection, schema)


@pytest.fixture
def catalogue():
    """What the database says of the tables of a store: columns, constraints, indexes, comments, options, the view."""
    return lambda store: store.read(lambda connection: catalogue_of(connection, store.schema))


class UndoneError(Exception):
    """Rolls back, and carries out what was seen before."""


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def bare(request, tmp_path_factory):
    """A database without our tables, for the whole module."""
    if request.param == "sqlite":
        with connect_store(f"sqlite:///{tmp_path_factory.mktemp('bare') / 'bare.db'}") as store:
            yield store
        return
    server = request.getfixturevalue("txnstore_postgres_server")
    name = f"txnstore_bare_{os.getpid()}"
    server.create_database(name)
    with connect_store(server.url(name)) as store:
        yield store
    server.drop_database(name)


@pytest.fixture(scope="module")
def after(bare):
    """The catalogue of a bare database as it is after `work(connection)`, which is then undone."""

    def see(work):
        def try_out(connection):
            if bare.backend.name == "postgresql":
                connection.exec_driver_sql(f"CREATE SCHEMA {bare.schema}")
            work(connection)
            raise UndoneError(catalogue_of(connection, bare.schema))

        try:
            bare.write(try_out)
        except UndoneError as undone:
            return undone.args[0]

    return see


@pytest.fixture(scope="module")
def after_migrating(bare, after):
    """The catalogue after all migrations."""
    return after(lambda connection: upgrade(connection, kind=bare.backend.name, schema=bare.schema))
