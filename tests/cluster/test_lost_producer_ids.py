"""A database of a cluster that has lost its last changes gives nobody the producer id of somebody who lives on.

What that one has written is in the other databases, which would take the records of the new one for repetitions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from sqlalchemy import Connection, delete, select, update

from tests.cluster.conftest import Bench, Producer, Site
from tests.tools.crashes import every_crash, noting
from txnstore.db.cluster.cluster import Cluster, repaired
from txnstore.db.cluster.membership import PRODUCER_ID_BITS
from txnstore.db.schema import stores, transaction_log, transaction_partitions, transactions
from txnstore.db.store import Store
from txnstore.errors import InvalidProducerIdMapping
from txnstore.log import partition_rows
from txnstore.log.append import Append, append
from txnstore.log.codec import encode
from txnstore.log.partition_rows import PRODUCER_IDS_IN_TURN_MS, allocate_producer_id
from txnstore.model import IsolationLevel, ProducerIdentity, Record
from txnstore.testing.manual_clock import ManualClock
from txnstore.transactions.coordinator import TransactionCoordinator

#: As it is for users: conftest.py changes it.
PRODUCER_ID_MS = 10

EACH_DATABASE = pytest.mark.parametrize("database_id", [1, 2, 3])


@pytest.fixture(autouse=True)
def _ids_by_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_rows, "PRODUCER_ID_MS", PRODUCER_ID_MS)


@dataclass
class Idempotent:
    """A producer without a transactional id, that counts."""

    cluster: Cluster
    identity: ProducerIdentity
    sequences: dict[int, int] = field(default_factory=dict)

    def send(self, partition_id: int, value: bytes) -> None:
        first = self.sequences.get(partition_id, 0)
        self.sequences[partition_id] = first + 1
        batch = Append(partition_id, encode([Record(value)], producer=self.identity, base_sequence=first))
        leader = self.cluster.leader_of_partition(partition_id)
        repaired(self.cluster, leader, lambda store: store.write(lambda connection: append(connection, [batch])))


def idempotent(cluster: Cluster, database_id: int) -> Idempotent:
    coordinator = TransactionCoordinator(cluster.own(database_id), cluster)
    return Idempotent(cluster, coordinator.init_producer_id(None).identity)


def next_of(store: Store) -> int:
    return int(store.read(lambda connection: connection.execute(select(stores.c.next_producer_id)).scalar_one()))


def make_now(store: Store, clock: ManualClock) -> None:
    """Let the store be made now, by the test's clock."""
    store.write(lambda connection: connection.execute(update(stores).values(created_ms=clock.now_ms())))


def go_back(store: Store, producer_id: int, transactional_id: str = "") -> None:
    """Let the store lose that it has given out ids from this one on, and who had them."""

    def work(connection: Connection) -> None:
        connection.execute(update(stores).values(next_producer_id=producer_id))
        for table in (transaction_partitions, transaction_log, transactions):
            connection.execute(delete(table).where(table.c.transactional_id == transactional_id))

    store.write(work)


@pytest.mark.slow_but_first
@EACH_DATABASE
def test_records_of_who_comes_after_the_loss_and_of_who_lives_on_are_all_there(bench: Bench, database_id: int):
    store, elsewhere = bench.cluster.own(database_id), bench.partition_at(database_id % 3 + 1)
    make_now(store, bench.clock)
    bench.clock.advance(PRODUCER_ID_MS)
    before = next_of(store)
    living = idempotent(bench.cluster, database_id)
    living.send(elsewhere, b"a")
    go_back(store, before)
    bench.clock.advance(PRODUCER_ID_MS)
    with bench.site.open() as cluster:
        newcomer = idempotent(cluster, database_id)
        assert newcomer.identity != living.identity
        newcomer.send(elsewhere, b"b")
        living.send(elsewhere, b"c")
        newcomer.send(elsewhere, b"d")
        assert cluster.coordinator_of_producer(newcomer.identity.producer_id) is cluster.own(database_id)
    assert bench.read(elsewhere) == [b"a", b"b", b"c", b"d"]


@pytest.mark.slow_but_first
@EACH_DATABASE
def test_a_transaction_whose_start_was_lost_ends_nowhere_and_another_one_is_not_taken_for_it(
    bench: Bench, database_id: int
):
    store, elsewhere = bench.cluster.own(database_id), bench.partition_at(database_id % 3 + 1)
    make_now(store, bench.clock)
    bench.clock.advance(PRODUCER_ID_MS)
    before = next_of(store)
    living = bench.producer_at(database_id)
    living.send(elsewhere, b"a")
    go_back(store, before, living.transactional_id)
    bench.clock.advance(PRODUCER_ID_MS)
    newcomer = bench.producer_at(database_id)
    newcomer.send(elsewhere, b"b")
    for request in (lambda: living.send(bench.partition_at(database_id), b"c"), lambda: living.end(commit=True)):
        with pytest.raises(InvalidProducerIdMapping):
            request()
    newcomer.end(commit=True)
    # Started again, it is a third.
    again = Producer(bench.cluster, living.transactional_id).start()
    assert len({producer.identity.producer_id for producer in (living, newcomer, again)}) == 3
    assert bench.read(elsewhere, IsolationLevel.READ_UNCOMMITTED) == [b"a", b"b"]
    assert bench.markers(elsewhere) == [(1, 1)]


def test_where_ids_are_as_old_as_the_store_from_the_second_database_on(site: Site):
    first = site.urls[0]
    with site.open(first) as old:
        make_now(old.controller, site.clock)
        site.clock.advance(PRODUCER_ID_MS * 1_000)
        assert old.controller.write(allocate_producer_id) == 0
        with site.open() as cluster:
            # Whatever a client has heard of.
            assert old.is_alone
            assert old.controller.write(allocate_producer_id) == 1_000
            member = cluster.own(2)
            make_now(member, site.clock)
            site.clock.advance(PRODUCER_ID_MS * 500)
            assert member.write(allocate_producer_id) == (1 << PRODUCER_ID_BITS) + 500
            # A clock that was set back gives nothing out again.
            site.clock.advance(-PRODUCER_ID_MS * 2_000)
            assert cluster.controller.write(allocate_producer_id) == 1_001
            assert member.write(allocate_producer_id) == (1 << PRODUCER_ID_BITS) + 501
            site.clock.advance(PRODUCER_IDS_IN_TURN_MS + PRODUCER_ID_MS * 2_000)
            assert cluster.controller.write(allocate_producer_id) == PRODUCER_IDS_IN_TURN_MS // PRODUCER_ID_MS + 1_500


@pytest.mark.crashes
def test_an_id_that_was_given_to_somebody_who_died_at_once_is_lost_and_given_to_nobody_else(sqlite_bench: Bench):
    clock, lost = sqlite_bench.clock, set[int]()
    with sqlite_bench.site.open() as caller, sqlite_bench.site.open() as others:
        store = others.own(2)
        make_now(store, clock)
        assert len(list(caller.stores())) == 3

        def make() -> int:
            clock.advance(PRODUCER_ID_MS)
            return next_of(store)

        for crash in every_crash(make, lambda _: idempotent(caller, 2), statements_are_all=True):
            crash.revive()
            with noting(crash):
                given = range(crash.subject, next_of(store))
                assert len(given) <= 2
                lost |= {*given}
                go_back(store, crash.subject)
                clock.advance(PRODUCER_ID_MS)
                found = idempotent(others, 2).identity.producer_id
                assert found not in lost
                lost.add(found)
