"""From one version of the tables to the next and back: what was logged survives, other code is kept out."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import column, insert, select, table

from tests.tools.crashes import When, every_crash, noting, steps_of
from tests.tools.killed_children import kill_at
from tests.tools.later_versions import FIRST_LATER, OLDEST_WRITERS, SECOND_LATER, THIRD_LATER, elsewhere, upgrade_as
from txnstore import KafkaError, KafkaException
from txnstore.admin import AdminClient
from txnstore.db import migrating, opening
from txnstore.db.names import CODE_SCHEMA, StoreName
from txnstore.db.opening import connect_store, open_store
from txnstore.db.schema import OLDEST_WRITER_VERSION, SCHEMA_VERSION, group_members, groups, metadata, stores
from txnstore.errors import SchemaOutdated, SchemaTooNew, StatementFailed
from txnstore.groups.offsets import commit_offsets, read_offsets
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic, delete_topic, list_topics
from txnstore.model import GroupMembership, OffsetAndMetadata, Record
from txnstore.testing.postgres_server import connection_string

#: A step that no upgrade comes to.
NEVER = 1_000_000
PATIENCE_SECONDS = 60.0
OUTDATED = rf"of version {SCHEMA_VERSION}, this txnstore needs {FIRST_LATER}; run `txnstore migrate`"
TOO_NEW = rf"of version {FIRST_LATER}, this txnstore knows {SCHEMA_VERSION}; upgrade the package"

GROUP = {"generation": 5, "commit_number": 3, "last_update_ms": 0}
MEMBER = {
    "member_id": "m",
    "client_id": "c",
    "generation": 5,
    "session_timeout_ms": 45_000,
    "deadline_ms": 2**50,
    "subscription": '["t"]',
    "assignment": '{"t": [0]}',
}


def log(store, name="orders"):
    topic = store.write(lambda connection: create_topic(connection, name))
    batch = encode([Record(b"first", b"key"), Record(None)])
    store.write(lambda connection: append(connection, [Append(topic.partition_ids[0], batch)]))
    return topic.partition_ids[0]


def read(store, partition_id):
    page = store.read(lambda connection: fetch(connection, {partition_id: 0}))[partition_id]
    return [(record.offset, record.key, record.value) for batch in page.batches for record in batch.records()]


def versions(store):
    """The versions that the store's own row tells of."""
    statement = select(stores.c.schema_version, stores.c.oldest_writer_version)
    return tuple(store.read(lambda connection: connection.execute(statement).one()))


def back_to(store, version):
    store.write(
        lambda connection: migrating.downgrade(
            connection, kind=store.backend.name, schema=store.schema, to_version=version
        )
    )


def test_the_code_is_of_the_version_of_the_newest_migration():
    newest = ScriptDirectory(str(migrating.migrations_folder())).get_current_head()
    assert newest == migrating._revision(SCHEMA_VERSION)


def test_a_new_store_carries_the_versions_of_the_code(store):
    assert versions(store) == (SCHEMA_VERSION, OLDEST_WRITER_VERSION)


def test_the_tables_of_a_new_store_hold_three_rows(txnstore_empty_url):
    with open_store(txnstore_empty_url) as store:
        counts = store.read(lambda c: {t.name: len(c.execute(t.select()).all()) for t in metadata.tables.values()})
        assert {name: count for name, count in counts.items() if count} == {
            "stores": 1,
            "databases": 1,
            "outbox_sequencers": 1,
        }


def test_every_migration_says_which_code_may_still_write(store, url, code_of_version):
    for version in (FIRST_LATER, SECOND_LATER, THIRD_LATER):
        code_of_version(version)
        with connect_store(url) as newer:
            assert opening.upgrade(newer).schema_version == version - 1
            assert versions(newer) == (version, OLDEST_WRITERS[version])
    for version in (SECOND_LATER, FIRST_LATER, SCHEMA_VERSION):
        back_to(store, version)
        assert versions(store) == (version, OLDEST_WRITERS[version])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("later", [FIRST_LATER, THIRD_LATER])
def test_what_was_logged_survives_an_upgrade_and_the_way_back(store, url, code_of_version, later, catalogue):
    partition_id = log(store)
    before, made = read(store, partition_id), catalogue(store)
    code_of_version(later)
    with connect_store(url) as newer:
        assert opening.upgrade(newer).schema_version == SCHEMA_VERSION
        assert read(newer, partition_id) == before
        # A client of the version before that is open goes on.
        assert read(store, partition_id) == before
        assert log(store, "meanwhile") > partition_id
        back_to(newer, SCHEMA_VERSION)
    code_of_version(SCHEMA_VERSION)
    with open_store(url) as same:
        assert same.store_uuid == store.store_uuid
        assert versions(same) == (SCHEMA_VERSION, OLDEST_WRITER_VERSION)
        assert catalogue(same) == made
        assert read(same, partition_id) == before
        assert log(same, "more") > partition_id


