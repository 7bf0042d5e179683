"""What befalls a session on a PostgreSQL server that is well: cancelled, ended, too slow, locked out, cut off."""

from __future__ import annotations

import signal
import threading
from contextlib import closing

import psycopg
import pytest

from txnstore.db.backend import Limits
from txnstore.db.opening import open_store
from txnstore.db.postgresql import connections
from txnstore.db.postgresql.backend import connect_driver
from txnstore.db.postgresql.connections import PostgreSQLConnection
from txnstore.db.url import parse_url
from txnstore.errors import OutcomeUnknown, StatementTimedOut, StoreBusy, StoreUnavailable
from txnstore.log.append import append
from txnstore.testing.postgres_server import connection_string
from txnstore.transactions.outcome import Outcome, resolve_outcome

SLEEPING = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
#: Short, but longer than a busy machine keeps a client from its next statement.
SILENCE = {
    "statement_timeout_ms": 1_000,
    "answer_timeout_ms": 1_000,
    "idle_timeout_ms": 2_000,
    "transaction_timeout_ms": 4_000,
}


@pytest.fixture
def open_orders(direct, postgresql_url, topic):
    """Open the topic on PostgreSQL with limits of one's own."""
    stores = []

    def open_(**limits):
        stores.append(open_store(postgresql_url, limits=Limits(**{"retry_timeout_ms": 0, **limits})))
        return type(direct)(stores[-1], topic)

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def administrator(postgresql_url):
    with psycopg.connect(connection_string(postgresql_url), autocommit=True) as connection:
        yield connection


@pytest.fixture
def lock_head(administrator, direct):
    """Take the lock of the partition, as a hostile or a stopped client would; returns how to let go."""
    administrator.execute("BEGIN")
    administrator.execute(
        "SELECT FROM txnstore.partition_heads WHERE partition_id = %s FOR UPDATE", [direct.partition_id]
    )
    return lambda: administrator.execute("ROLLBACK")


class SlowAppend:
    """An append whose first try sleeps in the server."""

    def __init__(self, orders):
        self.orders = orders
        self.tries = 0

    def __call__(self, **options):
        return self.orders.store.write(self._work, **options)

    def _work(self, connection):
        self.tries += 1
        append(connection, [self.orders.batch(b"a book")])
        if self.tries == 1:
            connection.exec_driver_sql("SELECT pg_sleep(60)")


def test_a_statement_beyond_its_time_is_not_done(direct, open_orders):
    slow = SlowAppend(open_orders(statement_timeout_ms=SILENCE["statement_timeout_ms"]))
    with pytest.raises(StatementTimedOut):
        slow()
    assert direct.values() == []
    slow()
    assert direct.values() == [b"a book"]


def test_a_cancelled_statement_is_not_done(direct, open_orders, administrator, in_background, until):
    running = in_background(SlowAppend(open_orders()))
    until(lambda: administrator.execute(f"SELECT pg_cancel_backend(pid) FROM ({SLEEPING}) AS sleeping").fetchone())
    with pytest.raises(StatementTimedOut):
        running.result()
    assert direct.values() == []


def test_a_session_ended_in_a_statement_is_not_done_and_tried_again(
    direct, open_orders, administrator, in_background, until
):
    slow = SlowAppend(open_orders(retry_timeout_ms=30_000))
    running = in_background(slow)
    until(lambda: administrator.execute(f"SELECT pg_terminate_backend(pid) FROM ({SLEEPING}) AS sleeping").fetchone())
    running.result()
    assert slow.tries == 2
    assert direct.values() == [b"a book"]


def test_a_session_ended_while_it_was_idle_is_replaced_unnoticed(direct, open_orders, administrator):
    orders = open_orders(retry_timeout_ms=30_000)
    orders.add(b"a book")
    administrator.execute(
        "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'txnstore'"
    )
    orders.add(b"a pen")
    assert direct.values() == [b"a book", b"a pen"]


def test_a_lock_that_is_not_let_go_ends_in_a_bounded_time(direct, open_orders, lock_head):
    with pytest.raises(StoreBusy):
        open_orders(lock_timeout_ms=50).add(b"a book")
    lock_head()
    assert direct.values() == []


def test_a_lock_that_is_let_go_in_time_is_waited_for(direct, open_orders, lock_head, administrator, in_background):
    orders = open_orders(lock_timeout_ms=20, retry_timeout_ms=30_000)
    tries = []

    def work(connection):
        tries.append(1)
        if len(tries) == 3:
            lock_head()
        return append(connection, [orders.batch(b"a book")])

    orders.store.write(work)
    assert len(tries) == 3
    assert direct.values() == [b"a book"]


def test_victims_of_a_deadlock_are_tried_again_and_done_once(direct, open_orders, in_background):
    """Two clients that lock heads in opposite orders; nobody in txnstore does."""
    first = open_orders(retry_timeout_ms=30_000)
    second = type(first)(first.store, f"{first.name}-other")
    both_hold_a_lock = threading.Barrier(2)
    tries = []

    def run(one, other, value):
        def work(connection):
            tries.append(value)
            connection.exec_driver_sql("SET LOCAL deadlock_timeout = 10")
            append(connection, [one.batch(value)])
            if len(tries) <= 2:
                both_hold_a_lock.wait(60)
            append(connection, [other.batch(value)])

        return in_background(lambda: one.store.write(work))

    for running in [run(first, second, b"a book"), run(second, first, b"a pen")]:
        running.result()
    assert len(tries) >= 3
    assert sorted(first.values()) == sorted(second.values()) == [b"a book", b"a pen"]


