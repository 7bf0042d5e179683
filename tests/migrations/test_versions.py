"""From one version of the tables to the next and back: what was logged survives, other code is kept out."""

from __future__ import annotations

import logging
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import insert, select, text

from txnstore.db import migrating, opening
from txnstore.db.opening import connect_store, open_store
from txnstore.db.schema import OLDEST_WRITER_VERSION, SCHEMA_VERSION, group_members, groups
from txnstore.errors import ForeignSchema, SchemaOutdated, SchemaTooNew, StatementFailed
from txnstore.groups.offsets import add_pending_offsets, commit_offsets, finish_pending_offsets, read_offsets
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic
from txnstore.model import GroupMembership, OffsetAndMetadata, ProducerIdentity, Record
from txnstore.testing.postgres_server import connection_string

NEXT_VERSION = SCHEMA_VERSION + 1
OUTDATED = rf"of version {SCHEMA_VERSION}, this txnstore needs {NEXT_VERSION}; run `txnstore migrate`"
TOO_NEW = rf"of version {NEXT_VERSION}, this txnstore knows {SCHEMA_VERSION}; upgrade the package"
MIGRATION = '''"""A version of the tables that exists in tests only."""

from alembic import op
from sqlalchemy import Column, Text

from txnstore.db.names import StoreName

revision = "{version:04}"
down_revision = "{before:04}"
branch_labels = None
depends_on = None
oldest_writer_version = {version}


def upgrade():
    schema = op.get_context().opts["store_schema"]
    op.add_column(StoreName("outbox"), Column("colour", Text, comment="A colour, 100 % for: tests."), schema=schema)
    {then}


def downgrade():
    op.drop_column(StoreName("outbox"), "colour", schema=op.get_context().opts["store_schema"])
'''

GROUP = {"generation": 5, "commit_number": 3, "last_update_ms": 0}
#: As the first version of the tables had it.
OLD_MEMBER = {
    "member_id": "m",
    "client_id": "c",
    "generation": 5,
    "session_timeout_ms": 45_000,
    "deadline_ms": 2**50,
    "subscription": '["t"]',
    "assignment": '{"t": [0]}',
}


@pytest.fixture
def next_version(tmp_path, monkeypatch):
    """Make the code that runs one of the next version, which has one more migration."""
    folder = tmp_path / "migrations"
    shutil.copytree(migrating.migrations_folder(), folder, ignore=shutil.ignore_patterns("__pycache__"))

    def begin(then="pass"):
        text = MIGRATION.format(version=NEXT_VERSION, before=SCHEMA_VERSION, then=then)
        (folder / "versions" / "next.py").write_text(text)
        monkeypatch.setattr(migrating, "migrations_folder", lambda: folder)
        monkeypatch.setattr(opening, "SCHEMA_VERSION", NEXT_VERSION)

    return begin


def log(store, name="orders"):
    topic = store.write(lambda connection: create_topic(connection, name))
    batch = encode([Record(b"first", b"key"), Record(None)])
    store.write(lambda connection: append(connection, [Append(topic.partition_ids[0], batch)]))
    return topic.partition_ids[0]


def read(store, partition_id):
    page = store.read(lambda connection: fetch(connection, {partition_id: 0}))[partition_id]
    return [(record.offset, record.key, record.value) for batch in page.batches for record in batch.records()]


def versions(store):
    statement = text("SELECT schema_version, oldest_writer_version FROM txnstore.stores")
    if store.backend.name == "sqlite":
        statement = text("SELECT schema_version, oldest_writer_version FROM txnstore_stores")
    return tuple(store.read(lambda connection: connection.execute(statement).one()))


def test_the_code_is_of_the_version_of_the_newest_migration():
    assert migrating.newest_version() == SCHEMA_VERSION


def test_a_new_store_carries_the_versions_of_the_code(store):
    assert versions(store) == (SCHEMA_VERSION, OLDEST_WRITER_VERSION)