def test_tables_made_by_newer_code_are_those_that_an_upgrade_makes(url, code_of_version, catalogue):
    code_of_version(THIRD_LATER)
    (place, options) = elsewhere(url)
    with connect_store(url) as upgraded, open_store(place, **options) as made:
        opening.upgrade(upgraded)
        assert catalogue(made) == catalogue(upgraded)
        assert versions(made) == versions(upgraded) == (THIRD_LATER, SECOND_LATER)


def test_rows_that_clients_write_anew_may_go_and_what_belongs_to_them_stays(store, url, code_of_version):
    store.write(lambda connection: connection.execute(insert(groups).values(group_id="g", **GROUP)))
    store.write(lambda connection: connection.execute(insert(group_members).values(group_id="g", **MEMBER)))
    code_of_version(SECOND_LATER)
    with connect_store(url) as newer:
        opening.upgrade(newer)
        generations = newer.read(lambda connection: connection.execute(select(groups.c.generation)).scalars().all())
        members = newer.read(lambda connection: connection.execute(select(group_members)).all())
    assert (generations, members) == ([5], [])


def test_rows_of_a_table_that_is_remade_survive_an_upgrade_and_the_way_back(store, url, code_of_version, catalogue):
    """The later version cannot tell a commit without metadata from one with an empty text: it is taken for one."""
    topic = store.write(lambda connection: create_topic(connection, "orders", partition_count=3))
    several = [OffsetAndMetadata(5, 2, metadata) for metadata in (None, "", "why")]
    offsets = dict(zip(topic.partition_ids, several, strict=True))
    store.write(lambda connection: commit_offsets(connection, GroupMembership("g"), offsets))
    made = catalogue(store)

    def metadata_by_partition(of_store):
        found = of_store.read(lambda connection: read_offsets(connection, "g", topic.partition_ids)).offsets
        return [found[partition_id].metadata for partition_id in topic.partition_ids]

    code_of_version(SECOND_LATER)
    with connect_store(url) as newer:
        opening.upgrade(newer)
        assert metadata_by_partition(newer) == ["", "", "why"]
        back_to(newer, FIRST_LATER)
        assert metadata_by_partition(newer) == [None, None, "why"]
        back_to(newer, SCHEMA_VERSION)
    assert catalogue(store) == made


def test_a_migration_may_read_what_it_writes_and_work_in_portions(store, url, code_of_version):
    for number in range(5):
        store.write(lambda connection, number=number: create_topic(connection, f"Topic-{number}"))
    code_of_version(THIRD_LATER)
    with connect_store(url) as newer:
        opening.upgrade(newer)
        assert folded_names(newer) == [f"topic-{number}" for number in range(5)]


def folded_names(store):
    topics = table(StoreName("topics"), column("folded_name"), schema=CODE_SCHEMA)
    return sorted(store.read(lambda connection: connection.execute(select(topics.c.folded_name)).scalars().all()))


def test_the_way_back_to_nothing_leaves_an_empty_database_that_can_be_used_again(store, url, catalogue):
    log(store)
    before = catalogue(store)
    back_to(store, 0)
    assert opening.look(store).found is opening.Found.NOTHING
    with open_store(url) as again:
        assert again.store_uuid != store.store_uuid
        assert catalogue(again) == before
        assert read(again, log(again)) == [(0, b"key", b"first"), (1, None, None)]


def test_tables_of_an_older_version_are_refused_with_the_command_that_upgrades_them(store, url, code_of_version):
    code_of_version(FIRST_LATER)
    with pytest.raises(SchemaOutdated, match=OUTDATED):
        open_store(url)


def test_tables_of_a_newer_version_are_refused(store, url, code_of_version):
    code_of_version(FIRST_LATER)
    with connect_store(url) as newer:
        opening.upgrade(newer)
    code_of_version(SCHEMA_VERSION)
    with pytest.raises(SchemaTooNew, match=TOO_NEW):
        open_store(url)
    with connect_store(url) as older, pytest.raises(SchemaTooNew):
        opening.upgrade(older)


