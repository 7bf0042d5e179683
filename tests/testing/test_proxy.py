"""Tests of the proxy: it breaks a connection exactly where it was told to, and nowhere else.

What the server made of a transaction is asked of the server itself, on a connection that avoids the proxy.
"""

from __future__ import annotations

import re
import socket
import threading

import psycopg
import pytest
from psycopg import errors

from tests.tools.proxy import Proxy, upstream_of
from txnstore.testing.postgres_server import connection_string
from txnstore.testing.private_cluster import PrivateCluster

WAIT_SECONDS = 60


@pytest.fixture(scope="module")
def cluster():
    with PrivateCluster(fsync=False) as cluster:
        with cluster.connect() as connection:
            connection.execute("CREATE TABLE orders (name text)")
        yield cluster


@pytest.fixture
def proxy(cluster):
    with Proxy(upstream_of(cluster.url("postgres"))) as proxy:
        yield proxy


@pytest.fixture
def connect(cluster, proxy):
    connections = []

    def connect(**options) -> psycopg.Connection:
        url = proxy.url(cluster.url("postgres"))
        connections.append(psycopg.connect(connection_string(url), **options))
        return connections[-1]

    yield connect
    # Whoever was swallowed would wait for ever: the sockets are closed, not the sessions.
    proxy.close()
    for connection in connections:
        connection.close()


def insert_order(connection):
    """Insert in a transaction that stays open, and return its id."""
    connection.execute("INSERT INTO orders VALUES ('a book')")
    (transaction_id,) = connection.execute("SELECT pg_current_xact_id()::text").fetchone()
    return transaction_id


def status(cluster, transaction_id):
    with cluster.connect() as connection:
        (status,) = connection.execute("SELECT pg_xact_status(%s::text::xid8)", [transaction_id]).fetchone()
    return status


def in_background(function):
    """Run a call that will block in a thread; the function returned waits for it and returns its error, if any."""
    outcome: list[psycopg.Error | None] = []

    def run() -> None:
        try:
            function()
        except psycopg.Error as error:
            outcome.append(error)
        else:
            outcome.append(None)

    thread = threading.Thread(target=run)
    thread.start()

    def join():
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
        return outcome[0]

    return join


def commit_plainly(connection):
    connection.commit()


def commit_in_the_extended_protocol(connection):
    # Asking for a binary result is what takes psycopg out of the simple protocol.
    connection.execute("COMMIT", binary=True)


def commit_prepared_statement(connection):
    connection.execute("COMMIT", prepare=True)


ways_to_commit = pytest.mark.parametrize(
    "commit", [commit_plainly, commit_in_the_extended_protocol, commit_prepared_statement]
)


@ways_to_commit
def test_a_commit_cut_before_it_reaches_the_server_is_aborted(cluster, proxy, connect, commit):
    connection = connect()
    transaction_id = insert_order(connection)
    assert status(cluster, transaction_id) == "in progress"
    cut = proxy.cut(before="COMMIT")
    with pytest.raises(psycopg.OperationalError) as failure:
        commit(connection)
    assert cut.wait(WAIT_SECONDS)
    assert status(cluster, transaction_id) == "aborted"
    assert failure.value.sqlstate is None


@pytest.mark.slow
@ways_to_commit
def test_a_commit_whose_acknowledgement_is_lost_is_committed(cluster, proxy, connect, commit):
    connection = connect()
    transaction_id = insert_order(connection)
    lost = proxy.cut(after="COMMIT")
    with pytest.raises(psycopg.OperationalError) as failure:
        commit(connection)
    assert lost.wait(WAIT_SECONDS)
    assert status(cluster, transaction_id) == "committed"
    assert failure.value.sqlstate is None


def test_a_statement_that_commits_by_itself_is_committed_when_its_acknowledgement_is_lost(cluster, proxy, connect):
    connection = connect(autocommit=True)
    # With a parameter: Parse, Bind, Execute and Sync, and it is the Sync that commits.
    lost = proxy.cut(after="INSERT INTO orders")
    with pytest.raises(psycopg.OperationalError):
        connection.execute("INSERT INTO orders VALUES (%s)", ["sold alone"])
    assert lost.wait(WAIT_SECONDS)
    with cluster.connect() as direct:
        assert direct.execute("SELECT count(*) FROM orders WHERE name = 'sold alone'").fetchone() == (1,)


def test_a_cut_session_is_gone_from_the_server_once_the_fault_has_fired(cluster, proxy, connect):
    connection = connect()
    server_process = connection.info.backend_pid
    cut = proxy.cut(before=1)
    with pytest.raises(psycopg.OperationalError):
        insert_order(connection)
    assert cut.wait(WAIT_SECONDS)
    with cluster.connect() as direct:
        statement = "SELECT count(*) FROM pg_locks WHERE pid = %s"
        assert direct.execute(statement, [server_process]).fetchone() == (0,)


