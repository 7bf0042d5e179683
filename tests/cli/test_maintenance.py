"""`txnstore maintain`: does its duties until it is told to stop, and stops in good order."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
from pathlib import Path
from urllib.request import urlopen

import pytest
from sqlalchemy import update
from sqlalchemy.engine import make_url

from tests.tools.readmes import block_of
from txnstore.cli import maintenance as command
from txnstore.db.closing import Move, MoveState, refuse
from txnstore.db.cluster.cluster import Cluster, open_cluster
from txnstore.db.opening import open_store
from txnstore.db.schema import stores
from txnstore.errors import PermissionDenied, StoreBusy, StoreUnavailable
from txnstore.log.append import Append
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic
from txnstore.maintenance import loop
from txnstore.maintenance.duties import ABORT_INTERVAL, DUTIES, LONG_DUTIES
from txnstore.maintenance.loop import Maintenance
from txnstore.maintenance.turns import MaintenanceDuty
from txnstore.model import Record
from txnstore.transactions.coordinator import TransactionCoordinator


@pytest.fixture
def abandoned(url):
    """The URL of a store, by the server's own clock, with a transaction whose time is up."""
    return abandon(url)


def abandon(url):
    with open_store(url) as store:
        (partition_id,) = store.write(lambda connection: create_topic(connection, "orders")).partition_ids
        coordinator = TransactionCoordinator(store)
        producer = coordinator.init_producer_id("worker", 1).identity
        batch = encode([Record(b"a")], producer=producer, base_sequence=0, is_transactional=True)
        coordinator.append("worker", producer, [Append(partition_id, batch)])
    return url


def test_once_does_everything_and_says_how_much(txnstore, abandoned):
    ended = txnstore("maintain", abandoned, "--once")
    assert ended.code == 0
    assert [line.split(" ", 1)[1] for line in ended.out.splitlines()] == [duty.name for duty in (*DUTIES, *LONG_DUTIES)]
    assert "1 timed out transactions aborted" in ended.out
    assert "1 timed out transactions aborted" not in txnstore("maintain", abandoned, "--once").out


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("error", "code"), [(StoreBusy, 75), (PermissionDenied, 1), (AssertionError, 1)])
def test_once_says_by_its_code_that_something_was_not_done(txnstore, url, monkeypatch, error, code):
    def fail(error):
        raise error

    monkeypatch.setattr("txnstore.transactions.recovery.complete_all_decided", lambda *_: fail(error))
    # What may pass is not what the code tells of if something else stays wrong.
    monkeypatch.setattr("txnstore.log.deleting.purge_deleted_partitions", lambda *_, **__: fail(StoreBusy))
    ended = txnstore("maintain", url, "--once")
    assert ended.code == code
    assert len(ended.out.splitlines()) == len(DUTIES) + len(LONG_DUTIES) - 2


def test_once_goes_on_if_one_database_cannot_be_read(txnstore, txnstore_sqlite_url, tmp_path, monkeypatch):
    second = f"sqlite:///{tmp_path}/second.db"
    with open_cluster(f"{txnstore_sqlite_url},{second}"):
        pass
    run_once, seen = Maintenance.run_once, []

    def fail_first(maintenance):
        seen.append(maintenance)
        if len(seen) == 1:
            raise StoreBusy("locked for long")
        return run_once(maintenance)

    monkeypatch.setattr(Maintenance, "run_once", fail_first)
    ended = txnstore("maintain", f"{txnstore_sqlite_url},{second}", "--once")
    assert ended.code == 75
    assert len(ended.out.splitlines()) == len(DUTIES) + len(LONG_DUTIES)
    assert f"txnstore: {txnstore_sqlite_url}: locked for long" in ended.err


