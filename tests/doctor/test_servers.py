"""What is told of a server by its version and its state: that it gets no more fixes, or follows another one."""

from __future__ import annotations

import os
import time

import pytest

from tests.doctor.test_examination import DAY_MS, HOUR_MS, LAST_DAY_MS, found, seen
from txnstore.db.names import VERSION_TABLE
from txnstore.db.opening import open_store
from txnstore.db.postgresql.facts import PostgreSQLFacts, read_postgresql_facts
from txnstore.db.url import parse_url
from txnstore.doctor import postgresql
from txnstore.doctor.checks import Grade
from txnstore.testing.private_cluster import PrivateCluster, server_user


@pytest.mark.parametrize(
    ("server_version", "ahead_ms"), [(140_022, DAY_MS - 1), (150_001, 2 * DAY_MS), (990_000, 10**6 * DAY_MS)]
)
def test_a_server_that_gets_fixes_or_is_newer_than_we_know_of_is_no_finding(server_version, ahead_ms):
    facts = PostgreSQLFacts("txnstore", server_version=server_version, server_ms=LAST_DAY_MS + ahead_ms)
    assert not list(postgresql._end_of_life.find(facts))


def test_the_age_of_a_server_goes_by_its_own_clock(txnstore_postgresql_url, monkeypatch):
    now_ms = time.time_ns() // 1_000_000
    monkeypatch.setattr("txnstore.db.postgresql.facts.time.time_ns", lambda: 0)
    facts = read_postgresql_facts(parse_url(txnstore_postgresql_url), "txnstore", version_table=VERSION_TABLE)
    assert abs((facts.server_ms or 0) - now_ms) < HOUR_MS


@pytest.mark.slow
def test_a_standby_is_a_problem_and_nothing_else_of_it_is():
    """One that follows another server, which is not there."""
    with PrivateCluster(fsync=False) as cluster:
        url = cluster.url("postgres")
        open_store(url).close()
        assert seen(url) == {}
        cluster.stop()
        marker = cluster.folder / "data" / "standby.signal"
        marker.touch()
        if (user := server_user()) is not None:
            os.chown(marker, user.user_id, user.group_id)
        cluster.start()
        assert seen(url) == {"replica": "the server is in recovery: a standby"}
        assert found(url)["replica"].grade is Grade.PROBLEM
