"""Roles in a cluster of several databases: on PostgreSQL alone, for roles are its."""

from __future__ import annotations

import threading

import pytest

from tests.cluster.lost_changes import backup_of
from tests.db.roles.shop import PATIENCE_SECONDS, ROLES
from txnstore import Consumer, Producer
from txnstore.db.cluster.cluster import open_cluster
from txnstore.db.roles import grants
from txnstore.errors import StoreUnavailable
from txnstore.log.cluster_topics import create_topic
from txnstore.log.topics import grow_topic


@pytest.fixture
def databases(bare, new_database):
    """Return the URLs of two databases, as the superuser or as a role, which has its rights in both."""
    names = (bare.name, new_database())

    def urls(role=None):
        as_role = () if role is None else (bare.roles[role], "secret")
        return ",".join(bare.server.url(name, *as_role) for name in names)

    with open_cluster(urls()) as cluster:
        create_topic(cluster, "orders", partition_count=2, config={"txnstore.placement": "roundrobin"})
        for store in cluster.stores():
            for role, kinds in ROLES.items():
                for kind in kinds:
                    grants.apply(store, grants.grant(store, kind, bare.roles[role]))
    return urls


def names_in_each(cluster, prefix):
    """Return a name that the first database coordinates, and one that the second one does."""
    names = [f"{prefix}-{number}" for number in range(100)]
    return [next(name for name in names if cluster.coordinator_id_of(name) == number) for number in (1, 2)]


@pytest.mark.slow
def test_a_worker_and_a_reader_do_their_work_wherever_ids_and_groups_live(databases):
    reads = {"auto.offset.reset": "earliest", "enable.auto.commit": False}
    with open_cluster(databases()) as cluster:
        transactional_ids, groups = names_in_each(cluster, "id"), names_in_each(cluster, "group")
    with Producer({"bootstrap.servers": databases("writer"), "transactional.id": "seed"}) as producer:
        producer.init_transactions(PATIENCE_SECONDS)
        with producer.transaction():
            for partition in (0, 1):
                producer.produce("orders", b"first", partition=partition)
    for role in ("reader", "worker"):
        for group in groups:
            of_role = {"bootstrap.servers": databases(role), "group.id": f"{role}-{group}", **reads}
            with Consumer(of_role) as consumer:
                consumer.subscribe(["orders"])
                assert [message.value() for message in consumer.consume(2, PATIENCE_SECONDS)] == [b"first"] * 2
                consumer.commit(asynchronous=False)
    for transactional_id in transactional_ids:
        for group in groups:
            of_worker = {"bootstrap.servers": databases("worker"), "group.id": f"{transactional_id}-{group}", **reads}
            with (
                Consumer(of_worker) as consumer,
                Producer({"bootstrap.servers": databases("worker"), "transactional.id": transactional_id}) as producer,
            ):
                producer.init_transactions(PATIENCE_SECONDS)
                consumer.subscribe(["orders"])
                assert len(consumer.consume(2, PATIENCE_SECONDS)) == 2
                with producer.transaction():
                    for partition in (0, 1):
                        producer.produce("orders", b"next", partition=partition)
                    producer.send_offsets_to_transaction(
                        consumer.position(consumer.assignment()), consumer.consumer_group_metadata()
                    )


@pytest.mark.slow
def test_who_may_not_bring_the_newest_topics_to_a_database_waits_for_somebody_who_may(databases, monkeypatch):
    with open_cluster(databases()) as upkeep, open_cluster(databases("writer")) as cluster:
        assert not cluster.reconcile(2)
        upkeep.controller.write(lambda connection: grow_topic(connection, "orders", partition_count=4))
        with pytest.raises(StoreUnavailable, match=r"does not have the newest topics yet.*`txnstore maintain`"):
            cluster.reconcile(2)
        delivered, refused = [], threading.Event()
        reconcile = type(cluster).reconcile

        def noting(self, database_id):
            try:
                return reconcile(self, database_id)
            except StoreUnavailable:
                refused.set()
                raise

        monkeypatch.setattr(type(cluster), "reconcile", noting)
        with Producer({"bootstrap.servers": databases("writer")}) as producer:
            producer.produce(
                "orders", b"late", partition=3, on_delivery=lambda error, message: delivered.append((error, message))
            )
            assert refused.wait(PATIENCE_SECONDS)
            assert upkeep.reconcile(2)
            assert producer.flush(PATIENCE_SECONDS) == 0
    ((error, message),) = delivered
    assert error is None
    assert message.offset() == 0


def test_a_writer_starts_again_where_its_coordinator_has_gone_back(databases):
    with open_cluster(databases()) as cluster:
        transactional_id, _ = names_in_each(cluster, "id")
        of_writer = {"bootstrap.servers": databases("writer"), "transactional.id": transactional_id}
        with Producer(of_writer) as newer, Producer(of_writer) as producer:
            producer.init_transactions(PATIENCE_SECONDS)
            producer.begin_transaction()
            producer.produce("orders", b"old", partition=1)
            assert producer.flush(PATIENCE_SECONDS) == 0
            restore = backup_of(cluster.own(1))
            producer.commit_transaction(PATIENCE_SECONDS)
            producer.begin_transaction()
            producer.produce("orders", b"lost", partition=1)
            assert producer.flush(PATIENCE_SECONDS) == 0
            restore()
            # It looks of which epoch the transaction is that is open there.
            newer.init_transactions(PATIENCE_SECONDS)