@pytest.mark.slow_but_first
@pytest.mark.parametrize("is_listed", [True, False], ids=["away", "not in the list"])
def test_once_is_to_be_repeated_for_a_database_that_is_away_not_for_one_that_is_not_in_the_list(
    txnstore, txnstore_sqlite_url, tmp_path, monkeypatch, is_listed
):
    urls = f"{txnstore_sqlite_url},sqlite:///{tmp_path}/second.db"
    with open_cluster(urls):
        pass
    own = Cluster.own

    def find(cluster, database_id):
        if is_listed and database_id > 1:
            raise StoreUnavailable("it is away")
        return own(cluster, database_id)

    monkeypatch.setattr(Cluster, "own", find)
    ended = txnstore("maintain", urls if is_listed else txnstore_sqlite_url, "--once")
    assert ended.code == (75 if is_listed else 1)
    assert len(ended.out.splitlines()) == len(DUTIES) + len(LONG_DUTIES)
    assert ("it is away" if is_listed else "no URL of the list leads there") in ended.err


@pytest.mark.slow
@pytest.mark.parametrize(("database", "number"), [("sqlite", signal.SIGINT), ("postgresql", signal.SIGTERM)])
def test_it_runs_until_a_signal_and_ends_in_good_order(start, request, database, number):
    process = start("maintain", abandon(request.getfixturevalue(f"txnstore_{database}_url")))
    told = []
    for line in process.stderr:
        told.append(line)
        if "1 timed out transactions aborted" in line:
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, "".join(told) + err
    assert "Traceback" not in "".join(told) + err
    assert out == ""


#: In place of its work: it ends in the middle of what no signal of Python's interrupts.
NO_END = """
import sqlite3
from txnstore.cli import maintenance

def run(cluster, duties, stop):
    print("at work", flush=True)
    stop.wait()
    print("stopped", flush=True)
    sqlite3.connect(":memory:").execute(
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    ).fetchall()

maintenance._run_all = run
"""


def test_the_second_sigterm_ends_it_at_once(start, txnstore_sqlite_url):
    process = start("maintain", txnstore_sqlite_url, before=NO_END)
    for line in ("at work\n", "stopped\n"):
        assert process.stdout.readline() == line
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.slow
def test_systemd_starts_it_as_it_stands_there_and_ends_it_in_good_order(start, abandoned, monkeypatch):
    unit = configparser.ConfigParser(interpolation=None)
    unit.read_string(block_of(__file__, "Who does it", "ini").text)
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).is_absolute()
    assert arguments[-2:] == ["--metrics", "9187"]
    # What is in the file of the environment; a port that is free.
    monkeypatch.setenv("TXNSTORE_URL", abandoned)
    process = start(*arguments[:-1], "0")
    told = []
    for line in process.stderr:
        told.append(line)
        if "1 timed out transactions aborted" in line:
            break
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, "".join(told) + err


def test_cron_starts_it_as_it_stands_there(txnstore, abandoned, monkeypatch):
    *times, command_line = block_of(__file__, "Who does it", "crontab").text.split(" ", 5)
    assert times == ["*/5", "*", "*", "*", "*"]
    # In a line of cron's, a percent sign is a line break.
    assert "%" not in command_line
    variable, program, *arguments = shlex.split(command_line)[:-2]
    name, _ = variable.split("=", 1)
    monkeypatch.setenv(name, abandoned)
    assert Path(program).is_absolute()
    ended = txnstore(*arguments)
    assert ended.code == 0
    assert "1 timed out transactions aborted" in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["producer", "consumer", "monitor"])
def test_of_a_role_that_may_not_the_driver_says_nothing_beside_the_error(
    start, txnstore, txnstore_postgres_server, txnstore_postgresql_url, kind
):
    role = f"txnstore_maintains_nothing_{os.getpid()}"
    txnstore_postgres_server.create_role(role, "secret")
    try:
        granted = txnstore("roles", "grant", kind, role, "--apply", "--url", txnstore_postgresql_url)
        assert granted.code == 0, granted
        as_role = make_url(txnstore_postgresql_url)._replace(username=role, password="secret")
        process = start("maintain", as_role.render_as_string(hide_password=False), "--once")
        _, err = process.communicate(timeout=300)
        assert process.returncode == 1
        assert "permission denied" in err
        assert "error ignored" not in err
    finally:
        txnstore("roles", "revoke", role, "--apply", "--url", txnstore_postgresql_url)
        txnstore_postgres_server.drop_role(role)