@pytest.mark.slow_but_first
@pytest.mark.parametrize("goes_on", [True, False], ids=["goes on", "killed"])
def test_a_client_that_stopped_with_the_lock_of_a_partition_loses_it(
    direct, open_orders, postgresql_url, start_child, goes_on
):
    child = start_child("hold_head", postgresql_url, direct.name, 300)
    assert child.read() == "locked"
    child.signal(signal.SIGSTOP if goes_on else signal.SIGKILL)
    # Longer than the server lets a client be idle, much shorter than anybody would wait.
    open_orders(lock_timeout_ms=10_000).add(b"from another client")
    if goes_on:
        child.signal(signal.SIGCONT)
        child.tell()
        assert child.read() == "OutcomeUnknown"
    assert direct.values() == [b"from another client"]


@pytest.mark.slow
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_network_that_swallows_a_statement_holds_nobody_up(
    direct, proxy, open_proxied, side, txnstore_postgres_server
):
    if side == "before" and txnstore_postgres_server.version < 170_000:
        pytest.skip("before PostgreSQL 17, who got half of a request asks the network, and the proxy's end is there")
    orders = open_proxied(**SILENCE)
    proxy.black_hole(**{side: "INSERT INTO txnstore.record_batches"})
    with pytest.raises(StoreUnavailable):
        orders.add(b"a book")
    # The server waits for the lost client no longer than for an idle one.
    direct.add(b"a pen")
    assert direct.values() == [b"a pen"]


@pytest.mark.slow
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_network_that_swallows_a_commit_leaves_it_open_and_it_is_resolved(direct, proxy, open_proxied, side):
    orders = open_proxied(**SILENCE)
    coordinator, producer = orders.transaction(direct.name, b"a book")
    hole = proxy.black_hole(**{side: "COMMIT"})
    with pytest.raises(OutcomeUnknown):
        coordinator.end_transaction(direct.name, producer, commit=True)
    assert hole.wait()
    outcome = resolve_outcome(direct.store, direct.name, producer)
    assert outcome is (Outcome.COMMITTED if side == "after" else Outcome.ABORTED)
    assert direct.committed() == ([b"a book"] if side == "after" else [])


@pytest.mark.slow
def test_a_network_that_swallows_everything_is_noticed_when_connecting(proxy, open_proxied):
    proxy.swallow_everything()
    with pytest.raises(StoreUnavailable):
        open_proxied(options="?connect_timeout=2")


@pytest.fixture
def asked_soon(monkeypatch):
    """Let a server that is silent be asked soon whether it is there; returns what it has said so far."""
    said = []

    def noting(connection):
        said.append(ask(connection))
        return said[-1]

    ask = PostgreSQLConnection._server_is_there
    monkeypatch.setattr(connections, "ASK_SECONDS", 0.1)
    monkeypatch.setattr(connections, "SAY_SECONDS", 2)
    monkeypatch.setattr(PostgreSQLConnection, "_server_is_there", noting)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("statement_timeout_ms", [0, 3_600_000])
@pytest.mark.parametrize("run", [PostgreSQLConnection.execute, PostgreSQLConnection.read_last])
def test_a_server_that_is_gone_is_noticed_however_long_a_statement_may_take(
    postgresql_url, proxy, asked_soon, run, statement_timeout_ms
):
    with closing(connect_driver(parse_url(proxy.url(postgresql_url)))) as connection:
        connection.expect_answers_within(Limits(statement_timeout_ms=statement_timeout_ms))
        proxy.swallow_everything()
        with pytest.raises(psycopg.OperationalError, match="did not answer in time"):
            run(connection, "SELECT 1")
    assert asked_soon == [False]
    proxy.heal()


@pytest.mark.slow_but_first
@pytest.mark.parametrize("run", [PostgreSQLConnection.execute, PostgreSQLConnection.read_last])
def test_a_statement_that_takes_long_is_waited_for_while_its_server_is_there(
    postgresql_url, administrator, lock_head, asked_soon, in_background, until, run
):
    with closing(connect_driver(parse_url(postgresql_url))) as connection:
        connection.expect_answers_within(Limits(statement_timeout_ms=0))
        change = "UPDATE txnstore.partition_heads SET segment = segment"
        running = in_background(lambda: run(connection, f"{change} RETURNING 1"))
        until(lambda: len(asked_soon) > 1)
        assert running.is_running
        lock_head()
        running.result()
    assert all(asked_soon)


def test_a_server_that_lets_nobody_else_in_is_there(postgresql_url, proxy):
    with closing(connect_driver(parse_url(proxy.url(postgresql_url)))) as connection:
        proxy.refuse_connections()
        assert connection._server_is_there()


@pytest.mark.slow
def test_a_slow_answer_is_not_a_lost_one(direct, proxy, open_proxied, in_background):
    orders = open_proxied()
    pause = proxy.pause(after="COMMIT")
    running = in_background(lambda: orders.add(b"a book"))
    assert pause.wait()
    assert running.is_running
    pause.resume()
    running.result()
    assert direct.values() == [b"a book"]
