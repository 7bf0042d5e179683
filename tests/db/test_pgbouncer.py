"""Through pgbouncer in transaction mode: any database transaction may come to any of a few server connections."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import make_url

from txnstore.db.opening import open_store
from txnstore.doctor.examination import examine
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.fetch import fetch
from txnstore.log.topics import create_topic, find_topics
from txnstore.model import ProducerIdentity, Record
from txnstore.testing.postgres_server import connection_string
from txnstore.testing.private_cluster import LOCALHOST, free_port, server_user

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

pytestmark = [
    pytest.mark.needs_pgbouncer,
    pytest.mark.skipif(PROGRAM is None, reason="needs the program pgbouncer (Debian: apt-get install pgbouncer)"),
]

SETTINGS = """
[databases]
* = host={host} port={port} user={user} password='{password}'
[pgbouncer]
listen_addr = {listen}
listen_port = {listen_port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {pool_size}
max_client_conn = 200
"""


@contextmanager
def running_bouncer(server, pool_size):
    """Run pgbouncer in front of a server, and give its port."""
    behind = make_url(server.url("postgres"))
    user, port = server_user(), free_port()
    folder = Path(tempfile.mkdtemp(prefix="txnstore-pgbouncer-"))
    settings = SETTINGS.format(
        host=behind.host,
        port=behind.port,
        user=behind.username,
        password=(behind.password or "").replace("'", "''"),
        listen=LOCALHOST,
        listen_port=port,
        pool_size=pool_size,
    )
    (folder / "pgbouncer.ini").write_text(settings)
    if user is not None:
        shutil.chown(folder, user.user_id, user.group_id)
        shutil.chown(folder / "pgbouncer.ini", user.user_id, user.group_id)
    process = subprocess.Popen(
        [str(PROGRAM), str(folder / "pgbouncer.ini")],
        stderr=subprocess.PIPE,
        text=True,
        user=None if user is None else user.user_id,
        group=None if user is None else user.group_id,
        extra_groups=None if user is None else [],
    )
    assert process.stderr is not None
    lines = process.stderr
    log, is_up = [], threading.Event()

    def read_log():
        # To its end: a full pipe would stop the program.
        for line in lines:
            log.append(line)
            if "process up" in line:
                is_up.set()

    reader = threading.Thread(target=read_log)
    reader.start()
    try:
        assert is_up.wait(60), "".join(log)
        yield port
    finally:
        process.kill()
        process.wait()
        reader.join(60)
        lines.close()
        shutil.rmtree(folder)


@pytest.fixture(scope="module", params=[1, 2])
def pool_size(request):
    return request.param


@pytest.fixture(scope="module")
def bouncer_port(txnstore_postgres_server, pool_size):
    with running_bouncer(txnstore_postgres_server, pool_size) as port:
        yield port


@pytest.fixture
def through(txnstore_postgresql_url, bouncer_port):
    """The URL of a store, through pgbouncer."""
    parsed = make_url(txnstore_postgresql_url)
    # pgbouncer lets everybody in, and itself knows the password for the server.
    url = parsed._replace(host=LOCALHOST, port=bouncer_port, username="anybody", password=None)
    return url.render_as_string()


@pytest.mark.slow
def test_several_clients_do_everything_through_a_few_connections(through, pool_size, client_path):
    stores = [open_store(through) for _ in range(4)]
    with ThreadPoolExecutor(len(stores)) as threads:
        list(threads.map(lambda number: client_path(stores[number], f"topic-{number}"), range(len(stores))))
    with psycopg.connect(connection_string(through)) as connection:
        sessions = connection.execute("SELECT pid FROM pg_stat_activity WHERE datname = current_database()").fetchall()
    assert len(sessions) <= pool_size
    for store in stores:
        store.close()


@pytest.mark.slow
def test_a_new_database_gets_its_tables_through_it(new_database, bouncer_port, client_path):
    with open_store(f"postgresql://anybody@{LOCALHOST}:{bouncer_port}/{new_database()}") as store:
        client_path(store)


@pytest.mark.slow_but_first
def test_writers_of_one_partition_leave_no_gap_and_no_duplicate(through):
    stores = [open_store(through) for _ in range(4)]
    topic = stores[0].write(lambda connection: create_topic(connection, "orders"))
    partition_id = topic.partition_ids[0]

    def write(number):
        for count in range(10):
            producer = ProducerIdentity(100 + number, 0)
            batch = encode([Record(b"%d" % number)], producer=producer, base_sequence=count)
            for _ in range(2):  # the second one is a repetition
                stores[number].write(
                    lambda connection, batch=batch: append(connection, [Append(partition_id, batch)]),
                    wakes_readers=True,
                )

    with ThreadPoolExecutor(len(stores)) as threads:
        list(threads.map(write, range(len(stores))))
    page = stores[1].read(lambda connection: fetch(connection, {partition_id: 0}))[partition_id]
    offsets = [record.offset for batch in page.batches for record in batch.records()]
    assert offsets == list(range(40))
    for store in stores:
        store.close()


@pytest.mark.slow
def test_a_waiting_reader_looks_by_itself_for_its_notification_may_be_lost(through):
    with open_store(through) as reader, open_store(through) as writer:
        waiter = reader.waiter()
        writer.write(lambda connection: create_topic(connection, "orders"), wakes_readers=True)
        assert waiter.wait(60_000)
        # And again, without anything new: it is told to look, not kept waiting.
        assert waiter.wait(60_000)
        assert [topic.name for topic in reader.read(lambda c: find_topics(c, ["orders"]))] == ["orders"]
        waiter.close()


@pytest.mark.slow_but_first
def test_nothing_of_ours_stays_behind_in_a_server_connection(through, client_path):
    shown = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "search_path")
    with psycopg.connect(connection_string(through), autocommit=True) as stranger:
        before = [stranger.execute(f"SHOW {name}").fetchone() for name in shown]
        with open_store(through) as store:
            client_path(store)
            assert [stranger.execute(f"SHOW {name}").fetchone() for name in shown] == before
            assert stranger.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
            assert stranger.execute("SELECT count(*) FROM pg_cursors").fetchone() == (0,)
            assert stranger.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() == (0,)


def test_the_doctor_sees_that_sessions_are_shared(through, txnstore_postgresql_url):
    assert "pooler" in {each.check for each in examine(through).findings}
    assert "pooler" not in {each.check for each in examine(txnstore_postgresql_url).findings}
