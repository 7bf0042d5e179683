"""The tables that the migrations make are those of `schema.py`, by what the database itself says of them."""

from __future__ import annotations

import pytest
from sqlalchemy import CheckConstraint, MetaData, UniqueConstraint

from txnstore.db import ddl
from txnstore.db.ddl import Bytes
from txnstore.db.names import CODE_SCHEMA, VIEWS
from txnstore.db.opening import open_store
from txnstore.db.schema import enter_options_of_postgresql, metadata, record_batches


def test_the_catalogue_after_all_migrations_is_that_of_the_schema_module(after_migrating, after):
    assert after(metadata.create_all) == after_migrating
    assert all(after_migrating[kind] for kind in ("columns", "indexes"))


def test_a_store_that_was_opened_has_that_catalogue(request, catalogue, bare, after_migrating):
    store = request.getfixturevalue(f"txnstore_{bare.backend.name}_store")
    assert catalogue(store) == after_migrating


def test_tables_in_a_schema_of_another_name_are_the_same(bare, catalogue, after_migrating):
    if bare.backend.name == "postgresql":
        with open_store(bare.url.url.render_as_string(hide_password=False), schema="Other_1") as other:
            assert catalogue(other) == after_migrating


def drop_a_check(tables):
    table = tables["transactions"]
    table.constraints.discard(next(c for c in table.constraints if isinstance(c, CheckConstraint)))


def drop_a_unique(tables):
    table = tables["partitions"]
    table.constraints.discard(next(c for c in table.constraints if isinstance(c, UniqueConstraint)))


def drop_an_index(tables):
    tables["producer_states"].indexes.clear()


def widen_a_partial_index(tables):
    (index,) = (i for i in tables["producer_states"].indexes if i.name == "producer_states_open")
    index.dialect_options["postgresql"]["where"] = index.dialect_options["sqlite"]["where"] = None


def allow_null(tables):
    tables["record_batches"].c.crc.nullable = True


def change_a_type(tables):
    tables["store_configs"].c.value.type = Bytes


def leave_out_a_column(tables):
    table = tables["group_offsets"]
    table._columns.remove(table.c.leader_epoch)


def change_a_comment(tables):
    tables["topics"].c.name.comment = "Another one."


def leave_out_the_comment_of_a_table(tables):
    tables["outbox"].comment = None


def fill_pages(tables):
    tables["partition_heads"].dialect_options["postgresql"]["with"] = {}


def be_lax(tables):
    tables["partition_heads"].dialect_options["sqlite"]["strict"] = False


def give_out_numbers_again(tables):
    tables["topics"].dialect_options["sqlite"]["autoincrement"] = False


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("change", "seen_by"),
    [
        (drop_a_check, {"sqlite", "postgresql"}),
        (drop_a_unique, {"sqlite", "postgresql"}),
        (drop_an_index, {"sqlite", "postgresql"}),
        (widen_a_partial_index, {"sqlite", "postgresql"}),
        (allow_null, {"sqlite", "postgresql"}),
        (change_a_type, {"sqlite", "postgresql"}),
        (leave_out_a_column, {"sqlite", "postgresql"}),
        (change_a_comment, {"postgresql"}),
        (leave_out_the_comment_of_a_table, {"postgresql"}),
        (fill_pages, {"postgresql"}),
        (be_lax, {"sqlite"}),
        (give_out_numbers_again, {"sqlite"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_comparison_sees_a_difference(change, seen_by, bare, after, after_migrating):
    tables = copy_of_tables()
    change({str(table.name): table for table in tables.tables.values()})
    seen = after(lambda connection: make(connection, tables)) != after_migrating
    assert seen == (bare.backend.name in seen_by)


def test_the_comparison_finds_a_copy_the_same(after, after_migrating):
    assert after(lambda connection: make(connection, copy_of_tables())) == after_migrating


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("left_out", "seen_by"),
    [
        ("STORAGE", {"postgresql"}),
        ("COMMENT ON COLUMN", {"postgresql"}),
        (" VIEW ", {"sqlite", "postgresql"}),
    ],
)
def test_the_comparison_sees_what_is_not_a_table(left_out, seen_by, bare, after, after_migrating):
    without = after(lambda connection: make(connection, copy_of_tables(), without=left_out))
    assert (without != after_migrating) == (bare.backend.name in seen_by)


def copy_of_tables():
    enter_options_of_postgresql()
    tables = MetaData(schema=CODE_SCHEMA)
    for table in metadata.tables.values():
        copied = table.to_metadata(tables)
        if table is record_batches:
            # What SQLAlchemy does not copy.
            copied.primary_key.ddl_if(dialect="sqlite")
    return tables


def make(connection, tables, without="nothing at all"):
    """Create the tables and what no Table holds, except statements with the text `without`."""
    tables.create_all(connection)
    for statement in ddl.after_tables(connection.dialect.name, connection.dialect.__dict__.get("store_schema")):
        is_of_a_view = without == " VIEW " and any(view in statement.statement for view in VIEWS)
        if without not in statement.statement and not is_of_a_view:
            connection.execute(statement)


def test_every_table_and_every_column_says_what_it_holds():
    tables = list(metadata.tables.values())
    assert len(tables) > 20
    assert [table.name for table in tables if not table.comment] == []
    assert [f"{table.name}.{c.name}" for table in tables for c in table.columns if not c.comment] == []


def test_postgresql_knows_the_comment_of_every_column_of_the_tables_and_of_the_view(txnstore_postgresql_store):
    without = (
        "SELECT c.relname, a.attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
        " WHERE c.relnamespace = 'txnstore'::regnamespace AND c.relkind IN ('r', 'p', 'v') AND NOT c.relispartition"
        " AND a.attnum > 0"
        " AND c.relname <> 'store_version' AND col_description(c.oid, a.attnum) IS NULL"
    )
    rows = txnstore_postgresql_store.read(lambda connection: connection.exec_driver_sql(without).all())
    assert rows == []


def test_every_table_is_strict_on_sqlite_but_for_that_of_alembic(txnstore_sqlite_store):
    rows = txnstore_sqlite_store.read(lambda connection: connection.exec_driver_sql("PRAGMA table_list").all())
    lax = {row.name for row in rows if row.type == "table" and not row.strict and row.name.startswith("txnstore_")}
    assert lax == {"txnstore_store_version"}


def test_postgresql_does_not_try_to_compress_payloads_and_positions(txnstore_postgresql_store):
    stored = (
        "SELECT attname FROM pg_attribute WHERE attrelid = 'txnstore.record_batches'::regclass AND attstorage = 'e'"
    )
    names = txnstore_postgresql_store.read(lambda connection: connection.exec_driver_sql(stored).scalars().all())
    assert set(names) == {"key_data", "value_data", "key_positions", "value_positions"}


def test_dropping_the_metadata_leaves_nothing_behind(after):
    def make_and_drop(connection):
        metadata.create_all(connection)
        metadata.drop_all(connection, checkfirst=False)

    left = after(make_and_drop)
    # SQLite keeps its own table of the numbers it gave out.
    assert [row for rows in left.values() for row in rows if "sqlite_sequence" not in row] == []


def test_every_name_fits_postgresql():
    names = [
        str(named.name)
        for table in metadata.tables.values()
        for named in (table, *table.columns, *table.constraints, *table.indexes)
    ]
    assert [name for name in names if len(name.encode()) > 63] == []