def test_it_makes_no_tables_and_no_file(txnstore, txnstore_empty_url, tmp_path):
    ended = txnstore("maintain", txnstore_empty_url)
    assert ended.code == 1
    assert "run `txnstore migrate`" in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_it_serves_metrics_to_whoever_asks(start, abandoned):
    process = start("maintain", abandoned, "--metrics", "0")
    told = []
    port = None
    for line in process.stderr:
        told.append(line)
        served = re.search(r"metrics: http://127\.0\.0\.1:(\d+)/metrics", line)
        port = int(served[1]) if served else port
        if "1 timed out transactions aborted" in line:
            break
    assert port is not None, "".join(told)
    up = re.compile(r'^txnstore_up\{database="[^"]+"\} 1\.0$', re.MULTILINE)
    for _ in range(20):
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            scraped = answer.read().decode()
        # On a machine that is busy, a scrape may have no answer of the database in time.
        if up.search(scraped):
            break
    assert up.search(scraped)
    assert re.search(r"^txnstore_partition_high_watermark\{.*topic=\"orders\".*\} 2\.0$", scraped, re.MULTILINE)
    assert re.search(
        r"^txnstore_maintenance_items_total\{.*duty=\"timed out transactions aborted\".*\} 1\.0$", scraped, re.MULTILINE
    )
    assert "process_cpu_seconds_total" in scraped
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, "".join(told) + err
    assert "Traceback" not in "".join(told) + err


def test_a_port_that_is_in_use_is_an_error_in_one_line(txnstore, txnstore_sqlite_url):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = txnstore("maintain", txnstore_sqlite_url, "--metrics", str(port))
    assert ended.code == 1
    assert f"port {port} of 127.0.0.1 cannot be listened on" in ended.err
    assert "Traceback" not in ended.err


def test_metrics_of_a_process_that_does_not_stay_are_refused(txnstore, txnstore_sqlite_url):
    ended = txnstore("maintain", txnstore_sqlite_url, "--once", "--metrics", "0")
    assert ended.code == 2
    assert "leave out --once" in ended.err


@pytest.mark.slow
def test_metrics_without_their_package_are_refused_with_its_extra(start, txnstore_sqlite_url):
    process = start(
        "maintain",
        txnstore_sqlite_url,
        "--metrics",
        "0",
        before="import sys; sys.modules['prometheus_client'] = None; ",
    )
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "pip install 'txnstore[metrics]'" in err
    assert "Traceback" not in err


