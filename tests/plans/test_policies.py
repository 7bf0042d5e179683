"""What calls of a role that row-level security limits touch in the big store: hardly more than those of others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.plans.big_store import BigStore
from tests.plans.measuring import measured
from tests.plans.test_plans import CALLS, Call, assert_at_most
from txnstore.db.opening import open_store
from txnstore.db.roles import grants
from txnstore.db.roles.grants import RoleScope
from txnstore.db.roles.rights import Kind
from txnstore.log.topics import list_topics
from txnstore.testing.postgres_server import PostgresServer

pytestmark = pytest.mark.slow

BOUNDS = RoleScope(("big",), ("group *", "client *", "simple"), ("producer *", "client *", "id *"))
#: What a role with a producer's and a consumer's rights does not do; one with limits has one database alone.
OF_OTHERS = {
    "completion of many commits over several databases",
    "completion of many aborts over several databases",
    "search for hanging transactions",
    "what holds readers back",
    "what holds readers of a partition back",
    "figures for a scrape",
    "administrator",
    "look into the outbox",
    "numbers given out",
    "abort by an administrator",
}
#: Each statement asks besides, for each table that it names, which partitions the role may see: there are four. One
#: about several partitions names its tables for each of them.
POLICY_ROWS = 100


@pytest.fixture(scope="module")
def worker(txnstore_postgres_server: PostgresServer) -> Iterator[str]:
    role = f"txnstore_plans_{os.getpid()}"
    txnstore_postgres_server.create_role(role, "secret")
    yield role
    txnstore_postgres_server.drop_role(role)


@pytest.fixture(scope="module")
def limited(big_on_postgresql: BigStore, worker: str, txnstore_postgres_server: PostgresServer) -> Iterator[BigStore]:
    """The big store as the worker opens it."""
    big = big_on_postgresql
    for kind in (Kind.PRODUCER, Kind.CONSUMER):
        grants.apply(big.store, grants.grant(big.store, kind, worker, BOUNDS))
    database = big.store.url.url.database
    assert database is not None
    url = txnstore_postgres_server.url(database, worker, "secret")
    with open_store(url) as store:
        yield replace(big, store=store, url=url)
    grants.apply(big.store, grants.revoke(big.store, worker))


@pytest.mark.parametrize(
    "call",
    [call for call in CALLS if call.rows < 5_000 and call.name not in OF_OTHERS],
    ids=lambda call: call.name,
)
def test_a_call_of_a_limited_role_touches_what_it_is_about_and_nothing_else(limited: BigStore, call: Call) -> None:
    run = call.run(limited)
    with measured("postgresql") as found:
        run()
    assert found
    for touched in found:
        assert_at_most(call.rows + POLICY_ROWS * (1 + touched.statement.count(" UNION ALL ")), [touched])


def test_the_policies_are_in_force(limited: BigStore, big_on_postgresql: BigStore) -> None:
    """Without that the other test would look at what everybody sees."""
    assert set(big_on_postgresql.store.read(list_topics)) > {"big"}
    assert limited.store.read(list_topics) == ["big"]
