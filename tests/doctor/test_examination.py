"""What the doctor sees: each thing that bites is brought about, and a healthy store gives no finding."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import select, update
from sqlalchemy.engine import make_url

from tests.copies import copy_file
from tests.tools.readmes import block_of
from txnstore.db.identity import check_original
from txnstore.db.opening import open_store
from txnstore.db.postgresql import facts as postgresql_facts
from txnstore.db.postgresql.facts import PostgreSQLFacts, Standby
from txnstore.db.schema import maintenance_duties, stores
from txnstore.db.sqlite import facts as sqlite_facts
from txnstore.db.sqlite import mounts as sqlite_mounts
from txnstore.db.sqlite.facts import SQLiteFacts
from txnstore.db.sqlite.mounts import file_system_of
from txnstore.db.store import server_now_ms
from txnstore.doctor import postgresql, sqlite
from txnstore.doctor.checks import Grade, findings
from txnstore.doctor.examination import examine
from txnstore.doctor.postgresql import POSTGRESQL_CHECKS, is_remote
from txnstore.doctor.sqlite import SQLITE_CHECKS
from txnstore.errors import InvalidUrl
from txnstore.log.topics import create_topic
from txnstore.maintenance.loop import Maintenance
from txnstore.testing.postgres_server import connection_string
from txnstore.testing.private_cluster import PrivateCluster

#: What the machine that runs the tests brings about by itself: an old library or server, one that is only for tests.
OF_THE_MACHINE = {
    *({"wal-reset-bug"} if list(sqlite._wal_reset.find(SQLiteFacts(""))) else ()),
    "fsync",
    "end-of-life",
}
PATIENCE_SECONDS = 60.0
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
#: 2026-11-12, on which PostgreSQL 14 has its last fixes.
LAST_DAY_MS = 1_794_441_600_000
#: Where no server is.
AWAY = "postgresql://app@127.0.0.1:1/shop"


def found(url, **options):
    """Return what is found but for what the machine brings about, by check."""
    return {each.check: each for each in examine(url, **options).findings if each.check not in OF_THE_MACHINE}


def seen(url, **options):
    """Return what was seen; every check could look."""
    result = found(url, **options)
    assert Grade.UNKNOWN not in {each.grade for each in result.values()}, result
    return {name: each.seen for name, each in result.items()}


def path_of(url):
    return Path(url.removeprefix("sqlite:///"))


def state_of(folder):
    """Return the names and contents of all files in a folder, but for the index of the log, where locks are words."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() if not file.name.endswith("-shm") else ""
        for file in folder.iterdir()
    }


# --- what is healthy --------------------------------------------------------------------------------------------------


def test_a_healthy_store_gives_no_finding_and_is_not_changed(url):
    with open_store(url) as store:
        store.write(lambda connection: create_topic(connection, "orders"))
        is_sqlite = store.backend.name == "sqlite"
        before = state_of(path_of(url).parent) if is_sqlite else None
        assert seen(url) == {}
        assert examine(url).has_store
        if is_sqlite:
            assert state_of(path_of(url).parent) == before
    if is_sqlite:
        before = state_of(path_of(url).parent)
        assert seen(url) == {}
        assert state_of(path_of(url).parent) == before


def test_a_place_without_a_store_is_looked_at_and_nothing_is_made(tmp_path, txnstore_postgres_server):
    name = f"txnstore_doctor_empty_{os.getpid()}"
    txnstore_postgres_server.create_database(name)
    url, url_of_server = f"sqlite:///{tmp_path}/new.db", txnstore_postgres_server.url(name)
    assert seen(url) == {}
    assert not examine(url).has_store
    assert list(tmp_path.iterdir()) == []
    assert seen("sqlite://") == {}
    assert seen(url_of_server) == {}
    assert not examine(url_of_server).has_store
    with connected(url_of_server) as connection:
        assert connection.execute("SELECT count(*) FROM pg_namespace WHERE nspname = 'txnstore'").fetchone() == (0,)
    txnstore_postgres_server.drop_database(name)


