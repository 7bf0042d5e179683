"""The image that scripts/postgres-image makes is a PostgreSQL that the tests in containers can rely on."""

from __future__ import annotations

import os

import psycopg
import pytest

IN_CONTAINERS = os.environ.get("TXNSTORE_TEST_POSTGRES") == "testcontainers"
IMAGE = os.environ.get("TXNSTORE_TEST_POSTGRES_IMAGE", "")

pytestmark = [
    pytest.mark.testcontainers,
    pytest.mark.skipif(
        not (IN_CONTAINERS and IMAGE),
        reason="needs a container engine: scripts/docker-engine scripts/test -m testcontainers",
    ),
]


@pytest.fixture(scope="module")
def container():
    from testcontainers.community.postgres import PostgresContainer

    made = PostgresContainer(IMAGE, driver=None, username="writer", password="it's-secret", dbname="log")
    with made.with_command(["-c", "max_prepared_transactions=64"]) as started:
        yield started


def wait_until_ready(container):
    from testcontainers.core.wait_strategies import ExecWaitStrategy

    ready = ["pg_isready", "--host", "127.0.0.1"]
    ExecWaitStrategy(ready).with_startup_timeout(30).with_poll_interval(0.05).wait_until_ready(container)


def connect(container, **changes):
    return psycopg.connect(container.get_connection_url(), autocommit=True, **changes)


def test_it_takes_user_password_database_and_settings(container):
    asked = "SELECT current_user, current_database(), current_setting('max_prepared_transactions')"
    with connect(container) as connection:
        assert connection.execute(asked).fetchone() == ("writer", "log", "64")


def test_it_refuses_a_wrong_password(container):
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        connect(container, password="a-guess")


def test_a_kill_and_a_start_keep_what_was_committed_and_what_was_prepared(container):
    with connect(container) as connection:
        connection.execute("CREATE TABLE kept (number int)")
        connection.execute("INSERT INTO kept VALUES (1)")
        connection.execute("BEGIN")
        connection.execute("INSERT INTO kept VALUES (2)")
        connection.execute("PREPARE TRANSACTION 'second'")

    container.get_wrapped_container().kill()
    container.get_wrapped_container().start()
    wait_until_ready(container)

    with connect(container) as connection:
        assert connection.execute("SELECT number FROM kept").fetchall() == [(1,)]
        connection.execute("COMMIT PREPARED 'second'")
        assert connection.execute("SELECT number FROM kept ORDER BY number").fetchall() == [(1,), (2,)]
