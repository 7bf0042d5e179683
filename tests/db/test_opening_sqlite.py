"""SQLite files that are not databases, belong to somebody else, or may not be written."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import sqlite3
import stat
import tempfile
import threading
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from txnstore.db.backend import Limits
from txnstore.db.opening import connect_store, open_store
from txnstore.db.sqlite import connections, mounts
from txnstore.db.sqlite.backend import SQLiteBackend, _opener
from txnstore.errors import (
    ForeignSchema,
    InvalidUrl,
    PermissionDenied,
    StoreBusy,
    StoreDamaged,
    StoreReadOnly,
    StoreUnavailable,
)
from txnstore.log.topics import create_topic, list_topics


def url_of(path):
    return f"sqlite:///{path}"


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to be one" * 20, b"SQLite format 3\0" + b"\xff" * 4096]
)
def test_a_file_that_is_no_database_is_told_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(StoreDamaged):
        open_store(url_of(path))
    assert path.read_bytes() == content


def test_a_store_that_was_cut_off_in_the_middle_is_damaged(txnstore_sqlite_url, tmp_path):
    path = Path(txnstore_sqlite_url.removeprefix("sqlite:///"))
    os.truncate(path, 3 * 4096)
    with pytest.raises(StoreDamaged):
        open_store(txnstore_sqlite_url)


def test_a_file_of_two_names_is_opened_by_neither(txnstore_sqlite_url, tmp_path):
    path = Path(txnstore_sqlite_url.removeprefix("sqlite:///"))
    other = tmp_path / "other.db"
    other.hardlink_to(path)
    for each in (path, other):
        with pytest.raises(
            InvalidUrl, match=r"2 names \(hard links\).*keep the one with files -wal and -shm beside it"
        ):
            open_store(url_of(each))
    other.unlink()
    open_store(txnstore_sqlite_url).close()


def test_a_second_name_ends_no_store_that_is_open(txnstore_sqlite_url, tmp_path):
    """As backups make one for a moment."""
    with open_store(txnstore_sqlite_url) as store:
        (tmp_path / "other.db").hardlink_to(txnstore_sqlite_url.removeprefix("sqlite:///"))
        store.forget_connections_after_fork()  # connects anew
        store.write(lambda connection: create_topic(connection, "orders"))


def test_a_file_that_is_mounted_without_its_folder_is_not_opened(tmp_path, monkeypatch):
    """`docker run -v /data/a.db:/a.db`: the log would lie beside /a.db, and go with the container."""
    path = tmp_path / "a b.db"
    open_store(url_of(path)).close()
    escaped = str(path).replace(" ", r"\040")
    (tmp_path / "mounts").write_text(f"30 22 8:1 /data/a.db {escaped} rw - ext4 /dev/sda1 rw\n")
    monkeypatch.setattr(mounts, "_MOUNTS", tmp_path / "mounts")
    link = tmp_path / "link.db"
    link.symlink_to(path)
    for each in (path, link):
        with pytest.raises(InvalidUrl, match=r"mounted by itself.*mount the folder"):
            open_store(url_of(each))
    open_store(url_of(tmp_path / "another.db")).close()
    monkeypatch.setattr(mounts, "_MOUNTS", tmp_path / "nothing")
    open_store(url_of(path)).close()


def test_an_empty_file_becomes_a_store(tmp_path, client_path):
    path = tmp_path / "empty.db"
    path.touch()
    with open_store(url_of(path)) as store:
        client_path(store)


def make_fifo(path):
    os.mkfifo(path)


def make_folder(path):
    path.mkdir()


def make_link_to_itself(path):
    path.symlink_to(path)


@pytest.mark.parametrize("make", [make_fifo, make_folder, make_link_to_itself])
def test_what_is_no_file_is_refused_at_once(tmp_path, make):
    path = tmp_path / "store.db"
    make(path)
    with pytest.raises(InvalidUrl):
        open_store(url_of(path))


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_a_device_is_refused(device):
    with pytest.raises(InvalidUrl, match="not a file"):
        open_store(url_of(device))


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("missing/store.db", "does not exist; create it first"),
        ("file/store.db", "is not a folder"),
        ("x" * 300, "cannot be an SQLite file"),
        ("a%00b", "unprintable"),
        ("a\0b", "unprintable"),
        ("a%0ab", "unprintable"),
        ("store.db?mode=ro", "takes no options"),
    ],
)
def test_a_path_that_cannot_be_is_refused(tmp_path, path, told):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidUrl, match=told):
        open_store(url_of(tmp_path / path))
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("uri", ["sqlite:///file:store.db?mode=memory", "sqlite:///file:store.db", "sqlite://host/x"])
def test_other_forms_of_urls_are_refused(tmp_path, monkeypatch, uri):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidUrl):
        open_store(uri)
    assert list(tmp_path.iterdir()) == []


def test_a_relative_path_stays_the_same_file_when_the_process_changes_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open_store("sqlite:///store.db", pool_size=1) as store:
        monkeypatch.chdir("/")
        store.engine.dispose()
        store.write(lambda connection: create_topic(connection, "orders"))
    assert (tmp_path / "store.db").exists()
    with open_store(url_of(tmp_path / "store.db")) as again:
        assert again.read(list_topics) == ["orders"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", ["with space", "ünï", "100%25", "a'b\"c;--", "a@b:c#d"])
def test_a_path_may_have_any_printable_characters(tmp_path, name, client_path):
    with open_store(url_of(tmp_path / name)) as store:
        client_path(store)
    assert (tmp_path / name.replace("%25", "%")).exists()


def test_every_store_in_memory_of_a_process_is_the_same_one():
    with open_store("sqlite://") as one, open_store("sqlite:///:memory:") as other:
        assert one.store_uuid == other.store_uuid


def test_nobody_else_can_read_a_new_store_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        with open_store(url_of(tmp_path / "store.db")) as store:
            store.write(lambda connection: create_topic(connection, "orders"))
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    # The line of writers has its file on Linux only.
    assert modes | {"store.db-line": 0o600} == dict.fromkeys(
        ("store.db", "store.db-wal", "store.db-shm", "store.db-line"), 0o600
    )


def test_a_new_file_carries_our_mark_and_the_application_keeps_its_own(tmp_path):
    open_store(url_of(tmp_path / "ours.db")).close()
    application = sqlite3.connect(tmp_path / "theirs.db")
    application.execute("PRAGMA application_id = 42")
    application.execute("CREATE TABLE customers (name TEXT)")
    application.close()
    open_store(url_of(tmp_path / "theirs.db")).close()
    marks = []
    for name in ("ours.db", "theirs.db"):
        connection = sqlite3.connect(tmp_path / name)
        marks.append(connection.execute("PRAGMA application_id").fetchone()[0])
        connection.close()
    assert marks == [int.from_bytes(b"TXNS"), 42]


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "pragma",
    ["encoding = 'UTF-16le'", "encoding = 'UTF-16be'", "page_size = 512", "page_size = 65536", "auto_vacuum = 1"],
)
def test_an_application_file_of_another_kind_will_do(tmp_path, pragma, client_path):
    application = sqlite3.connect(tmp_path / "app.db")
    application.execute(f"PRAGMA {pragma}")
    application.execute("CREATE TABLE customers (name TEXT)")
    application.close()
    with open_store(url_of(tmp_path / "app.db")) as store:
        client_path(store)
        shown = store.read(
            lambda connection: connection.exec_driver_sql("SELECT value FROM txnstore_records ORDER BY 1").all()
        )
    assert len(shown) == 5


def test_a_file_that_somebody_holds_for_himself_is_busy_after_a_bounded_time(txnstore_sqlite_url):
    path = txnstore_sqlite_url.removeprefix("sqlite:///")
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    holder.execute("UPDATE txnstore_stores SET next_producer_id = 5")
    with pytest.raises(StoreBusy):
        open_store(txnstore_sqlite_url, limits=Limits(retry_timeout_ms=200))
    holder.execute("COMMIT")
    holder.close()
    open_store(txnstore_sqlite_url).close()


def test_an_sqlite_that_is_too_old_is_refused(txnstore_sqlite_url, monkeypatch):
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 36, 0))
    with pytest.raises(InvalidUrl, match=r"txnstore needs 3\.37\.0 or newer"):
        open_store(txnstore_sqlite_url)


def test_triggers_and_functions_of_a_strange_file_have_no_effect(tmp_path):
    with connect_store(url_of(tmp_path / "store.db")) as store:
        settings = store.read(
            lambda connection: [
                connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("trusted_schema", "cell_size_check")
            ]
        )
    assert settings == [0, 1]


#: Each on a store's file; the last ones before there is a store.
PLANTED = {
    "a trigger": "CREATE TRIGGER t AFTER INSERT ON txnstore_record_batches BEGIN DELETE FROM txnstore_topics; END",
    "a trigger by another case": "CREATE TRIGGER t BEFORE DELETE ON TXNSTORE_Groups BEGIN SELECT raise(IGNORE); END",
    "a trigger on the view": (
        "CREATE TRIGGER t INSTEAD OF INSERT ON txnstore_records BEGIN DELETE FROM txnstore_topics; END"
    ),
    "a view for a table": "DROP TABLE txnstore_groups; CREATE VIEW txnstore_groups AS SELECT load_extension('x') AS y",
}


@pytest.mark.parametrize("statements", PLANTED.values(), ids=PLANTED)
def test_a_file_in_which_a_strangers_statements_would_run_is_refused(txnstore_sqlite_url, statements):
    path = txnstore_sqlite_url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(statements)
    before = Path(path).read_bytes()
    with pytest.raises(ForeignSchema, match=r"that txnstore did not make: the (trigger|view) '"):
        open_store(txnstore_sqlite_url)
    assert Path(path).read_bytes() == before


def test_an_applications_own_triggers_and_views_are_left_alone(txnstore_sqlite_url, client_path):
    path = txnstore_sqlite_url.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "CREATE TABLE orders (topic TEXT);"
            "CREATE TRIGGER told AFTER INSERT ON orders"
            " BEGIN INSERT INTO txnstore_outbox (topic) VALUES (new.topic); END;"
            "CREATE VIEW names AS SELECT name FROM txnstore_topics;"
            "CREATE INDEX sooner ON txnstore_outbox (lower(topic)) WHERE refusal IS NOT NULL;"
            # With a name like ours, and not one of ours.
            "CREATE TABLE txnstore_inbox (topic TEXT, at INTEGER);"
            "CREATE UNIQUE INDEX txnstore_inbox_once ON txnstore_inbox (lower(topic));"
            "CREATE TRIGGER txnstore_came AFTER INSERT ON txnstore_inbox BEGIN DELETE FROM orders; END;"
            "CREATE VIEW txnstore_waiting AS SELECT abs(at) AS at FROM txnstore_inbox;"
            "CREATE TRIGGER sent INSTEAD OF INSERT ON txnstore_waiting BEGIN DELETE FROM orders; END;"
        )
    with open_store(txnstore_sqlite_url) as store:
        client_path(store)


def test_a_link_to_nothing_makes_no_file_elsewhere(tmp_path):
    (tmp_path / "store.db").symlink_to(tmp_path / "elsewhere.db")
    with pytest.raises(InvalidUrl, match="is a symbolic link to a file that does not exist"):
        open_store(url_of(tmp_path / "store.db"))
    assert [path.name for path in tmp_path.iterdir()] == ["store.db"]


NOBODY = pwd.getpwnam("nobody").pw_uid


@contextmanager
def as_nobody():
    """Do without the rights of root, which no mode of a file keeps out."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def shown_folder():
    """A folder that everybody can reach; pytest's own are for their owner only."""
    folder = Path(tempfile.mkdtemp(prefix="txnstore-modes-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.fixture
def kept(shown_folder):
    """A store with the topic "orders" in a folder of its own."""
    (shown_folder / "kept").mkdir()
    path = shown_folder / "kept" / "store.db"
    with open_store(url_of(path)) as store:
        store.write(lambda connection: create_topic(connection, "orders"))
    yield path
    path.parent.chmod(0o755)


def test_a_file_that_may_only_be_read_can_be_read(kept):
    kept.chmod(0o444)
    kept.parent.chmod(0o777)
    with as_nobody(), open_store(url_of(kept)) as store:
        assert store.read(list_topics) == ["orders"]
        with pytest.raises(StoreReadOnly, match="this user may not write to the file or its folder"):
            store.write(lambda connection: create_topic(connection, "more"))


@pytest.mark.parametrize("mode", [0o444, 0o666])
def test_a_folder_that_may_not_be_written_makes_its_store_read_only(kept, mode):
    kept.chmod(mode)
    kept.parent.chmod(0o555)
    with as_nobody(), pytest.raises(StoreReadOnly, match=rf"this user may not write to the folder '{kept.parent}'"):
        open_store(url_of(kept))


# No file system of its own can be mounted here: it is asked for, and says so.
def test_a_file_system_that_is_mounted_read_only_is_named(kept, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    monkeypatch.setattr(connections, "_configure", cannot_open)
    with pytest.raises(StoreReadOnly, match=rf"the file system of '{kept}' is mounted read-only"):
        open_store(url_of(kept))


def cannot_open(connection, **options):
    sqlite3.connect("/no/such/folder/file.db")


def test_a_folder_that_goes_before_the_first_connection_is_no_error_of_pythons(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    with connect_store(url_of(folder / "store.db"), limits=Limits(retry_timeout_ms=0)) as store:
        folder.rmdir()
        with pytest.raises(StoreUnavailable):
            store.read(list_topics)


def test_a_file_that_goes_before_it_is_looked_at_is_no_error_of_pythons(txnstore_sqlite_url):
    path = Path(txnstore_sqlite_url.removeprefix("sqlite:///"))

    def look(connection):
        path.unlink()
        return store.backend.identity(connection)

    limits = Limits(retry_timeout_ms=0)
    gone = "was moved, deleted or replaced"
    with open_store(txnstore_sqlite_url, limits=limits) as store, pytest.raises(StoreUnavailable, match=gone):
        store.read(look)


def test_whoever_finds_that_somebody_else_is_making_the_tables_waits_for_them(tmp_path, monkeypatch):
    """However short the tries of this client are: nothing is wrong."""
    path = tmp_path / "store.db"
    with closing(connections.connect(str(path))) as other:
        other.execute("BEGIN IMMEDIATE")
        tries = itertools.count()
        is_contended = SQLiteBackend.is_contended

        def counting(backend, error):
            if next(tries) == 2:
                other.execute("ROLLBACK")
            return is_contended(backend, error)

        monkeypatch.setattr(SQLiteBackend, "is_contended", counting)
        with open_store(url_of(path), limits=Limits(retry_timeout_ms=0)) as store:
            assert store.read(list_topics) == []
    assert next(tries) > 2


def test_a_file_that_may_not_be_read_is_told_at_once(kept):
    kept.chmod(0o000)
    kept.parent.chmod(0o777)
    with as_nobody(), pytest.raises(PermissionDenied, match="may not read"):
        open_store(url_of(kept))


def test_a_folder_that_may_not_be_entered_is_told_at_once(kept):
    kept.parent.chmod(0o600)
    with as_nobody(), pytest.raises(PermissionDenied, match="may not look"):
        open_store(url_of(kept))


def test_a_folder_in_which_nothing_may_be_made_is_told_at_once(shown_folder):
    shown_folder.chmod(0o555)
    with as_nobody(), pytest.raises(PermissionDenied, match="may not make"):
        open_store(url_of(shown_folder / "new.db"))
    assert list(shown_folder.iterdir()) == []


def test_a_file_that_goes_away_as_it_is_opened_is_told_of_as_one_that_has_gone(tmp_path, monkeypatch):
    def look(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(connections, "_file_at", look)
    with pytest.raises(StoreUnavailable, match="moved, deleted or replaced"):
        _opener(str(tmp_path / "store.db"))()


def test_a_file_that_is_replaced_as_it_is_opened_is_not_taken_for_the_one_that_is_open(tmp_path, monkeypatch):
    """What is written to the old one would be lost."""
    path, other = tmp_path / "store.db", tmp_path / "other.db"
    other.touch()

    def replace_meanwhile(connection, **options):
        configure(connection, **options)
        other.replace(path)

    configure = connections._configure
    monkeypatch.setattr(connections, "_configure", replace_meanwhile)
    with closing(connections.connect(str(path))) as connection:
        assert connection.leads_elsewhere()


def test_nobody_opens_a_new_file_before_the_descriptor_that_made_it_is_closed(tmp_path, monkeypatch):
    """To close any descriptor of a file gives up all locks of the process on it, also those of other connections."""
    could_open = []

    def open_meanwhile():
        could_open.append(connections.FORK_LOCK.acquire(blocking=False))
        if could_open[-1]:
            connections.FORK_LOCK.release()

    def close_with_others_about(descriptor):
        other = threading.Thread(target=open_meanwhile)
        other.start()
        other.join()
        close(descriptor)

    close = os.close
    with monkeypatch.context() as patched:
        patched.setattr(os, "close", close_with_others_about)
        connections.connect(str(tmp_path / "new.db")).close()
    assert could_open == [False]