def test_the_program_in_the_readme_prints_problems(tmp_path, capsys):
    exec(block_of(__file__, "The doctor").text, {"url": f"sqlite:///{tmp_path}/missing/store.db"})
    assert "there is no such folder" in capsys.readouterr().out


def was_there_long(store):
    """Let a store be three hours old, and return when it was made."""

    def work(connection):
        created_ms = connection.execute(select(stores.c.created_ms)).scalar_one()
        connection.execute(update(stores).values(created_ms=server_now_ms() - 3 * HOUR_MS - 1_000))
        return created_ms

    return store.write(work)


def test_a_store_is_maintained_whoever_did_it_last_and_one_that_has_moved_need_not_be(url):
    with open_store(url) as store:
        was_there_long(store)
        assert seen(url) == {"nobody-maintains": "nobody has done any of the maintenance for 3 hours"}
        Maintenance(store).run_once()
        assert seen(url) == {}
        late = update(maintenance_duties).values(turn_ms=maintenance_duties.c.turn_ms - 2 * HOUR_MS - 60_000)
        store.write(lambda connection: connection.execute(late))
        assert seen(url) == {"nobody-maintains": "nobody has done any of the maintenance for 2 hours"}
        store.write(lambda connection: connection.execute(update(stores).values(move_state=1)))
        assert seen(url) == {}


# --- SQLite -----------------------------------------------------------------------------------------------------------


def sqlite_store(tmp_path):
    url = f"sqlite:///{tmp_path}/store.db"
    open_store(url).close()
    return url


def no_folder(tmp_path, monkeypatch):
    return f"sqlite:///{tmp_path}/missing/store.db"


def folder_of_somebody_else(tmp_path, monkeypatch):
    # A stand-in for os.access: the superuser may write anywhere.
    monkeypatch.setattr(sqlite_facts, "may_access", lambda path, mode: not path.is_dir())
    return f"sqlite:///{tmp_path}/store.db"


def file_of_somebody_else(tmp_path, monkeypatch):
    url = sqlite_store(tmp_path)
    monkeypatch.setattr(sqlite_facts, "may_access", lambda path, mode: path.is_dir())
    return url


def on_a_network_file_system(tmp_path, monkeypatch):
    # A stand-in for what the system says is mounted.
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 0:41 / {tmp_path} rw,relatime - nfs4 nas:/data rw\n")
    monkeypatch.setattr(sqlite_mounts, "_MOUNTS", mounts)
    return f"sqlite:///{tmp_path}/store.db"


def on_a_full_disk(tmp_path, monkeypatch):
    # The disk as it is, and a store that wants more.
    monkeypatch.setattr(sqlite, "FREE_BYTES_MIN", 1 << 60)
    return f"sqlite:///{tmp_path}/store.db"


def on_a_file_system_that_is_read_only(tmp_path, monkeypatch):
    # A stand-in for statvfs: to mount something takes rights.
    actual = os.statvfs
    monkeypatch.setattr(
        os, "statvfs", lambda path: os.statvfs_result([*actual(path)[:8], actual(path).f_flag | os.ST_RDONLY, 255])
    )
    return f"sqlite:///{tmp_path}/store.db"


def by_two_names(tmp_path, monkeypatch):
    url = sqlite_store(tmp_path)
    (tmp_path / "other.db").hardlink_to(path_of(url))
    return url


def mounted_by_itself(tmp_path, monkeypatch):
    url = sqlite_store(tmp_path)
    # A stand-in, for it takes rights: docker run -v /data/store.db:/store.db does it.
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 8:1 /a.db {path_of(url)} rw - ext4 /dev/sda1 rw\n")
    monkeypatch.setattr(sqlite_mounts, "_MOUNTS", mounts)
    return url


def without_a_log(tmp_path, monkeypatch):
    url = sqlite_store(tmp_path)
    with closing(sqlite3.connect(path_of(url))) as connection:
        assert connection.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    return url


