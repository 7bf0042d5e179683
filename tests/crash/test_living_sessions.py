"""Sessions that live on after a crash: nobody can tell one from a new one, and nothing dead reaches it."""

from __future__ import annotations

from contextlib import closing

import psycopg
import pytest

from tests.tools.crashes import CUT_STEP, CUT_STEPS, cut_at_times, every_crash
from tests.tools.living_sessions import sessions_living_on
from txnstore.db.opening import open_store
from txnstore.db.store import Store
from txnstore.testing.postgres_server import connection_string

_OF_A_SESSION = """
    SELECT pg_try_advisory_lock(1), pg_try_advisory_lock(2), to_regclass('pg_temp.kept') IS NULL, current_user,
           current_setting('work_mem'), current_setting('search_path'), current_setting('application_name'),
           (SELECT count(*) FROM pg_listening_channels()), (SELECT count(*) FROM pg_prepared_statements),
           (SELECT count(*) FROM pg_cursors), pg_current_xact_id_if_assigned() IS NULL"""


def leave_everything(url: str, *, is_failed: bool = False) -> psycopg.Connection:
    """Return a connection whose session holds all that one can hold, some of it in a transaction that is open."""
    connection = psycopg.connect(connection_string(url), autocommit=True)
    connection.execute("CREATE TEMP TABLE kept (n int)")
    connection.execute("SET work_mem = '3MB'; SET search_path = pg_temp; SET application_name = 'dead'; LISTEN dead")
    connection.execute("SELECT pg_advisory_lock(1)")
    connection.execute("PREPARE kept AS SELECT 1")
    connection.execute("DECLARE kept CURSOR WITH HOLD FOR SELECT 1")
    connection.execute("BEGIN; SELECT pg_advisory_xact_lock(2); INSERT INTO kept VALUES (1); NOTIFY dead")
    connection.execute("SET ROLE pg_monitor")
    if is_failed:
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1 / 0")
    return connection


@pytest.mark.parametrize("is_failed", [False, True])
def test_a_session_that_lives_on_is_like_a_new_one_and_out_of_reach_of_the_dead(txnstore_postgresql_url, is_failed):
    url = connection_string(txnstore_postgresql_url)
    with psycopg.connect(url) as other:
        new = other.execute(_OF_A_SESSION).fetchone()
    with sessions_living_on():
        dead = leave_everything(txnstore_postgresql_url, is_failed=is_failed)
        number, cursor = dead.info.backend_pid, dead.cursor()
        dead.close()
        with closing(psycopg.connect(url)) as connection:
            assert connection.info.backend_pid == number
            assert connection.execute(_OF_A_SESSION).fetchone() == new
            assert list(connection.notifies(timeout=0)) == []
            for refused in (lambda: dead.execute("COMMIT"), lambda: cursor.execute("COMMIT"), dead.commit):
                with pytest.raises(psycopg.OperationalError, match=r"closed|lost"):
                    refused()
            dead.close()
            assert connection.execute("SELECT 1").fetchone() == (1,)
        # Other options: another session.
        with psycopg.connect(url, application_name="another") as another:
            assert another.info.backend_pid != number


def test_a_session_is_cut_at_its_turn_and_where_the_server_has_ended_it_there_is_a_new_one(txnstore_postgresql_url):
    url = connection_string(txnstore_postgresql_url)
    with sessions_living_on():
        first = psycopg.connect(url, autocommit=True)
        with cut_at_times(CUT_STEP + CUT_STEPS):
            first.close()
        second = psycopg.connect(url, autocommit=True)
        third = psycopg.connect(url, autocommit=True)
        number = second.info.backend_pid
        second.close()
        third.execute("SELECT pg_terminate_backend(%s, 10000)", [number])
        fourth = psycopg.connect(url, autocommit=True)
        assert fourth.execute("SELECT 1").fetchone() == (1,)
        assert fourth.info.backend_pid != number
        for connection in (third, fourth):
            connection.close()
    with psycopg.connect(url) as new:
        assert new.info.backend_pid != number


@pytest.mark.slow
@pytest.mark.crashes
def test_most_crashes_leave_the_session_to_the_next_process_and_some_are_cuts(txnstore_postgresql_url):
    sessions = []

    def look_often(store: Store) -> None:
        store.read(lambda connection: [connection.exec_driver_sql(f"SELECT {number}") for number in range(8)])

    with open_store(txnstore_postgresql_url, pool_size=1) as store:
        for crash in every_crash(lambda: [store], lambda stores: look_often(*stores)):
            crash.revive()
            number = store.read(lambda connection: connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())
            sessions.append((crash.step, number))
    changes = [step for (step, number), (_, before) in zip(sessions[1:], sessions, strict=False) if number != before]
    # The very first connection is older than the test.
    assert changes == [2, 2, 10, 10]
