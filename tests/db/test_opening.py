"""The first look at a database: empty, ours, older, newer, somebody else's."""

from __future__ import annotations

import re

import pytest
from sqlalchemy import text

from txnstore.db import opening
from txnstore.db.cluster.cluster import open_cluster
from txnstore.db.names import VIEWS
from txnstore.db.opening import connect_store, open_store
from txnstore.db.roles import grants
from txnstore.db.roles.grants import RoleScope
from txnstore.db.roles.rights import Kind
from txnstore.db.schema import SCHEMA_VERSION, metadata
from txnstore.errors import ForeignSchema, InvalidUrl, PermissionDenied, SchemaOutdated, WrongCluster
from txnstore.log.topics import create_topic, list_topics


def run(store, *statements):
    """Run statements in which `[name]` stands for one of our tables."""
    before, after = ("txnstore_", "") if store.backend.name == "sqlite" else (f"{store.schema}.", "")

    def work(connection):
        for statement in statements:
            connection.execute(text(statement.replace("[", before).replace("]", after)))

    store.write(work)


@pytest.fixture
def bare(txnstore_empty_url):
    """An empty database with room for our tables."""
    with connect_store(txnstore_empty_url) as store:
        if store.backend.name == "postgresql":
            run(store, "CREATE SCHEMA txnstore")
        yield store


def test_the_first_use_makes_the_tables_and_the_second_finds_them(txnstore_empty_url, client_path):
    with open_store(txnstore_empty_url) as store:
        client_path(store)
    with open_store(txnstore_empty_url) as again:
        assert again.store_uuid == store.store_uuid
        assert again.read(list_topics) == ["orders"]


def test_an_empty_schema_that_is_there_already_is_used(bare, txnstore_empty_url, client_path):
    with open_store(txnstore_empty_url) as store:
        client_path(store)


def test_an_empty_database_is_left_empty_by_who_must_not_make_tables(txnstore_empty_url, tmp_path):
    is_file = txnstore_empty_url.startswith("sqlite")
    found = "leads to no file" if is_file else "has no tables of txnstore in the schema txnstore"
    with pytest.raises(SchemaOutdated, match=f"{found}; run `txnstore migrate`"):
        open_store(txnstore_empty_url, create=False)
    assert list(tmp_path.iterdir()) == [], "the SQLite file was made"
    with connect_store(txnstore_empty_url) as store:
        assert opening.look(store).found is opening.Found.NOTHING


def test_a_new_store_is_told_of_once(txnstore_empty_url, caplog):
    caplog.set_level("INFO", logger="txnstore.db.opening")
    for _ in range(2):
        open_store(txnstore_empty_url).close()
    (record,) = caplog.records
    place = "" if txnstore_empty_url.startswith("sqlite") else " in the schema txnstore"
    assert (record.levelname, record.event) == ("INFO", "store_made")
    assert re.fullmatch(rf"made a new store in [a-z+]+://\S+{place}", record.getMessage())


def test_a_schema_beside_that_of_a_store_is_warned_of(txnstore_postgresql_url, caplog):
    with pytest.raises(SchemaOutdated, match=r"in the schema shop \(there is a store in txnstore\); run `txnstore mi"):
        open_store(txnstore_postgresql_url, schema="shop", create=False)
    assert caplog.records == []
    open_store(txnstore_postgresql_url, schema="shop").close()
    (record,) = caplog.records
    assert (record.levelname, record.event) == ("WARNING", "store_made")
    assert record.getMessage().endswith(" in the schema shop (there is a store in txnstore)")


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("statements", "told"),
    [
        (["CREATE TABLE [stores] (id INTEGER)"], "did not make them"),
        (["CREATE TABLE [topics] (id INTEGER)"], "did not make them"),
        (["CREATE TABLE [record_batches] (id INTEGER)"], "did not make them"),
        (["CREATE TABLE [store_version] (version_num TEXT)"], "did not make them"),
        (["CREATE VIEW [records] AS SELECT 1 AS one"], "did not make them"),
        (["CREATE VIEW [outbox] AS SELECT 1 AS one"], "did not make"),
        (["CREATE TABLE [stores] (id INTEGER)", "CREATE TABLE [store_version] (version_num TEXT)"], "no version"),
        (
            [
                "CREATE TABLE [stores] (id INTEGER)",
                "CREATE TABLE [store_version] (version_num TEXT)",
                "INSERT INTO [store_version] VALUES ('1a2b3c4d5e6f')",
            ],
            "no version",
        ),
        (["CREATE TABLE [stores] (id INTEGER)", "CREATE TABLE [store_version] (id INTEGER)"], "no version"),
        (
            [
                "CREATE TABLE [stores] (id INTEGER)",
                "CREATE TABLE [store_version] (version_num TEXT)",
                f"INSERT INTO [store_version] VALUES ('{SCHEMA_VERSION:04}')",
            ],
            "some are missing",
        ),
    ],
)
def test_tables_of_others_with_our_names_are_refused_and_left_alone(bare, txnstore_empty_url, statements, told):
    run(bare, *statements)
    for open_it in (open_store, lambda url: open_store(url, create=False), opening.upgrade):
        with pytest.raises(ForeignSchema, match=told) as caught:
            open_it(bare if open_it is opening.upgrade else txnstore_empty_url)
    assert ("open the store with another schema" in str(caught.value)) == (bare.backend.name == "postgresql")
    made = bare.read(lambda connection: bare.backend.table_names(connection, bare.schema))
    assert len(made) == sum(statement.startswith("CREATE") for statement in statements)


