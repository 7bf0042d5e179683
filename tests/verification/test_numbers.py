"""A database that gives out again what it has given out is found, before anybody has got it."""

from __future__ import annotations

import pytest
from sqlalchemy import insert

from txnstore.db.opening import open_store
from txnstore.db.schema import outbox
from txnstore.db.store import Store
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.topics import create_topic
from txnstore.model import ProducerIdentity, Record
from txnstore.transactions.coordinator import TransactionCoordinator
from txnstore.verification.invariants import Invariant
from txnstore.verification.numbers import number_violations
from txnstore.verification.verify import verify_store


def put(store: Store, partition_id: int) -> None:
    """Append a record that is in no transaction."""
    store.write(lambda connection: append(connection, [Append(partition_id, encode([Record(b"plain")]))]))


def commit(store: Store, partition_id: int) -> ProducerIdentity:
    """Commit a transaction of a record."""
    coordinator = TransactionCoordinator(store)
    producer = coordinator.init_producer_id("worker").identity
    batch = encode([Record(b"committed")], producer=producer, base_sequence=0, is_transactional=True)
    coordinator.end_transaction("worker", producer, commit=True, appends=[Append(partition_id, batch)])
    return producer


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("table", "key", "names"),
    [
        ("topics", "topic_id", {"topic_id"}),
        ("partitions", "partition_id", {"partition_id"}),
        ("outbox", "outbox_id", {"outbox_id"}),
        ("transaction_log", "entry_id", {"entry_id", "commit_number"}),
    ],
)
@pytest.mark.parametrize("writes_last", [put, commit])
def test_numbers_that_would_come_again_are_found(store, table, key, names, writes_last) -> None:
    """As where rows were brought by logical replication, which brings no sequences."""
    (partition_id,) = store.write(lambda connection: create_topic(connection, "orders")).partition_ids
    for write in (put, commit, writes_last):
        write(store, partition_id)
    store.write(lambda connection: connection.execute(insert(outbox).values(topic="orders")))
    assert verify_store(store) == []
    following = store.read(lambda connection: store.backend.next_key(connection, store.schema, table, key))

    def set_back(to: int) -> None:
        store.write(lambda connection: store.backend.set_next_key(connection, store.schema, table, key, to))

    for to, least in ((1, names), (following - 1, set())):
        set_back(to)
        found = verify_store(store)
        assert {violation.invariant for violation in found} == {Invariant.NUMBERS_AHEAD}
        assert {violation.seen.split()[-4] for violation in found} >= least
    set_back(following)
    assert verify_store(store) == []


def test_a_role_that_may_not_know_them_finds_nothing_wrong(txnstore_postgresql_url) -> None:
    role = "txnstore_test_numbers"

    def look(connection) -> None:
        store.backend.set_next_key(connection, store.schema, "partitions", "partition_id", 1)
        for statement in (
            f"CREATE ROLE {role}",
            f"GRANT USAGE ON SCHEMA txnstore TO {role}",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA txnstore TO {role}",
            f"SET LOCAL ROLE {role}",
        ):
            connection.exec_driver_sql(statement)
        assert number_violations(store, connection) == []
        connection.exec_driver_sql("RESET ROLE")
        assert len(number_violations(store, connection)) == 1
        connection.exec_driver_sql(f"DROP OWNED BY {role}")
        connection.exec_driver_sql(f"DROP ROLE {role}")

    with open_store(txnstore_postgresql_url) as store:
        put(store, store.write(lambda connection: create_topic(connection, "orders")).partition_ids[0])
        store.write(look)
