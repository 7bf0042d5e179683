"""The warning of servers on other machines that prove nothing: for whom it comes, once, and what it says."""

from __future__ import annotations

import logging
import math

import pytest

from txnstore.db.opening import connect_store
from txnstore.db.postgresql import protection
from txnstore.testing.postgres_server import PostgresServer
from txnstore.trouble import RepeatedTrouble

SECRET = "Hunter2SecretWord"
VARIABLES = ("PGHOST", "PGHOSTADDR", "PGSSLMODE", "PGSSLROOTCERT", "PGGSSENCMODE")


@pytest.fixture(autouse=True)
def _nobody_was_warned(monkeypatch):
    monkeypatch.setattr(protection, "_unverified", RepeatedTrouble(math.inf))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def told(caplog):
    """Return the warnings that a URL brings, without connecting."""

    def open_(url):
        caplog.clear()
        connect_store(url).close()
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    return open_


REMOTE = [
    "postgresql://alice:{}@db.example/shop",
    "postgresql://alice:{}@192.0.2.7:5433/shop",
    "postgresql://alice:{}@[2001:db8::7]/shop",
    "postgresql://alice:{}@localhost.example/shop",
    "postgresql://alice:{}@db.example/shop?sslmode=disable",
    "postgresql://alice:{}@db.example/shop?sslmode=require",
    "postgresql://alice:{}@/shop?host=db.example",
    "postgresql://alice:{}@/shop?host=localhost:1&host=db.example:2",
    "postgresql://alice:{}@localhost/shop?hostaddr=192.0.2.7",
    "postgresql://alice:{}@db.example/shop?sslrootcert=/file",
]
PROTECTED = [
    "postgresql://alice:{}@db.example/shop?sslmode=verify-full",
    "postgresql://alice:{}@db.example/shop?sslmode=verify-ca",
    "postgresql://alice:{}@db.example/shop?sslrootcert=system",
    "postgresql://alice:{}@db.example/shop?gssencmode=require",
    "postgresql://alice:{}@localhost/shop",
    "postgresql://alice:{}@LOCALHOST./shop",
    "postgresql://alice:{}@127.0.0.2/shop",
    "postgresql://alice:{}@[::1]/shop",
    "postgresql://alice:{}@/shop",
    "postgresql://alice:{}@/shop?host=/var/run/postgresql",
    "postgresql://alice:{}@db.example/shop?hostaddr=127.0.0.1",
]


@pytest.mark.parametrize("url", REMOTE)
def test_who_proves_nothing_is_warned_of_once(url, told):
    (warning,) = told(url.format(SECRET))
    assert "sslmode=verify-full" in warning
    assert SECRET not in warning
    assert told(url.format(SECRET)) == []


@pytest.mark.parametrize("url", PROTECTED)
def test_of_this_machine_and_of_who_proves_who_he_is_nothing_is_said(url, told):
    assert told(url.format(SECRET)) == []


def test_each_host_is_named_once(told):
    assert "'one.example'" in told("postgresql://one.example/shop")[0]
    assert "'two.example'" in told("postgresql://two.example/shop")[0]
    assert told("postgresql://one.example/other") == []


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"PGSSLMODE": "verify-full"}, 0),
        ({"PGSSLMODE": "require"}, 1),
        ({"PGSSLROOTCERT": "system"}, 0),
        ({"PGHOSTADDR": "127.0.0.1"}, 0),
    ],
)
def test_what_the_environment_says_counts(variables, count, told, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert len(told("postgresql://db.example/shop")) == count


def test_a_host_from_the_environment_is_a_host(told, monkeypatch):
    monkeypatch.setenv("PGHOST", "db.example")
    assert len(told("postgresql:///shop")) == 1


def test_the_server_of_the_tests_is_local(told, txnstore_postgres_server: PostgresServer):
    assert told(txnstore_postgres_server.url("postgres")) == []