def test_a_store_that_is_in_no_list_of_databases_is_refused(store, url):
    run(store, "DELETE FROM [databases]")
    with pytest.raises(WrongCluster, match="has no row for the store"):
        open_cluster(url)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("table", ["record_batches", "transactions", "stores", "store_version", "outbox"])
def test_a_half_set_of_tables_is_refused(store, url, table):
    run(
        store,
        *(f"DROP VIEW [{view}]" for view in VIEWS),
        f"DROP TABLE [{table}]",
    )
    with pytest.raises(ForeignSchema):
        open_store(url)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE [stores] SET schema_version = 7",
        "UPDATE [store_version] SET version_num = 'abcd'",
        "DELETE FROM [store_version]",
        "ALTER TABLE [stores] DROP COLUMN next_producer_id",
    ],
)
def test_versions_that_contradict_each_other_are_refused(store, url, statement):
    drop_users = [
        "ALTER TABLE [stores] DROP CONSTRAINT stores_next_producer_id",
        "DROP TRIGGER stores_producer_ids ON [stores]",
    ]
    if statement.startswith("ALTER") and store.backend.name == "sqlite":
        run(store, "DROP TABLE [stores]", "CREATE TABLE [stores] (store_uuid TEXT, schema_version INTEGER)")
        run(store, "INSERT INTO [stores] VALUES ('x', 1)")
    else:
        run(store, *(drop_users if statement.startswith("ALTER") else []), statement)
    with pytest.raises(ForeignSchema):
        open_store(url)


def test_a_column_that_is_missing_shows_as_a_foreign_schema_when_it_is_needed(store, url):
    run(store, "ALTER TABLE [topics] DROP COLUMN created_ms")
    with open_store(url) as again, pytest.raises(ForeignSchema):
        again.write(lambda connection: create_topic(connection, "orders"))


def test_a_table_that_is_dropped_under_an_open_store_shows_as_a_foreign_schema(store):
    run(
        store,
        *(f"DROP VIEW [{view}]" for view in VIEWS),
        "DROP TABLE [topics]",
    )
    with pytest.raises(ForeignSchema):
        store.read(list_topics)


def test_a_store_that_has_lost_its_row_gets_no_other_one(store, url):
    run(store, "DELETE FROM [stores]")
    for _ in range(2):
        with pytest.raises(ForeignSchema, match="the row of `stores` is missing, though there is a store: restore it"):
            open_store(url)
    run(store, "DELETE FROM [databases]")
    open_store(url).close()  # as SQL that was printed leaves them


@pytest.mark.slow_but_first
@pytest.mark.parametrize("table", ["stores", "store_version", "record_batches", "topics"])
def test_rows_that_a_role_does_not_see_are_not_taken_for_missing(
    table, new_database, new_role, granted, txnstore_postgres_server
):
    database, role = new_database(), new_role()
    open_store(txnstore_postgres_server.url(database)).close()
    granted(
        database,
        role,
        "GRANT USAGE ON SCHEMA txnstore TO {role}",
        "GRANT SELECT, INSERT ON ALL TABLES IN SCHEMA txnstore TO {role}",
        f"ALTER TABLE txnstore.{table} ENABLE ROW LEVEL SECURITY",
    )
    with pytest.raises(PermissionDenied, match=f"may read {table} in .* no policy shows it any row"):
        open_store(txnstore_postgres_server.url(database, role, "secret"))
    for policy in ("FOR INSERT TO {role} WITH CHECK (true)", "AS RESTRICTIVE USING (true)", "TO postgres USING (true)"):
        granted(database, role, f"CREATE POLICY other ON txnstore.{table} {policy}")
        with pytest.raises(PermissionDenied):
            open_store(txnstore_postgres_server.url(database, role, "secret"))
        granted(database, role, f"DROP POLICY other ON txnstore.{table}")
    granted(database, role, f"CREATE POLICY own ON txnstore.{table} FOR SELECT TO {{role}} USING (true)")
    open_store(txnstore_postgres_server.url(database, role, "secret")).close()
    # Its owner sees them.
    open_store(txnstore_postgres_server.url(database)).close()