def with_a_long_log(tmp_path, monkeypatch):
    url = sqlite_store(tmp_path)
    with closing(sqlite3.connect(path_of(url))) as connection:
        # An empty log of that length, beside the index that SQLite shares with whoever has the file open.
        connection.execute("SELECT * FROM sqlite_master").fetchall()
        index = Path(f"{path_of(url)}-shm").read_bytes()
    log = Path(f"{path_of(url)}-wal")
    log.touch()
    os.truncate(log, sqlite.LOG_BYTES_MAX + 1)
    Path(f"{path_of(url)}-shm").write_bytes(index)
    return url


def with_unused_pages(tmp_path, monkeypatch):
    url = sqlite_store(tmp_path)
    monkeypatch.setattr(sqlite, "UNUSED_BYTES_MAX", 1 << 20)
    with closing(sqlite3.connect(path_of(url))) as connection:
        connection.execute("CREATE TABLE large AS SELECT zeroblob(8 << 20) AS content")
        connection.execute("DROP TABLE large")
        connection.commit()
    return url


def of_another_version(tmp_path, monkeypatch):
    url = sqlite_store(tmp_path)
    with closing(sqlite3.connect(path_of(url))) as connection, connection:
        connection.execute("UPDATE txnstore_store_version SET version_num = '0002'")
    return url


def with_a_trigger(tmp_path, monkeypatch):
    url = sqlite_store(tmp_path)
    with closing(sqlite3.connect(path_of(url))) as connection:
        connection.execute("CREATE TRIGGER planted DELETE ON txnstore_outbox BEGIN SELECT raise(IGNORE); END")
    return url


def that_is_no_database(tmp_path, monkeypatch):
    (tmp_path / "store.db").write_bytes(b"no database, but longer than a header of one has to be" * 100)
    return f"sqlite:///{tmp_path}/store.db"


def that_was_copied(tmp_path, monkeypatch):
    url, copy = sqlite_store(tmp_path), f"sqlite:///{tmp_path}/copy.db"
    with open_store(url) as store:
        check_original(store)
    copy_file(url, copy)
    return copy


def that_nobody_maintains(tmp_path, monkeypatch):
    url = sqlite_store(tmp_path)
    with open_store(url) as store:
        was_there_long(store)
    return url


def of_an_old_library(tmp_path, monkeypatch):
    # A stand-in: this Python has one SQLite.
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 36, 0))
    return f"sqlite:///{tmp_path}/store.db"


ON_SQLITE = [
    (no_folder, "folder", "there is no such folder"),
    (folder_of_somebody_else, "folder", "this user may not make files in the folder"),
    (file_of_somebody_else, "file-rights", "this user may not write to the file"),
    (on_a_network_file_system, "network-file-system", "the file is on a file system of type nfs4"),
    (on_a_full_disk, "full-disk", "iB are free where the file is"),
    (on_a_file_system_that_is_read_only, "read-only-file-system", "the file system is mounted read-only"),
    (by_two_names, "hard-links", "the file has 2 names (hard links)"),
    (mounted_by_itself, "hard-links", "the file is mounted by itself, without its folder"),
    (without_a_log, "journal-mode", "journal_mode is delete"),
    (with_a_long_log, "long-log", "the write-ahead log has 256.0 MiB"),
    (with_unused_pages, "unused-pages", "hold nothing"),
    (of_another_version, "tables", "the tables are of version '0002', this txnstore is for 0001"),
    (with_a_trigger, "planted", "the trigger 'planted' is not txnstore's"),
    (that_is_no_database, "damage", "SQLite answers SQLITE_NOTADB"),
    (that_was_copied, "copy", "the tables were made in "),
    (that_nobody_maintains, "nobody-maintains", "nobody has done any of the maintenance for 3 hours"),
    (of_an_old_library, "old-sqlite", "this Python has SQLite 3.36.0, txnstore needs 3.37.0"),
]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("plant", "check", "text"), ON_SQLITE, ids=[plant.__name__ for plant, _, _ in ON_SQLITE])
def test_what_bites_a_file_is_found_and_nothing_else(tmp_path, monkeypatch, plant, check, text):
    url = plant(tmp_path, monkeypatch)
    before = state_of(tmp_path)
    assert {name: text in told for name, told in seen(url).items()} == {check: True}, seen(url)
    assert state_of(tmp_path) == before