def test_a_program_that_must_not_write_any_more_hears_so_at_its_next_connection_and_look_at_topics(
    store, url, code_of_version
):
    store.write(lambda connection: create_topic(connection, "orders"))
    with AdminClient({"bootstrap.servers": url}) as admin:
        assert list(admin.list_topics(timeout=PATIENCE_SECONDS).topics) == ["orders"]
        upgraded_elsewhere(url, code_of_version, FIRST_LATER)
        store._dispose()
        assert store.read(list_topics) == ["orders"]
        assert list(admin.list_topics(timeout=PATIENCE_SECONDS).topics) == ["orders"]
        upgraded_elsewhere(url, code_of_version, SECOND_LATER)
        store._dispose()
        with pytest.raises(SchemaTooNew, match=f"must know version {SECOND_LATER}.*knows {SCHEMA_VERSION}; upgrade"):
            store.read(list_topics)
        with pytest.raises(KafkaException) as refused:
            admin.list_topics(timeout=PATIENCE_SECONDS)
        assert refused.value.args[0].code() == KafkaError.UNSUPPORTED_VERSION


def upgraded_elsewhere(url, code_of_version, version):
    """Let somebody with newer code upgrade the store, and this code be as old as before."""
    code_of_version(version)
    with connect_store(url) as newer:
        opening.upgrade(newer)
    code_of_version(SCHEMA_VERSION)


def test_an_upgrade_that_fails_leaves_the_store_as_it_was(store, url, code_of_version, catalogue):
    """Also if the migrations before the one that fails went through."""
    partition_id = log(store)
    store.write(lambda connection: create_topic(connection, "Orders"))
    before = catalogue(store)
    code_of_version(THIRD_LATER)
    with connect_store(url) as newer, pytest.raises(StatementFailed):
        opening.upgrade(newer)
    code_of_version(SCHEMA_VERSION)
    with open_store(url) as same:
        assert catalogue(same) == before
        assert versions(same) == (SCHEMA_VERSION, OLDEST_WRITER_VERSION)
        assert read(same, partition_id) == [(0, b"key", b"first"), (1, None, None)]
        same.write(lambda connection: delete_topic(connection, "Orders"))
    code_of_version(THIRD_LATER)
    with connect_store(url) as newer:
        opening.upgrade(newer)
        assert versions(newer) == (THIRD_LATER, SECOND_LATER)
        assert folded_names(newer) == ["orders"]


@pytest.mark.slow
def test_on_sqlite_an_upgrade_that_crashes_at_any_step_leaves_the_store_as_it_was_or_upgraded(
    txnstore_sqlite_store, txnstore_sqlite_url, code_of_version, catalogue
):
    store, url = txnstore_sqlite_store, txnstore_sqlite_url
    log(store)
    before = catalogue(store)

    def upgrade(newer):
        opening.upgrade(newer)

    code_of_version(THIRD_LATER)
    steps = 0
    for crash in every_crash(lambda: connect_store(url), upgrade, statements_are_all=True):
        steps = crash.step
        with noting(crash):
            is_upgraded = versions(store)[0] == THIRD_LATER
            assert is_upgraded or catalogue(store) == before
        if is_upgraded:
            assert (crash.when, crash.statement) == (When.AFTER, "COMMIT")
            break
    assert steps > 20
    assert versions(store) == (THIRD_LATER, SECOND_LATER)
    assert folded_names(store) == ["orders"]


@pytest.mark.slow
def test_an_upgrade_that_is_killed_at_its_commit_is_done_again_or_is_done(
    store, url, code_of_version, tmp_path, catalogue
):
    log(store)
    before = catalogue(store)
    (place, options) = elsewhere(url)
    open_store(place, **options).close()
    code_of_version(THIRD_LATER)
    with connect_store(place, **options) as newer:
        commit = last_commit(steps_of(opening.upgrade, newer))
    task = (url, THIRD_LATER, str(tmp_path))
    # The first connection to a file may take a few steps more, or fewer.
    points = (kill_at(step, When.BEFORE, upgrade_as, task) for step in itertools.count(commit - 5))
    killed = next(point for point in points if point is None or point.statement == "COMMIT")
    assert killed is not None
    assert catalogue(store) == before
    assert kill_at(killed.step, When.AFTER, upgrade_as, task) is not None
    with open_store(url) as newer:
        assert versions(newer) == (THIRD_LATER, SECOND_LATER)
        assert folded_names(newer) == ["orders"]


def last_commit(points):
    """The step at which an upgrade is committed; what comes after it only reads."""
    last = max(number for number, point in enumerate(points) if point.statement.startswith("UPDATE"))
    return next(point.step for point in points[last:] if point.statement == "COMMIT")


