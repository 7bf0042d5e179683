"""Tests of the private PostgreSQL cluster: it dies as asked, comes back, and leaves nothing behind."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psycopg
import pytest

from txnstore.testing import private_cluster
from txnstore.testing.postgres_server import connection_string
from txnstore.testing.private_cluster import (
    NoServerProgramsError,
    PrivateCluster,
    ServerFolder,
    ServerStartError,
    find_programs,
    has_room,
    remove_abandoned_folders,
)

#: A bound for what ends by itself, on a busy machine too.
PATIENCE_SECONDS = 60

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and waits on pidfds")


@pytest.fixture(scope="module")
def cluster():
    with PrivateCluster(fsync=False) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _no_prepared_transaction_outlives_its_test(cluster):
    yield
    cluster.start()
    cluster.drop_database("shop")


@pytest.fixture
def shop(cluster):
    cluster.create_database("shop")
    with cluster.connect("shop") as connection:
        connection.execute("CREATE TABLE orders (name text PRIMARY KEY)")
    return "shop"


def orders(cluster, database):
    with cluster.connect(database) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM orders ORDER BY name")]


def prepare_order(cluster, database, name):
    with cluster.connect(database) as connection:
        connection.execute("BEGIN")
        connection.execute("INSERT INTO orders VALUES (%s)", [name])
        connection.execute("PREPARE TRANSACTION 'a-branch'")


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    """Whether a process has files open; one that has ended and was not waited for has none, or shows none."""
    try:
        return any(Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, PermissionError):
        return False


def has_ended(pid):
    """Wait for the end of a process, ours or not, without asking again and again."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], PATIENCE_SECONDS)[0])
    finally:
        os.close(process)


def test_a_prepared_transaction_survives_kill(cluster, shop):
    prepare_order(cluster, shop, "prepared")
    cluster.kill()
    cluster.start()
    assert orders(cluster, shop) == []
    with cluster.connect(shop) as connection:
        connection.execute("COMMIT PREPARED 'a-branch'")
    assert orders(cluster, shop) == ["prepared"]


@pytest.mark.slow
def test_what_was_committed_survives_kill_and_what_was_not_is_gone(cluster, shop):
    with cluster.connect(shop) as committed:
        committed.execute("INSERT INTO orders VALUES ('committed')")
    in_flight = cluster.connect(shop)
    in_flight.execute("BEGIN")
    in_flight.execute("INSERT INTO orders VALUES ('in flight')")
    cluster.kill()
    with pytest.raises(psycopg.OperationalError):
        in_flight.execute("COMMIT")
    cluster.start()
    assert orders(cluster, shop) == ["committed"]


def test_a_stopped_server_comes_back_at_the_same_address_with_what_was_prepared(cluster, shop):
    url = cluster.url(shop)
    prepare_order(cluster, shop, "prepared")
    cluster.stop()
    with pytest.raises(psycopg.OperationalError):
        cluster.connect(shop)
    cluster.start()
    assert cluster.url(shop) == url
    with cluster.connect(shop) as connection:
        connection.execute("COMMIT PREPARED 'a-branch'")
    assert orders(cluster, shop) == ["prepared"]


def test_starting_a_running_server_and_killing_a_dead_one_change_nothing(cluster):
    pid = cluster.pid
    cluster.start()
    assert cluster.pid == pid
    cluster.kill()
    cluster.kill()
    cluster.stop()
    assert cluster.pid is None


@needs_linux
def test_kill_returns_when_no_process_of_the_server_is_left(cluster):
    processes = [cluster.pid, *children_of(cluster.pid)]
    assert len([pid for pid in processes if is_running(pid)]) > 3
    cluster.kill()
    assert [pid for pid in processes if is_running(pid)] == []


@pytest.mark.slow
@needs_linux
def test_kill_also_ends_a_session_that_is_too_busy_to_notice(cluster):
    # One long computation inside the server: it waits for nothing, so it never looks whether its parent lives.
    computation = "PERFORM count(*) FROM generate_series(1, 1000000) a, generate_series(1, 1000000) b"
    is_busy = threading.Event()
    session = cluster.connect()
    session_pid = session.info.backend_pid
    session.add_notice_handler(lambda _: is_busy.set())

    def compute() -> None:
        with pytest.raises(psycopg.OperationalError):
            session.execute(f"DO $$ BEGIN RAISE NOTICE 'busy'; {computation}; END $$")

    thread = threading.Thread(target=compute)
    thread.start()
    assert is_busy.wait(PATIENCE_SECONDS)
    assert is_running(session_pid)
    cluster.kill()
    thread.join(PATIENCE_SECONDS)
    assert not is_running(session_pid)


@pytest.mark.slow
@needs_linux
def test_close_leaves_no_process_and_no_file():
    with PrivateCluster(fsync=False) as cluster:
        processes = [cluster.pid, *children_of(cluster.pid)]
        folder = cluster.folder
    assert [pid for pid in processes if is_running(pid)] == []
    assert not folder.exists()
    cluster.close()