def test_a_store_in_use_is_read_with_its_log_when_it_is_named_by_a_symbolic_link(tmp_path):
    """Without the log it would be read as one that nobody writes to, and as it was before the last commits."""
    folder = tmp_path / "linked"
    folder.mkdir()
    link = folder / "link.db"
    link.symlink_to(tmp_path / "store.db")
    with open_store(f"sqlite:///{tmp_path}/store.db"):
        assert seen(f"sqlite:///{link}") == {}
        assert examine(f"sqlite:///{link}").has_store
        assert list(folder.iterdir()) == [link]


def test_a_folder_in_the_place_of_the_file_is_a_problem(tmp_path):
    assert seen(f"sqlite:///{tmp_path}") == {"damage": "it is not a regular file"}


def test_where_nobody_could_look_it_is_not_said_that_there_is_no_store(tmp_path, monkeypatch):
    dark = that_is_no_database(tmp_path, monkeypatch)
    assert [examine(url).has_store for url in (dark, f"sqlite:///{tmp_path}", AWAY)] == [None] * 3
    assert examine(f"sqlite:///{tmp_path}/new.db").has_store is False


def test_every_check_of_files_is_brought_about():
    assert {check for _, check, _ in ON_SQLITE} | {"wal-reset-bug"} == {check.name for check in SQLITE_CHECKS}


@pytest.mark.parametrize(
    ("version", "is_found"),
    [
        ((3, 40, 1), True),
        ((3, 44, 5), True),
        ((3, 44, 6), False),
        ((3, 50, 6), True),
        ((3, 50, 7), False),
        ((3, 51, 2), True),
        ((3, 51, 3), False),
        ((3, 53, 0), False),
    ],
)
def test_versions_with_the_wal_reset_bug_are_known(version, is_found):
    names = {each.check for each in findings(SQLITE_CHECKS, SQLiteFacts("", version=version))}
    assert ("wal-reset-bug" in names) == is_found


def test_other_tables_of_the_names_and_tables_that_are_missing_are_found(tmp_path):
    url = sqlite_store(tmp_path)
    with closing(sqlite3.connect(path_of(url))) as connection:
        connection.execute("DROP TABLE txnstore_outbox")
    assert seen(url)["tables"] == "tables are missing: outbox"
    with closing(sqlite3.connect(path_of(url))) as connection:
        connection.execute("DROP TABLE txnstore_stores")
    assert "that txnstore did not make" in seen(url)["tables"]


def test_a_log_that_has_to_be_recovered_is_left_to_whoever_opens_the_file(tmp_path):
    url = sqlite_store(tmp_path)
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    with open_store(url) as store:
        store.write(lambda connection: create_topic(connection, "orders"))
        for ending in ("", "-wal"):
            shutil.copy(f"{path_of(url)}{ending}", crashed / f"store.db{ending}")
    before = state_of(crashed)
    result = found(f"sqlite:///{crashed}/store.db")
    assert {each.grade for each in result.values()} == {Grade.UNKNOWN}
    assert all("recovered first" in each.seen for each in result.values())
    assert {"tables", "damage"} <= result.keys()
    assert state_of(crashed) == before


def test_the_file_system_of_a_folder_is_that_which_is_mounted_nearest():
    mounts = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:41 / /srv rw - cifs //nas/srv rw