def test_every_migration_says_which_code_may_still_write(store, url, next_version):
    next_version()
    with connect_store(url) as newer:
        opening.upgrade(newer)
        assert versions(newer) == (NEXT_VERSION, NEXT_VERSION)


def test_what_was_logged_survives_an_upgrade_and_the_way_back(store, url, next_version, monkeypatch):
    partition_id = log(store)
    before = read(store, partition_id)
    next_version()
    with connect_store(url) as newer:
        assert opening.upgrade(newer).schema_version == SCHEMA_VERSION
        assert read(newer, partition_id) == before
        newer.write(lambda connection: back_to(connection, newer, SCHEMA_VERSION))
    monkeypatch.setattr(opening, "SCHEMA_VERSION", SCHEMA_VERSION)
    with open_store(url) as same:
        assert same.store_uuid == store.store_uuid
        assert versions(same) == (SCHEMA_VERSION, OLDEST_WRITER_VERSION)
        assert read(same, partition_id) == before
        assert log(same, "more") > partition_id


def back_to(connection, store, version):
    migrating.downgrade(connection, kind=store.backend.name, schema=store.schema, to_version=version)


def test_members_of_groups_in_the_first_version_have_to_join_again_and_their_group_stays(store, url):
    store.write(lambda connection: connection.execute(insert(groups).values(group_id="g", **GROUP)))
    store.write(lambda connection: back_to(connection, store, 1))
    store.write(lambda connection: connection.execute(insert(group_members).values(group_id="g", **OLD_MEMBER)))
    with connect_store(url) as older:
        assert opening.upgrade(older).schema_version == 1
        generations = older.read(lambda connection: connection.execute(select(groups.c.generation)).scalars().all())
        members = older.read(lambda connection: connection.execute(select(group_members)).all())
    assert (generations, members) == ([5], [])


def test_offsets_without_metadata_survive_the_way_back_and_an_upgrade(store, url):
    """Before version 4 nobody could tell them from those with an empty text: these are taken for them."""
    committer = GroupMembership("g")
    topic = store.write(lambda connection: create_topic(connection, "orders", partition_count=6))
    several = [OffsetAndMetadata(5, 2, metadata) for metadata in (None, "", "why")]
    offsets = dict(zip(topic.partition_ids, several, strict=False))
    store.write(lambda connection: commit_offsets(connection, committer, offsets))
    pending = dict(zip(topic.partition_ids[3:], several, strict=True))
    producer = ProducerIdentity(7, 0)
    store.write(lambda connection: add_pending_offsets(connection, committer, pending, producer))
    store.write(lambda connection: back_to(connection, store, 3))
    with connect_store(url) as older:
        assert opening.upgrade(older).schema_version == 3
        older.write(lambda connection: finish_pending_offsets(connection, ["g"], 7, commit=True))
        found = older.read(lambda connection: read_offsets(connection, "g", [*offsets, *pending])).offsets
    assert found == {
        number: OffsetAndMetadata(5, 2, offset.metadata or None) for number, offset in (offsets | pending).items()
    }


def test_the_way_back_to_nothing_leaves_an_empty_database_that_can_be_used_again(store, url, catalogue):
    log(store)
    before = catalogue(store)
    store.write(lambda connection: back_to(connection, store, 0))
    assert opening.look(store).found is opening.Found.NOTHING
    with open_store(url) as again:
        assert again.store_uuid != store.store_uuid
        assert catalogue(again) == before
        assert read(again, log(again)) == [(0, b"key", b"first"), (1, None, None)]


def test_tables_of_an_older_version_are_refused_with_the_command_that_upgrades_them(store, url, next_version):
    next_version()
    with pytest.raises(SchemaOutdated, match=OUTDATED):
        open_store(url)


def test_tables_of_a_newer_version_are_refused(store, url, next_version, monkeypatch):
    next_version()
    with connect_store(url) as newer:
        opening.upgrade(newer)
    monkeypatch.setattr(opening, "SCHEMA_VERSION", SCHEMA_VERSION)
    with pytest.raises(SchemaTooNew, match=TOO_NEW):
        open_store(url)
    with connect_store(url) as older, pytest.raises(SchemaTooNew):
        opening.upgrade(older)