def test_every_message_of_a_transaction_can_be_cut_before_and_after(cluster, proxy, connect):
    """All the places where a connection can break: the truth is always one of two, and changes once."""

    def transaction(connection) -> None:
        connection.execute("INSERT INTO orders VALUES ('numbered')", prepare=True)
        connection.commit()

    def orders():
        with cluster.connect() as direct:
            return direct.execute("SELECT count(*) FROM orders WHERE name = 'numbered'").fetchone()[0]

    rehearsal = connect()
    before = proxy.request_count
    transaction(rehearsal)
    messages = proxy.request_count - before
    outcomes = []
    for number in range(1, messages + 1):
        for where in ("before", "after"):
            connection, known = connect(), orders()
            cut = proxy.cut(**{where: number})
            with pytest.raises(psycopg.OperationalError):
                transaction(connection)
            assert cut.wait(WAIT_SECONDS)
            outcomes.append(orders() - known)
    assert messages >= 5
    assert outcomes == [0] * (2 * messages - 1) + [1]


def test_only_the_first_connection_that_matches_is_cut(cluster, proxy, connect):
    first, second = connect(), connect()
    first_id, second_id = insert_order(first), insert_order(second)
    cut = proxy.cut(before="COMMIT")
    with pytest.raises(psycopg.OperationalError):
        second.commit()
    first.commit()
    assert cut.fired
    assert [status(cluster, first_id), status(cluster, second_id)] == ["committed", "aborted"]


def test_a_fault_that_nothing_matches_does_not_fire(proxy, connect):
    connection = connect()
    cut = proxy.cut(before="COMMIT")
    assert not cut.fired
    connection.execute("SELECT 'x; COMMIT', $$; COMMIT$$ /* ; COMMIT */ -- ; COMMIT")
    connection.execute("SAVEPOINT commit")
    connection.rollback()
    assert not cut.fired
    assert not cut.wait(0)


def test_commit_and_commit_prepared_are_told_apart(cluster, proxy, connect):
    connection = connect()
    transaction_id = connection.xid(1, "proxy", "branch")
    connection.tpc_begin(transaction_id)
    connection.execute("INSERT INTO orders VALUES ('prepared')")
    connection.tpc_prepare()
    plain = proxy.cut(before="COMMIT")
    lost = proxy.cut(after="COMMIT PREPARED")
    with pytest.raises(psycopg.OperationalError):
        connection.tpc_commit()
    assert lost.wait(WAIT_SECONDS)
    assert not plain.fired
    with cluster.connect() as direct:
        assert direct.execute("SELECT count(*) FROM pg_prepared_xacts").fetchone() == (0,)
        assert direct.execute("SELECT count(*) FROM orders WHERE name = 'prepared'").fetchone() == (1,)


def test_a_pattern_finds_a_statement_by_any_part_of_it(proxy, connect):
    connection = connect()
    cut = proxy.cut(before=re.compile("second"))
    connection.execute("SELECT 'first'")
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 'second'")
    assert cut.wait(WAIT_SECONDS)


def test_a_paused_commit_waits_until_it_is_resumed(cluster, proxy, connect):
    connection = connect()
    transaction_id = insert_order(connection)
    pause = proxy.pause(before="COMMIT")
    join = in_background(connection.commit)
    assert pause.wait(WAIT_SECONDS)
    assert status(cluster, transaction_id) == "in progress"
    pause.resume()
    assert join() is None
    assert status(cluster, transaction_id) == "committed"


def test_a_paused_answer_leaves_the_client_waiting_for_what_is_done(cluster, proxy, connect):
    connection = connect()
    transaction_id = insert_order(connection)
    pause = proxy.pause(after="COMMIT")
    join = in_background(connection.commit)
    assert pause.wait(WAIT_SECONDS)
    assert status(cluster, transaction_id) == "committed"
    assert connection.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE
    pause.resume()
    assert join() is None
    assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_black_hole_keeps_the_session_open_until_it_is_healed(cluster, proxy, connect):
    connection = connect()
    transaction_id = insert_order(connection)
    hole = proxy.black_hole(before="COMMIT")
    join = in_background(connection.commit)
    assert hole.wait(WAIT_SECONDS)
    assert status(cluster, transaction_id) == "in progress"
    proxy.heal()
    assert isinstance(join(), psycopg.OperationalError)
    assert status(cluster, transaction_id) == "aborted"


def test_a_black_hole_after_a_commit_hides_that_it_happened(cluster, proxy, connect):
    connection = connect()
    transaction_id = insert_order(connection)
    hole = proxy.black_hole(after="COMMIT")
    join = in_background(connection.commit)
    assert hole.wait(WAIT_SECONDS)
    assert status(cluster, transaction_id) == "committed"
    proxy.cut_connections()
    assert isinstance(join(), psycopg.OperationalError)