31 30 8:2 / /srv/local\\040disk rw shared:1 - xfs /dev/sdb rw
32 22 0:42 / /mnt rw - ext4 /dev/sdc rw
33 32 0:43 / /mnt rw - fuse.sshfs host: rw
"""
    for folder, kind in (
        ("/home", "ext4"),
        ("/srv", "cifs"),
        ("/srvx", "ext4"),
        ("/srv/local disk/a", "xfs"),
        ("/mnt/a", "fuse.sshfs"),
    ):
        assert file_system_of(Path(folder), mounts) == kind


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "apfs", "zfs", "fuseblk"])
def test_file_systems_of_this_machine_are_not_taken_for_those_of_others(kind):
    assert not list(sqlite._file_system.find(SQLiteFacts("", file_system=kind)))
    for remote in ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "virtiofs"):
        assert list(sqlite._file_system.find(SQLiteFacts("", file_system=remote)))


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store_url(txnstore_postgres_server):
    """A store in a database that the tests of this module change, and change back."""
    name = f"txnstore_doctor_{os.getpid()}"
    txnstore_postgres_server.create_database(name)
    url = txnstore_postgres_server.url(name)
    with open_store(url) as store:
        check_original(store)
    yield url
    txnstore_postgres_server.drop_database(name)


def connected(url):
    return closing(psycopg.connect(connection_string(url), autocommit=True))


SETTINGS = [
    ("default_transaction_read_only", "on", "read-only", "default_transaction_read_only is on"),
    ("synchronous_commit", "off", "synchronous-commit", "synchronous_commit is off"),
    ("statement_timeout", "'9s'", "limits", "statement_timeout is 9000 ms"),
    ("lock_timeout", "5000", "limits", "lock_timeout is 5000 ms"),
    ("idle_in_transaction_session_timeout", "'30s'", "limits", "idle_in_transaction_session_timeout is 30000 ms"),
    ("transaction_timeout", "'20s'", "limits", "transaction_timeout is 20000 ms"),
    ("idle_session_timeout", "'1h'", "idle-sessions", "idle_session_timeout is 3600000 ms"),
    ("default_transaction_isolation", "serializable", "isolation", "default_transaction_isolation is 'serializable'"),
]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("setting", "value", "check", "text"), SETTINGS, ids=[row[0] for row in SETTINGS])
def test_what_the_role_or_the_database_has_set_is_found(store_url, setting, value, check, text):
    name = make_url(store_url).database
    with connected(store_url) as connection:
        if setting == "transaction_timeout" and connection.info.server_version < 170_000:
            pytest.skip("PostgreSQL 17 and newer have it")
        connection.execute(f"ALTER DATABASE {name} SET {setting} = {value}")
        try:
            assert seen(store_url) == {check: f"{text} for this role in this database"}
        finally:
            connection.execute(f"ALTER DATABASE {name} RESET {setting}")


def test_another_isolation_costs_commits_and_that_is_said():
    """The function that commits in one request sends them the long way then."""
    (check,) = (check for check in POSTGRESQL_CHECKS if check.name == "isolation")
    assert "a commit then takes several requests" in check.consequence


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["statement", "transaction"])
def test_a_time_limit_that_ends_a_question_is_a_problem(store_url, limit, monkeypatch):
    """So short a one ends the question for limits as well."""
    monkeypatch.setattr(postgresql_facts, "_READ_SETTINGS", "SELECT pg_sleep(60), %s::text")
    name = make_url(store_url).database
    with connected(store_url) as connection:
        if limit == "transaction" and connection.info.server_version < 170_000:
            pytest.skip("PostgreSQL 17 and newer have it")
        connection.execute(f"ALTER DATABASE {name} SET {limit}_timeout = '1s'")
        try:
            told = found(store_url)["cut-off"]
        finally:
            connection.execute(f"ALTER DATABASE {name} RESET {limit}_timeout")
    assert told.grade is Grade.PROBLEM
    assert told.seen.endswith(f"due to {limit} timeout")


@contextmanager
def snapshot_that_is_kept(url, monkeypatch):
    monkeypatch.setattr(postgresql, "LONG_SECONDS", -1)
    with closing(psycopg.connect(connection_string(url), application_name="report")) as connection:
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT 1")
        yield f"session {connection.info.backend_pid} of postgres (report, idle in transaction) keeps a snapshot for"


@contextmanager
def transaction_that_is_prepared(url, monkeypatch):
    monkeypatch.setattr(postgresql, "LONG_SECONDS", -1)
    gid = f"doctor {os.getpid()}"
    with connected(url) as connection:
        connection.execute("BEGIN")
        connection.execute("CREATE TABLE public.prepared (a int)")
        connection.execute(f"PREPARE TRANSACTION '{gid}'")
        yield f"'{gid}' of postgres, in the database {connection.info.dbname}, is prepared for"
        connection.execute(f"ROLLBACK PREPARED '{gid}'")


@contextmanager
def slot_that_nobody_uses(url, monkeypatch):
    monkeypatch.setattr(postgresql, "KEPT_WAL_BYTES_MAX", -1)
    name = f"doctor_{os.getpid()}"
    with connected(url) as connection:
        connection.execute("SELECT pg_create_physical_replication_slot(%s, true)", (name,))
        yield f"the replication slot {name} is used by nobody and keeps"
        connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))


@contextmanager
def dead_rows(url, monkeypatch):
    monkeypatch.setattr(postgresql, "DEAD_ROWS_MAX", 100)
    with connected(url) as connection, connected(url) as beside:
        connection.execute("ALTER TABLE txnstore.sink_batches SET (autovacuum_enabled = true)")
        # The server does not vacuum what somebody has locked, and would at any moment.
        beside.execute("BEGIN")
        beside.execute("LOCK TABLE txnstore.sink_batches IN SHARE UPDATE EXCLUSIVE MODE")
        connection.execute(
            "INSERT INTO txnstore.sink_batches SELECT 'sink', number, 'id', 0 FROM generate_series(1, 200) AS number"
        )
        connection.execute("DELETE FROM txnstore.sink_batches")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while "dead-rows" not in found(url) and time.monotonic() < deadline:
            connection.execute("SELECT 1")  # the session's work is counted up to a second later, at a statement
        yield "sink_batches has 200 dead rows, and 0 that live"
        beside.execute("ROLLBACK")
        connection.execute("VACUUM txnstore.sink_batches")


@contextmanager
def table_that_is_not_vacuumed(url, monkeypatch):
    with connected(url) as connection:
        connection.execute("ALTER TABLE txnstore.partition_heads SET (autovacuum_enabled = OFF)")
        yield "autovacuum is switched off for partition_heads"
        connection.execute("ALTER TABLE txnstore.partition_heads RESET (autovacuum_enabled)")


@contextmanager
def few_connections(url, monkeypatch):
    with connected(url) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} CONNECTION LIMIT 8")
        yield "of 8 connections of the database are free"
        connection.execute(f"ALTER DATABASE {connection.info.dbname} CONNECTION LIMIT -1")


@contextmanager
def older_tables(url, monkeypatch):
    with connected(url) as connection:
        connection.execute("UPDATE txnstore.store_version SET version_num = '0000'")
        yield "the tables are of version '0000', this txnstore is for 0001"
        connection.execute("UPDATE txnstore.store_version SET version_num = '0001'")


@contextmanager
def tables_from_elsewhere(url, monkeypatch):
    with open_store(url) as store:
        where = store.read(store.backend.identity)
        store.write(lambda connection: connection.execute(update(stores).values(database_identity="1:1")))
        yield f"the tables were made in 1:1, and this is {where}"
        store.write(lambda connection: connection.execute(update(stores).values(database_identity=where)))


@contextmanager
def maintenance_that_nobody_does(url, monkeypatch):
    with open_store(url) as store:
        created_ms = was_there_long(store)
        yield "nobody has done any of the maintenance for 3 hours"
        store.write(lambda connection: connection.execute(update(stores).values(created_ms=created_ms)))


@contextmanager
def clock_that_is_behind(url, monkeypatch):
    # A stand-in for this machine's clock: both are the same in a test.
    actual = time.time_ns
    monkeypatch.setattr("txnstore.db.postgresql.facts.time.time_ns", lambda: actual() + 630 * 10**9)
    yield "the server's clock is 10 minutes behind this machine's"


@contextmanager
def many_transactions(url, monkeypatch):
    # The database as it is, and a limit that it is above: a thousand million transactions take days.
    monkeypatch.setattr(postgresql, "XID_AGE_MAX", 1)
    yield "the oldest transaction id of the database is"


ON_POSTGRESQL = {
    snapshot_that_is_kept: "snapshots",
    transaction_that_is_prepared: "prepared-transactions",
    slot_that_nobody_uses: "replication-slots",
    dead_rows: "dead-rows",
    table_that_is_not_vacuumed: "autovacuum",
    few_connections: "connections",
    older_tables: "tables",
    tables_from_elsewhere: "copy",
    maintenance_that_nobody_does: "nobody-maintains",
    clock_that_is_behind: "clock",
    many_transactions: "wraparound",
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", ON_POSTGRESQL, ids=lambda plant: plant.__name__)
def test_what_bites_a_database_is_found(store_url, monkeypatch, plant):
    check = ON_POSTGRESQL[plant]
    with plant(store_url, monkeypatch) as text:
        # Others may be at work on the server, with snapshots and prepared transactions of their own.
        told = [each.seen for each in examine(store_url).findings if each.check == check]
        assert any(text in each for each in told), told
    monkeypatch.undo()
    assert check not in seen(store_url)


def test_the_rights_that_a_role_lacks_are_found_and_what_it_may_not_see_is_said(store_url, txnstore_postgres_server):
    role = f"txnstore_doctor_role_{os.getpid()}"
    txnstore_postgres_server.create_role(role, "secret")
    url = make_url(store_url)._replace(username=role, password="secret").render_as_string(hide_password=False)
    try:
        # By default everybody may do nothing in the schema.
        first = found(url)
        assert first["rights"].seen == "this role may not use the schema txnstore"
        assert first["snapshots"].grade is Grade.UNKNOWN
        assert "pg_read_all_stats" in first["snapshots"].seen
        assert found(url, schema="another")["no-schema"].seen == (
            "there is no schema another, and this role may make none in the database"
        )
        with connected(store_url) as connection:
            connection.execute(f"GRANT USAGE ON SCHEMA txnstore TO {role}")
            connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA txnstore TO {role}")
            connection.execute(f"GRANT INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA txnstore TO {role}")
            connection.execute(f"REVOKE INSERT, UPDATE ON txnstore.outbox FROM {role}")
            told = [each.seen for each in examine(url).findings if each.check == "rights"]
            assert told == ["this role has no right to INSERT, UPDATE on outbox"]
            connection.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA txnstore TO {role}")
            connection.execute("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA txnstore FROM PUBLIC")
            assert found(url)["rights"].seen.startswith("this role may not call ")
            connection.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA txnstore TO PUBLIC")
            connection.execute(f"GRANT pg_read_all_stats TO {role}")
        assert seen(url) == {}
    finally:
        with connected(store_url) as connection:
            connection.execute(f"DROP OWNED BY {role}")
        txnstore_postgres_server.drop_role(role)


def test_an_encoding_that_does_not_hold_all_text_is_found(txnstore_postgres_server):
    name = f"txnstore_doctor_latin_{os.getpid()}"
    with txnstore_postgres_server.connect() as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
    try:
        assert seen(txnstore_postgres_server.url(name)) == {"encoding": "the database has the encoding LATIN1"}
    finally:
        txnstore_postgres_server.drop_database(name)


@pytest.mark.slow
def test_a_server_as_it_comes_and_one_whose_vacuum_is_off():
    cluster = PrivateCluster(settings={"max_prepared_transactions": "0", "autovacuum": "off"})
    try:
        names = {each.check: each.seen for each in examine(cluster.url("postgres")).findings}
    finally:
        cluster.close()
    assert names == {"no-prepared-transactions": "max_prepared_transactions is 0", "autovacuum": "autovacuum is off"}


@pytest.mark.slow
def test_a_commit_that_waits_for_a_standby_is_a_problem(monkeypatch):
    monkeypatch.setattr(postgresql, "STANDBY_SECONDS_MAX", -1)
    with (
        PrivateCluster(fsync=False, settings={"synchronous_standby_names": "*"}) as cluster,
        ThreadPoolExecutor(1) as background,
    ):
        url = cluster.url("postgres")
        assert "standby-awaited" not in seen(url)
        waiting = background.submit(wait_for_a_standby, url)
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while "standby-awaited" not in seen(url) and time.monotonic() < deadline:
                pass
            assert seen(url)["standby-awaited"].startswith("a commit waits for a standby for ")
        finally:
            cluster.kill()
        waiting.result()


def wait_for_a_standby(url):
    """Commit something, and return as soon as the server is gone."""
    with connected(url) as connection, pytest.raises(psycopg.OperationalError):
        connection.execute("CREATE TABLE awaited (a int)")


#: By facts alone: there is no such server here, or it would end those of other tests.
OF_FACTS = [
    ({"server_version": 130_012}, "old-postgresql", "the server is PostgreSQL 13, txnstore needs 14"),
    ({"server_version": 140_003}, "index-defect", "the server is PostgreSQL 14.3"),
    (
        {"server_version": 140_023, "server_ms": LAST_DAY_MS + DAY_MS},
        "end-of-life",
        "PostgreSQL 14 has had no fixes since 2026-11-12",
    ),
    ({"is_replica": True}, "replica", "the server is in recovery: a standby"),
    ({"host": "db.example.org", "sslmode": "require"}, "tls", "another machine, and sslmode is require"),
    ({"sessions_are_shared": True}, "pooler", "two clients were given the same session"),
    ({"settings": {"fsync": "off"}}, "fsync", "fsync is off"),
    (
        {"standbys": [Standby("east", "async")]},
        "standby-not-awaited",
        "a standby follows (east), and none is named in synchronous_standby_names",
    ),
    (
        {"standbys": [Standby("east", "sync")], "settings": {"synchronous_commit": "local"}},
        "standby-not-awaited",
        "a standby follows (east), and synchronous_commit is local",
    ),
    ({"settings": {"full_page_writes": "off"}}, "fsync", "full_page_writes is off"),
    ({"settings": {"max_prepared_transactions": "0"}}, "no-prepared-transactions", "max_prepared_transactions is 0"),
    (
        {
            "settings": {"max_prepared_transactions": "1"},
            "prepared": [postgresql_facts.PreparedTransaction("a", "b", "c", 0)],
        },
        "prepared-transactions-used-up",
        "all 1 of max_prepared_transactions are in use",
    ),
    (
        {"prepared": [postgresql_facts.PreparedTransaction("a", "b", None, 10**6)]},
        "prepared-transactions",
        "'a' of a role that was dropped, in the database b",
    ),
]


def test_a_standby_that_commits_wait_for_is_no_finding():
    facts = PostgreSQLFacts("txnstore", settings={"synchronous_commit": "on"})
    for state in ("sync", "quorum"):
        facts.standbys = [Standby("west", "async"), Standby("east", state)]
        assert not list(postgresql._standbys.find(facts))


@pytest.mark.parametrize(("facts", "check", "text"), OF_FACTS)
def test_what_no_test_can_bring_about_is_found_in_facts(facts, check, text):
    healthy = PostgreSQLFacts("txnstore", server_version=170_002, relations=[], connections=1)
    settings = {"max_prepared_transactions": "64", "max_connections": "100", **facts.pop("settings", {})}
    told = findings(POSTGRESQL_CHECKS, replace(healthy, settings=settings, **facts))
    assert [each.check for each in told] == [check]
    assert text in told[0].seen


def test_every_check_of_servers_is_brought_about():
    named = {check for _, _, check, _ in SETTINGS} | set(ON_POSTGRESQL.values()) | {check for _, check, _ in OF_FACTS}
    assert named | {"rights", "no-schema", "encoding", "cut-off", "standby-awaited", "unused-room"} == {
        check.name for check in POSTGRESQL_CHECKS
    }


@pytest.mark.parametrize(
    ("host", "answer"),
    [
        ("", False),
        ("/run/postgresql", False),
        ("localhost", False),
        ("127.0.0.1", False),
        ("127.9.9.9", False),
        ("::1", False),
        ("10.0.0.7", True),
        ("db.example.org", True),
    ],
)
def test_a_host_is_another_machine_unless_it_is_this_one(host, answer):
    assert is_remote(host) is answer


def test_a_server_that_does_not_answer_is_a_finding_and_no_secret_is_shown():
    examination = examine("postgresql://app:geheim@127.0.0.1:1/shop")
    assert [each.check for each in examination.findings] == ["connection"]
    assert "geheim" not in f"{examination.url} {examination}"
    with pytest.raises(InvalidUrl):
        examine("postgresql://app:geheim@/")