def test_of_several_that_upgrade_at_once_one_does_and_the_others_wait_for_it(store, url, code_of_version, monkeypatch):
    code_of_version(THIRD_LATER)
    stores = [connect_store(url) for _ in range(4)]
    all_have_looked, look = threading.Barrier(len(stores)), opening.look

    def look_together(one):
        finding = look(one)
        if finding.schema_version == SCHEMA_VERSION:
            all_have_looked.wait(PATIENCE_SECONDS)
        return finding

    monkeypatch.setattr(opening, "look", look_together)
    with ThreadPoolExecutor(len(stores)) as threads:
        list(threads.map(opening.upgrade, stores))
    assert versions(stores[0]) == (THIRD_LATER, SECOND_LATER)
    for one in stores:
        one.close()


def test_of_several_processes_that_upgrade_at_once_each_finds_the_store_upgraded(store, url, code_of_version, tmp_path):
    log(store)
    code_of_version(THIRD_LATER)  # makes the folder that the processes find
    tasks = [(url, THIRD_LATER, str(tmp_path))] * 3
    with ThreadPoolExecutor(len(tasks)) as threads:
        ended = list(threads.map(lambda task: kill_at(NEVER, When.BEFORE, upgrade_as, task), tasks))
    assert ended == [None] * len(tasks)
    assert versions(store) == (THIRD_LATER, SECOND_LATER)
    assert folded_names(store) == ["orders"]


def test_of_several_that_open_an_empty_database_at_once_one_makes_the_tables(txnstore_empty_url):
    count = 6
    begin = threading.Barrier(count)

    def open_it(_):
        begin.wait(PATIENCE_SECONDS)
        with open_store(txnstore_empty_url) as one:
            return one.store_uuid

    with ThreadPoolExecutor(count) as threads:
        assert len(set(threads.map(open_it, range(count)))) == 1


def child_that_migrates():
    """Fork a child that asks Alembic for something, and return its process id; one that hangs is ended."""
    child = os.fork()
    if child == 0:
        signal.alarm(int(PATIENCE_SECONDS / 2))
        try:
            migrating.upgrade_sql(kind="sqlite")
            os._exit(0)
        finally:
            os._exit(1)
    return child


def exit_code_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_migrates_though_a_thread_that_it_does_not_have_was_migrating(monkeypatch):
    monkeypatch.setattr(migrating, "FORK_PATIENCE_SECONDS", 0.01)
    with migrating._alone_and_quiet():
        child = child_that_migrates()
    assert exit_code_of(child) == 0
    # And so does its parent.
    assert "CREATE TABLE" in migrating.upgrade_sql(kind="sqlite")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_waits_for_a_thread_that_migrates(monkeypatch):
    """It may be importing Alembic, which its child could never do again."""
    monkeypatch.setattr(migrating, "FORK_PATIENCE_SECONDS", PATIENCE_SECONDS)
    with ThreadPoolExecutor(1) as thread:
        with migrating._alone_and_quiet():
            forked = thread.submit(child_that_migrates)
            with pytest.raises(TimeoutError):
                forked.result(0.2)
        assert exit_code_of(forked.result(PATIENCE_SECONDS)) == 0
    assert "CREATE TABLE" in migrating.upgrade_sql(kind="sqlite")


def test_who_upgrades_waits_for_another_process_that_does_and_then_finds_it_done(
    txnstore_postgresql_url, txnstore_postgresql_store, code_of_version
):
    code_of_version(FIRST_LATER)
    driver = psycopg.connect(connection_string(txnstore_postgresql_url))
    with driver as other, connect_store(txnstore_postgresql_url) as late:
        other.execute("UPDATE txnstore.store_version SET version_num = %s", [f"{FIRST_LATER:04}"])
        other.execute("UPDATE txnstore.stores SET schema_version = %s", [FIRST_LATER])
        other.execute("ALTER TABLE txnstore.outbox ADD COLUMN colour text")
        thread = threading.Thread(target=opening.upgrade, args=[late])
        thread.start()
        assert somebody_waits_for(other)
        other.commit()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
        assert opening.look(late).schema_version == FIRST_LATER


def somebody_waits_for(connection):
    """Whether another session comes to wait for a lock of this one, within a minute."""
    waiting = "SELECT pg_sleep(0.01), count(*) FROM pg_locks WHERE pg_backend_pid() = ANY(pg_blocking_pids(pid))"
    return any(connection.execute(waiting).fetchone()[1] for _ in range(6_000))


def test_alembic_tells_of_our_steps_at_debug_and_of_others_as_ever(caplog, code_of_version):
    caplog.set_level("DEBUG")
    code_of_version(THIRD_LATER)
    migrating.upgrade_sql(kind="sqlite")
    steps = [record for record in caplog.records if record.getMessage().startswith("Running upgrade")]
    assert len(steps) == THIRD_LATER
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