def test_a_mistake_of_ours_ends_no_thread_of_the_maintenance(url, monkeypatch, caplog):
    """The process would live on, and its supervisor would take it to be well."""
    monkeypatch.setattr(command, "_LOOK_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(command, "LONG_DUTIES", DUTIES[:1])
    stop, looks = threading.Event(), []

    class Mistaken:
        """Hears of a turn, which is none of the duties."""

        def due(self, _count):
            looks.append(1)
            if len(looks) < 3:
                raise AssertionError("a mistake of ours")
            stop.set()

        def portion(self, *_):
            pass

    # If nobody looks again, this is not to go on for ever.
    end = threading.Timer(60, stop.set)
    end.start()
    with open_cluster(url) as cluster:
        command._run_all(cluster, DUTIES, stop, lambda *_: Mistaken())
    end.cancel()
    assert len(looks) >= 3
    # Told once, however soon it comes again.
    (failed,) = [record for record in caplog.records if record.exc_info]
    assert "it goes on" in failed.getMessage()


@pytest.mark.slow
def test_it_ends_once_the_store_has_moved(txnstore, txnstore_sqlite_url, tmp_path, monkeypatch):
    """In the middle of its work: afterwards it does not begin."""
    moves = iter([lambda: txnstore("copy", txnstore_sqlite_url, f"sqlite:///{tmp_path / 'new.db'}")])

    def move(_):
        assert next(moves)().code == 0
        return 0

    monkeypatch.setattr(command, "_LOOK_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(command, "DUTIES", (MaintenanceDuty("moves", "log.cleaner.backoff.ms", lambda: move),))
    monkeypatch.setattr(command, "LONG_DUTIES", ())
    monkeypatch.setattr(loop, "LOOK_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(command, "stop_at_signals", lambda _stop: None)
    open_store(txnstore_sqlite_url).close()
    ended = txnstore("maintain", "--url", txnstore_sqlite_url)
    assert (ended.code, "it has moved to" in ended.err) == (1, True), ended


def test_a_database_that_a_copy_has_closed_is_looked_after_once_it_is_open_again(url, monkeypatch):
    own, looks, stop = Cluster.own, [], threading.Event()

    def find(cluster, database_id):
        looks.append(database_id)
        if len(looks) == 1:
            raise refuse("that database", Move(MoveState.CLOSED, "", "sqlite:///other.db"))
        if len(looks) == 3:
            stop.set()
        return own(cluster, database_id)

    monkeypatch.setattr(command, "_LOOK_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(command, "LONG_DUTIES", ())
    open_store(url).close()
    # If nobody looks again, this is not to go on for ever.
    timer = threading.Timer(60, stop.set)
    timer.start()
    with open_cluster(url) as cluster:
        monkeypatch.setattr(Cluster, "own", find)
        command._run_all(cluster, (), stop)
    timer.cancel()
    # One for each of both threads, and another one for the one that was refused.
    assert len(looks) == 3


#: Duties that take much longer than anybody waits for, in both threads: Python 3.11 waits at its end for no thread
#: that it was waiting for as a signal came.
STANDING = """
import threading
from txnstore.cli import maintenance
from txnstore.maintenance.turns import MaintenanceDuty

def stand(_):
    print("it stands\\n", end="", flush=True)
    threading.Event().wait(3_600)
    return 0

maintenance.DUTIES = (MaintenanceDuty("short", "log.cleaner.backoff.ms", lambda: stand),)
maintenance.LONG_DUTIES = (MaintenanceDuty("long", "log.cleaner.backoff.ms", lambda: stand),)
"""


@pytest.mark.slow
def test_the_second_signal_ends_it_whatever_it_is_at(start, abandoned):
    with open_store(abandoned) as store:
        store.write(lambda connection: connection.execute(update(stores).values(created_ms=0)))
    process = start("maintain", abandoned, before=STANDING)
    assert [process.stdout.readline() for _ in range(2)] == ["it stands\n"] * 2
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    assert process.returncode == 130


@pytest.mark.slow
def test_what_takes_long_keeps_nobody_waiting(url, monkeypatch):
    stop, begun, done_meanwhile = threading.Event(), threading.Event(), threading.Event()

    def take_long(*_):
        begun.set()
        done_meanwhile.wait(30)
        stop.set()
        return 0

    def do(*_):
        if begun.is_set():
            done_meanwhile.set()
        return 0

    monkeypatch.setattr(command, "LONG_DUTIES", (MaintenanceDuty("long", ABORT_INTERVAL, lambda: take_long),))
    short = MaintenanceDuty("short", ABORT_INTERVAL, lambda: do, interval_max_seconds=0.01)
    # If nobody does it, this is not to go on for ever.
    end = threading.Timer(60, stop.set)
    end.start()
    with open_cluster(url) as cluster:
        command._run_all(cluster, (short,), stop)
    end.cancel()
    assert done_meanwhile.is_set()