STARTS_A_CLUSTER = """
import sys
from txnstore.testing.private_cluster import PrivateCluster
cluster = PrivateCluster(fsync=False)
print(cluster.pid, cluster.folder, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@needs_linux
def test_a_server_dies_with_the_process_that_started_it():
    command = [sys.executable, "-c", STARTS_A_CLUSTER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid, folder = starter.stdout.readline().split()
        assert Path(f"/proc/{pid}").exists()
        starter.kill()
    assert has_ended(int(pid))
    # Only a later run can remove the files; this one does, unless another one is just about it.
    deadline = time.monotonic() + PATIENCE_SECONDS
    while Path(folder).exists():
        assert time.monotonic() < deadline
        remove_abandoned_folders()


def test_a_server_outlives_the_thread_that_started_it(cluster):
    cluster.kill()
    thread = threading.Thread(target=cluster.start)
    thread.start()
    thread.join()
    with cluster.connect() as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.slow
def test_two_clusters_run_side_by_side(cluster, shop):
    with PrivateCluster(fsync=False) as other:
        assert other.port != cluster.port
        cluster.kill()
        other.create_database("shop")
        with other.connect("shop") as connection:
            assert connection.execute("SELECT to_regclass('orders')").fetchone() == (None,)


@pytest.mark.slow
def test_a_folder_in_use_is_not_taken_for_an_abandoned_one(cluster):
    assert cluster.folder not in remove_abandoned_folders()
    assert cluster.folder.exists()


@pytest.mark.parametrize("in_memory", [True, False])
def test_files_are_in_memory_only_where_they_may_be_lost_and_there_is_room(tmp_path, monkeypatch, in_memory):
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    # Where no other run of these tests looks for what is abandoned.
    for name, path in (("MEMORY_FOLDER", memory), ("_TEMPORARY_FOLDER", disk)):
        path.mkdir()
        monkeypatch.setattr(private_cluster, name, path)
    for bytes_min, is_there in ((1, in_memory), (2**62, False)):
        monkeypatch.setattr(private_cluster, "_MEMORY_BYTES_MIN", bytes_min)
        folder = ServerFolder(None, in_memory=in_memory)
        assert folder.path.parent == (memory if is_there else disk)
        assert folder.path not in remove_abandoned_folders()
        os.close(folder._lock)
        assert folder.path in remove_abandoned_folders()


@pytest.mark.parametrize("folder", ["/proc", "/nowhere"])
def test_there_is_no_room_where_no_file_can_be_made(folder):
    assert not has_room(Path(folder), 1)


@pytest.mark.slow
def test_settings_reach_the_server():
    settings = {"statement_timeout": "10ms"}
    with PrivateCluster(fsync=False, settings=settings) as cluster, cluster.connect() as connection:
        assert connection.execute("SHOW statement_timeout").fetchone() == ("10ms",)


@pytest.mark.slow
def test_a_setting_that_the_server_refuses_is_told_at_once_with_its_log():
    with pytest.raises(ServerStartError, match="no_such_setting"):
        PrivateCluster(settings={"no_such_setting": "1"})


@pytest.mark.slow
@pytest.mark.parametrize(("fsync", "expected"), [(True, "on"), (False, "off")])
def test_fsync_is_on_unless_a_suite_does_without(fsync, expected):
    with PrivateCluster(fsync=fsync) as cluster, cluster.connect() as connection:
        assert connection.execute("SHOW fsync").fetchone() == (expected,)
        # Either way, kill loses nothing that was acknowledged.
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)


@pytest.mark.slow
def test_an_older_major_version_runs_as_well():
    with PrivateCluster(fsync=False, major_version=16) as cluster:
        assert cluster.version // 10_000 == 16
        assert cluster.keeps_prepared_transactions


def test_a_major_version_that_is_not_installed_is_refused():
    with pytest.raises(NoServerProgramsError, match=r"\[16, 18\], not 9"):
        PrivateCluster(major_version=9)


def test_a_role_needs_its_password(cluster, shop):
    cluster.create_role("clerk", "pass word/@:")
    try:
        with psycopg.connect(connection_string(cluster.url(shop, "clerk", "pass word/@:"))) as connection:
            assert connection.execute("SELECT current_user").fetchone() == ("clerk",)
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(connection_string(cluster.url(shop, "clerk", "wrong")))
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(connection_string(cluster.url(shop, "clerk")))
    finally:
        cluster.drop_role("clerk")


def test_a_database_can_be_a_copy_of_another(cluster, shop):
    with cluster.connect(shop) as connection:
        connection.execute("INSERT INTO orders VALUES ('copied')")
    cluster.create_database("copy", template=shop)
    assert orders(cluster, "copy") == ["copied"]
    cluster.drop_database("copy")


def test_dropping_a_database_ends_its_sessions_and_prepared_transactions(cluster, shop):
    prepare_order(cluster, shop, "prepared")
    session = cluster.connect(shop)
    cluster.drop_database(shop)
    with pytest.raises(psycopg.OperationalError):
        session.execute("SELECT 1")
    with cluster.connect() as connection:
        assert connection.execute("SELECT count(*) FROM pg_prepared_xacts").fetchone() == (0,)
    cluster.drop_database(shop)


@pytest.mark.slow
@pytest.mark.needs_root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as somebody else")
def test_programs_in_a_closed_folder_are_copied_for_the_user_of_the_server(tmp_path, monkeypatch):
    installed = find_programs()
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    shutil.copytree(installed, closed / installed.parent.name / installed.name, symlinks=True)
    libraries = f"{installed.parent.name}.libs"
    shutil.copytree(installed.parent.parent / libraries, closed / libraries, symlinks=True)
    monkeypatch.setattr(private_cluster, "find_programs", lambda _: closed / installed.parent.name / installed.name)
    with PrivateCluster(fsync=False) as cluster:
        assert cluster.version >= 180_000
        running = Path(f"/proc/{cluster.pid}/exe").resolve()
        assert running.is_relative_to(cluster._programs)
        assert not running.is_relative_to(closed)
        # One copy serves all servers of a process.
        assert private_cluster._programs_for(cluster._user, private_cluster.find_programs(18)) == cluster._programs