def test_a_role_without_rights_is_told_how_it_gets_them(new_database, new_role, granted, txnstore_postgres_server):
    database, role, empty = new_database(), new_role(), new_database()
    open_store(txnstore_postgres_server.url(database)).close()
    with pytest.raises(
        PermissionDenied, match=r"for schema txnstore.* grant this role its kind: `txnstore roles grant`"
    ):
        open_store(txnstore_postgres_server.url(database, role, "secret"))
    told = rf"42501.*no store in .*{empty}.* yet: run `txnstore migrate` as a role that may.*CREATE SCHEMA shop AUTHOR"
    with pytest.raises(PermissionDenied, match=told) as refused:
        open_store(txnstore_postgres_server.url(empty, role, "secret"), schema="shop")
    assert "secret" not in str(refused.value)
    granted(empty, role, "CREATE SCHEMA shop AUTHORIZATION {role}")
    open_store(txnstore_postgres_server.url(empty, role, "secret"), schema="shop").close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["its kind is granted", "SELECT is taken away"])
def test_a_role_that_may_read_more_than_it_is_shown_is_told_what_to_do(
    way, new_database, new_role, granted, txnstore_postgres_server
):
    database, role, limited = new_database(), new_role(), new_role()
    url = txnstore_postgres_server.url(database, role, "secret")
    with open_store(txnstore_postgres_server.url(database)) as store:
        grants.apply(store, grants.grant(store, Kind.CONSUMER, role))
        granted(database, role, "GRANT SELECT ON ALL TABLES IN SCHEMA txnstore TO {role}")
        open_store(url).close()
        grants.apply(store, grants.grant(store, Kind.CONSUMER, limited, RoleScope(topics=("own",))))
        with pytest.raises(PermissionDenied, match=r"may read .* row-level security is on there") as refused:
            open_store(url)
        told = re.search(r"may read (.*) in postgresql", str(refused.value))
        assert told is not None
        hidden = told[1].split(", ")
        assert "transactions" in hidden
        assert "group_offsets" not in hidden
        if way == "its kind is granted":
            grants.apply(store, grants.grant(store, Kind.MONITOR, role))
        else:
            granted(database, role, *(f"REVOKE SELECT ON txnstore.{table} FROM {{role}}" for table in hidden))
    open_store(url).close()


def test_columns_and_tables_that_others_added_do_no_harm(store, url, client_path):
    run(store, "ALTER TABLE [outbox] ADD COLUMN note TEXT", "CREATE TABLE [notes] (note TEXT)")
    with open_store(url) as again:
        client_path(again)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "schema", ["", "1st", "a b", 'x"; DROP TABLE y', "pg_store", "information_schema", "PG_x", "a" * 64, "ä", None, 7]
)
def test_a_schema_of_an_impossible_name_is_refused(url, schema):
    with pytest.raises(InvalidUrl, match="schema"):
        open_store(url, schema=schema)


@pytest.mark.slow
def test_two_stores_live_in_two_schemas_of_one_database(txnstore_postgresql_url, client_path):
    with (
        open_store(txnstore_postgresql_url) as one,
        open_store(txnstore_postgresql_url, schema="Second") as other,
        open_store(txnstore_postgresql_url, schema="s" * 63) as third,
    ):
        client_path(one)
        client_path(other)
        client_path(third)
        assert len({one.store_uuid, other.store_uuid, third.store_uuid}) == 3
        other.write(lambda connection: create_topic(connection, "only-here"))
        assert one.read(list_topics) == ["orders"]
        assert other.read(list_topics) == ["only-here", "orders"]


def test_every_table_is_looked_for():
    # What `opening` takes for ours is what there is.
    assert {str(table.name) for table in metadata.tables.values()} == opening._OUR_TABLES