@pytest.mark.slow
def test_a_network_that_is_gone_hides_notifications_and_lets_nobody_connect(cluster, proxy, connect):
    listener = connect(autocommit=True)
    listener.execute("LISTEN news")
    proxy.swallow_everything()
    replies = proxy.reply_count
    with cluster.connect() as direct:
        direct.execute("NOTIFY news")
    assert list(listener.notifies(timeout=0.05)) == []
    with pytest.raises(errors.ConnectionTimeout):
        connect(connect_timeout=2)
    proxy.heal()
    assert proxy.reply_count > replies
    assert connect().execute("SELECT 1").fetchone() == (1,)


def test_connections_are_refused_and_accepted_again_on_the_same_port(proxy, connect):
    address = proxy.address
    open_connection = connect()
    proxy.refuse_connections()
    with pytest.raises(psycopg.OperationalError, match=r"(?i)refused"):
        connect()
    assert open_connection.execute("SELECT 1").fetchone() == (1,)
    proxy.accept_connections()
    assert proxy.address == address
    assert connect().execute("SELECT 1").fetchone() == (1,)


def test_clients_see_a_cut_connection_as_reset(proxy):
    with socket.create_connection(proxy.address) as client:
        cut = proxy.cut(before=1)
        client.sendall(b"\0\0\0\x08\0\x03\0\0")
        assert cut.wait(WAIT_SECONDS)
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_a_cut_fires_only_when_the_server_has_ended_the_session(proxy):
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy.upstream = server.getsockname()
        cut = proxy.cut(before=1)
        with socket.create_connection(proxy.address) as client:
            client.sendall(b"\0\0\0\x08\0\x03\0\0")
            session, _ = server.accept()
            with session:
                assert session.recv(1) == b""
                assert not cut.fired
            assert cut.wait(WAIT_SECONDS)


def test_all_open_connections_can_be_cut_at_once(cluster, proxy, connect):
    connections = [connect(), connect()]
    transaction_ids = [insert_order(connection) for connection in connections]
    proxy.cut_connections()
    assert [status(cluster, transaction_id) for transaction_id in transaction_ids] == ["aborted", "aborted"]
    for connection in connections:
        with pytest.raises(psycopg.OperationalError):
            connection.commit()


def test_the_upstream_of_a_url_may_be_a_unix_socket(cluster):
    url = f"postgresql+psycopg://postgres@/postgres?host={cluster.folder}&port={cluster.port}"
    assert upstream_of(url) == cluster.socket_path
    with Proxy(upstream_of(url)) as proxy, psycopg.connect(connection_string(proxy.url(url))) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_running_statement_can_be_cancelled_through_the_proxy(connect):
    connection = connect()
    runs = threading.Event()
    connection.add_notice_handler(lambda _: runs.set())
    join = in_background(lambda: connection.execute("DO $$ BEGIN RAISE NOTICE 'now'; PERFORM pg_sleep(60); END $$"))
    assert runs.wait(WAIT_SECONDS)
    connection.cancel_safe(timeout=WAIT_SECONDS)
    assert isinstance(join(), errors.QueryCanceled)


def test_no_thread_and_no_socket_is_left_after_close(cluster):
    threads_before = set(threading.enumerate())
    proxy = Proxy(upstream_of(cluster.url("postgres")))
    connection = psycopg.connect(connection_string(proxy.url(cluster.url("postgres"))))
    proxy.black_hole(before="SELECT 1")
    join = in_background(lambda: connection.execute("SELECT 1"))
    proxy.close()
    proxy.close()
    assert isinstance(join(), psycopg.OperationalError)
    assert set(threading.enumerate()) <= threads_before
    with socket.socket() as probe:
        assert probe.connect_ex(proxy.address) != 0


@pytest.mark.parametrize("when", [{}, {"before": "COMMIT", "after": "COMMIT"}, {"before": 0}])
def test_a_fault_needs_exactly_one_moment(proxy, when):
    with pytest.raises(ValueError, match=r"exactly one|counted from 1"):
        proxy.cut(**when)


@pytest.mark.slow
def test_a_message_that_arrives_in_pieces_is_one_message(cluster, proxy):
    startup = b"\0\x03\0\0user\0postgres\0database\0postgres\0\0"
    startup = (len(startup) + 4).to_bytes(4, "big") + startup
    proxy.upstream = cluster.socket_path
    with socket.create_connection(proxy.address) as client:
        client.sendall(startup[:7])
        assert proxy.request_count == 0
        client.sendall(startup[7:])
        assert client.recv(1) == b"R"
        assert proxy.request_count == 1