def test_a_migration_that_fails_leaves_the_store_as_it_was(store, url, next_version, catalogue, monkeypatch):
    partition_id = log(store)
    before = catalogue(store)
    next_version(then='op.execute("INSERT INTO no_such_table VALUES (1)")')
    with connect_store(url) as newer, pytest.raises((ForeignSchema, StatementFailed)):
        opening.upgrade(newer)
    monkeypatch.setattr(opening, "SCHEMA_VERSION", SCHEMA_VERSION)
    with open_store(url) as same:
        assert catalogue(same) == before
        assert read(same, partition_id) == [(0, b"key", b"first"), (1, None, None)]


def test_of_several_that_upgrade_at_once_one_does_and_the_others_wait_for_it(store, url, next_version, monkeypatch):
    next_version()
    stores = [connect_store(url) for _ in range(4)]
    all_have_looked, look = threading.Barrier(len(stores)), opening.look

    def look_together(one):
        finding = look(one)
        if finding.schema_version == SCHEMA_VERSION:
            all_have_looked.wait(10)
        return finding

    monkeypatch.setattr(opening, "look", look_together)
    with ThreadPoolExecutor(len(stores)) as threads:
        list(threads.map(opening.upgrade, stores))
    assert versions(stores[0]) == (NEXT_VERSION, NEXT_VERSION)
    for one in stores:
        one.close()


def test_of_several_that_open_an_empty_database_at_once_one_makes_the_tables(txnstore_empty_url):
    count = 6
    begin = threading.Barrier(count)

    def open_it(_):
        begin.wait(10)
        with open_store(txnstore_empty_url) as one:
            return one.store_uuid

    with ThreadPoolExecutor(count) as threads:
        assert len(set(threads.map(open_it, range(count)))) == 1


def test_who_upgrades_waits_for_another_process_that_does_and_then_finds_it_done(
    txnstore_postgresql_url, txnstore_postgresql_store, next_version
):
    next_version()
    driver = psycopg.connect(connection_string(txnstore_postgresql_url))
    with driver as other, connect_store(txnstore_postgresql_url) as late:
        other.execute("UPDATE txnstore.alembic_version SET version_num = %s", [f"{NEXT_VERSION:04}"])
        other.execute("UPDATE txnstore.stores SET schema_version = %s", [NEXT_VERSION])
        other.execute("ALTER TABLE txnstore.outbox ADD COLUMN colour text")
        thread = threading.Thread(target=opening.upgrade, args=[late])
        thread.start()
        assert somebody_waits_for(other)
        other.commit()
        thread.join(20)
        assert not thread.is_alive()
        assert opening.look(late).schema_version == NEXT_VERSION


def somebody_waits_for(connection):
    """Whether another session comes to wait for a lock of this one, within ten seconds."""
    waiting = "SELECT pg_sleep(0.01), count(*) FROM pg_locks WHERE pg_backend_pid() = ANY(pg_blocking_pids(pid))"
    return any(connection.execute(waiting).fetchone()[1] for _ in range(1000))


def test_alembic_tells_of_our_steps_at_debug_and_of_others_as_ever(caplog):
    caplog.set_level("DEBUG")
    migrating.upgrade_sql(kind="sqlite")
    steps = [record for record in caplog.records if record.getMessage().startswith("Running upgrade")]
    assert len(steps) == SCHEMA_VERSION
    assert {(record.name, record.levelname) for record in steps} == {("txnstore.db.migrating", "DEBUG")}
    caplog.clear()
    alembics = logging.getLogger("alembic.runtime.migration")
    with migrating._alone_and_quiet():
        alembics.info("ours")
        alembics.warning("a warning of ours")
        other = threading.Thread(target=alembics.info, args=("of another thread",))
        other.start()
        other.join()
    assert [record.getMessage() for record in caplog.records if record.name == alembics.name] == [
        "a warning of ours",
        "of another thread",
    ]
